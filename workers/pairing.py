"""Puts a pair together: its models, its fuser, how it is to be run, and what its report says. Knows no engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from workers import hub, pairs, sealing, vocabulary
from workers.config import Fleet, PairConfig
from workers.errors import LoadFailed
from workers.fusers.base import Fuser
from workers.fusers.identity import IdentityFuser
from workers.fusers.several import JointFuser
from workers.loader import Loaded, Loader
from workers.pairs import shape_recipe
from workers.prompt import WITHOUT_THINKING
from workers.protocol import PairState
from workers.response import Responding
from workers.runtime import Alone, Paired, Runtime
from workers.store import KVStore

if TYPE_CHECKING:
    from workers.fusers.c2c import Fusion, Official
    from workers.fusers.linear import LinearFuser
    from workers.fusers.lite import LiteFuser
    from workers.fusers.mix import MixFuser


@dataclass(frozen=True, slots=True)
class HeldPair:
    """A pair that is ready to run, and what is known of it."""

    runtime: Runtime
    state: PairState


def hold_pair(fleet: Fleet, config: PairConfig, loader: Loader, store: KVStore | None, chunk: int) -> HeldPair:
    """Load the models and the fuser. Raises LoadFailed when a part is missing or is not the one the pair names."""
    sharers = [loader.load(fleet.model(ref)) for ref in config.parties]
    receiver = loader.load(fleet.model(config.receiver))
    folder = fuser_folder(config.fuser)
    file = pairs.read_pair(folder) if folder is not None and (folder / "pair.json").exists() else None
    kind = fuser_kind(config, folder)
    mode = pair_mode(config, folder, kind)
    scope = config.scope or (file.scope if file else "prompt")
    doubt = check_parties(file, sharers, receiver) if file is not None else ""
    pair = _Parts(config, sharers, receiver, mode=mode, scope=scope, store=store, chunk=chunk)
    if kind == "c2c" and folder is not None:
        runtime = _official(pair, folder, file)
    elif len(sharers) > 1:
        raise LoadFailed(f"pair {config.name}: several sharers are joined by c2c fusers only, and this one is {kind}")
    elif kind == "identity":
        runtime = _identity(pair)
    else:
        fuser = load_fuser(kind, folder, receiver, mode)
        _require_mode(config.name, fuser, mode)
        runtime = _ours(pair, fuser)
    # What several fusers were proven to do is said nowhere: each report is about its own pair.
    report = pairs.read_report(folder) if folder is not None and not config.fusers else None
    state = PairState(config.name, runtime.fingerprint, mode, scope, kind, runtime.context)
    numerics = (str(receiver.dtype).removeprefix("torch."), store.codec if store is not None else "exact")
    if folder is None or config.fusers:
        return HeldPair(runtime, with_report(state, report, doubt, numerics))
    return HeldPair(runtime, _sealed(state, folder, report, doubt, numerics))


@dataclass(frozen=True, slots=True)
class _Parts:
    """A pair's models and how they are to be run."""

    config: PairConfig
    sharers: list[Loaded]
    receiver: Loaded
    mode: str
    scope: str
    store: KVStore | None
    chunk: int

    def joined(self, fuser: Fuser | JointFuser, kind: type[Paired] = Paired, **more: Any) -> Paired:
        first, *others = self.sharers
        return kind(
            self.config.name,
            first,
            self.receiver,
            fuser,
            mode=self.mode,
            scope=self.scope,
            store=self.store,
            chunk=self.chunk,
            others=others,
            **more,
        )


def fuser_kind(config: PairConfig, folder: Path | None) -> str:
    """What `pair.json` says; a folder without one is a checkpoint in the official layout."""
    if folder is not None and (folder / "pair.json").exists():
        return pairs.read_pair(folder).fuser.kind
    return "identity" if config.fuser == "identity" else "c2c"


def pair_mode(config: PairConfig, folder: Path | None, kind: str) -> str:
    """As the config says, else `pair.json`, else what the kind is made for."""
    if config.mode is not None:
        return config.mode
    if folder is not None and (folder / "pair.json").exists():
        return pairs.read_pair(folder).mode
    return "handover" if kind == "identity" else "fuse"


def fuser_folder(fuser: str) -> Path | None:
    """None for a bare `identity`; else a folder, a folder inside an installed package, or one fetched from the hub."""
    if fuser == "identity":
        return None
    path = Path(fuser).expanduser()
    if path.is_dir():
        return path
    if not hub.is_name(fuser):
        raise LoadFailed(f"fuser {fuser!r}: no such folder")
    return hub.fetch(fuser)


def load_fuser(kind: str, folder: Path | None, receiver: Loaded, mode: str) -> LiteFuser | MixFuser | LinearFuser:
    """Our own networks. Raises LoadFailed."""
    if folder is None:
        raise LoadFailed(f"a fuser of kind {kind!r} needs a folder")
    if kind == "lite":
        from workers.fusers.lite import LiteFuser
        from workers.fusers.mix import MixFuser
        from workers.fusers.mix_net import NETWORK

        network = pairs.read_pair(folder).fuser.shape.get("network")
        if network not in (None, NETWORK):
            raise LoadFailed(f"{folder}: a lite fuser of network {network!r}, which this release does not know")
        made = LiteFuser if network is None else MixFuser
        return made.from_folder(folder, receiver.dtype, receiver.device)
    if kind == "linear":
        from workers.fusers.linear import LinearFuser

        return LinearFuser.from_folder(folder, receiver.dtype, receiver.device, mode=mode)
    raise LoadFailed(f"{folder}: fusers of kind {kind!r} are not supported; there are c2c, lite, linear, identity")


def _ours(pair: _Parts, fuser: LiteFuser | MixFuser | LinearFuser) -> Runtime:
    """Our own networks, run as their shapes say."""
    from workers.fusers.mix import MixFuser

    # Their digest is over the weights alone: which layers those map, and how far, is said by the shape.
    recipe = shape_recipe(fuser.shape)
    if not isinstance(fuser, MixFuser):
        return pair.joined(fuser, recipe=recipe)
    sharer, receiver = pair.sharers[0], pair.receiver
    for role, model, shape in (("sharer", sharer, fuser.shape.sharer), ("receiver", receiver, fuser.shape.receiver)):
        if model.shape != shape:
            raise LoadFailed(f"pair {pair.config.name}: its fuser was made for a {role} of another KV shape")
    if read_alike(sharer, receiver):
        return pair.joined(fuser, recipe=recipe, template=WITHOUT_THINKING, piecewise=not fuser.shape.last)
    from workers.matched_runtime import MatchedPair

    for role, model in (("sharer", sharer), ("receiver", receiver)):
        if model.tokenizer.chat_template is None:
            raise LoadFailed(f"pair {pair.config.name}: the {role} has no chat template, so chats cannot be matched")
    recipe["tokens"] = "matched"
    return pair.joined(fuser, MatchedPair, recipe=recipe, template=WITHOUT_THINKING)


def read_alike(sharer: Loaded, receiver: Loaded) -> bool:
    """The sharer may read the receiver's token ids as they are."""
    if sharer.digests.tokenizer == receiver.digests.tokenizer:
        return True
    ours, theirs = receiver.tokenizer.get_vocab(), sharer.tokenizer.get_vocab()
    return vocabulary.compare(ours, theirs, sharer.vocab).ids_pass


def _require_mode(name: str, fuser: Fuser | JointFuser, mode: str) -> None:
    """A fuser is made for one mode: with the receiver's own KV, or without."""
    able = "fuse" if fuser.needs_own else "handover"
    if mode != able:
        raise LoadFailed(f"pair {name}: a {fuser.kind} fuser runs in mode {able}, not {mode}")


def _identity(pair: _Parts) -> Runtime:
    sharer, receiver = pair.sharers[0], pair.receiver
    digest = IdentityFuser(sharer.identity, receiver.identity, receiver.shape).digest
    if pair.mode != "handover":
        raise LoadFailed(f"pair {pair.config.name}: an identity pair runs in mode handover, not {pair.mode}")
    fingerprint = pairs.fingerprint(
        sharer.identity, receiver.identity, kind="identity", digest=digest, mode=pair.mode, scope=pair.scope
    )
    return Alone(pair.config.name, sharer, pair.store, pair.chunk, fingerprint=fingerprint, role="source")


def _official(pair: _Parts, folder: Path, file: pairs.PairFile | None) -> Runtime:
    """Published checkpoints, run as their recipes say."""
    read = [_checkpoint(pair, place) for place in range(len(pair.sharers))]
    fuser = read[0].fuser if len(read) == 1 else JointFuser([o.fuser for o in read], _fusion(pair.config, read))
    if file is not None and not pair.config.fusers:
        _require_digest(folder, file, pair.receiver, fuser)
    _require_mode(pair.config.name, fuser, pair.mode)
    first = read[0]
    if any(official.aligned for official in read):
        if len(read) > 1:
            raise LoadFailed(f"{folder}: its recipe aligns two tokenizers, and there are {len(read)} sharers")
        if first.include_response:
            raise LoadFailed(f"{folder}: its recipe is include_response, whose sharer must read the receiver's own ids")
        return _aligned(pair, folder, first)
    for sharer in pair.sharers:
        _require_ids(folder, sharer, pair.receiver)
    # The official method trains and serves without thinking.
    recipe = first.recipe | ({"fusion": fuser.fusion} if isinstance(fuser, JointFuser) else {})
    # Without an open gate the answer is the receiver's own, and there is nothing to include.
    kind = Responding if first.include_response and first.fuser.source_layers else Paired
    return pair.joined(fuser, kind, recipe=recipe, template=WITHOUT_THINKING)


def _checkpoint(pair: _Parts, place: int) -> Official:
    """Of one sharer: a folder of its own, or its part of the folder that was made for all."""
    from workers.fusers.c2c import load_official

    own = pair.config.fusers
    folder = fuser_folder(own[place] if own else pair.config.fuser)
    if folder is None:
        raise LoadFailed(f"pair {pair.config.name}: several sharers need c2c fusers, and one is identity")
    part = (0, 1) if own else (place, len(pair.sharers))
    sharer, receiver = pair.sharers[place], pair.receiver
    official = load_official(
        folder,
        receiver=receiver.shape,
        sharer=sharer.shape,
        dtype=receiver.dtype,
        device=receiver.device,
        place=part[0],
        sharers=part[1],
    )
    if own and (folder / "pair.json").exists():
        file = pairs.read_pair(folder)
        check_parties(file, [sharer], receiver)
        _require_digest(folder, file, receiver, official.fuser)
    return official


def _require_digest(folder: Path, file: pairs.PairFile, receiver: Loaded, fuser: Fuser | JointFuser) -> None:
    """The digest is over weights in the receiver's dtype: in another one it says nothing, and the pair is unproven."""
    if file.receiver.dtype == receiver.identity["dtype"] and file.fuser.digest != fuser.digest:
        raise LoadFailed(f"{folder}: its weights are not those that pair.json names")


def _fusion(config: PairConfig, read: list[Official]) -> Fusion:
    return config.fusion or read[0].fusion


def _require_ids(folder: Path, sharer: Loaded, receiver: Loaded) -> None:
    if sharer.digests.tokenizer != receiver.digests.tokenizer:
        overlap = vocabulary.compare(receiver.tokenizer.get_vocab(), sharer.tokenizer.get_vocab(), sharer.vocab)
        if not overlap.ids_pass:
            raise LoadFailed(
                f"{folder}: its recipe gives the receiver's token ids to the sharer as they are, and {overlap}"
            )


def _aligned(pair: _Parts, folder: Path, official: Official) -> Runtime:
    from workers.official_runtime import AlignedPair

    sharer, receiver = pair.sharers[0], pair.receiver
    if pair.scope != "prompt":
        raise LoadFailed(
            f"{folder}: a pair with two tokenizers fuses all messages; its scope is prompt, not {pair.scope}"
        )
    for role, model in (("sharer", sharer), ("receiver", receiver)):
        if model.tokenizer.chat_template is None:
            raise LoadFailed(f"{folder}: the {role} has no chat template, so chats cannot be aligned")
    return AlignedPair(pair.config.name, sharer, receiver, official, chunk=pair.chunk)


def check_parties(file: pairs.PairFile, sharers: Sequence[Loaded], receiver: Loaded) -> str:
    """Weights and tokenizers must be those of `pair.json`, else LoadFailed; a changed template is a doubt, returned."""
    doubt = ""
    named = (file.sharer, *file.others)
    if len(named) > len(sharers):
        raise LoadFailed(f"the pair {file.name} was made for {len(named)} sharers, not {len(sharers)}")
    parties = (
        *(("sharer", *both) for both in zip(named, sharers, strict=False)),
        ("receiver", file.receiver, receiver),
    )
    for role, party, loaded in parties:
        for part in ("weights", "tokenizer"):
            if getattr(party, part) != getattr(loaded.digests, part):
                raise LoadFailed(f"the {role}'s {part} are not those that the pair {file.name} was made for")
        if party.layers != loaded.identity["layers"]:
            raise LoadFailed(f"the {role} keeps layers {loaded.identity['layers']}; the pair wants {party.layers}")
        if party.template != loaded.digests.template:
            doubt = f"the {role}'s chat template has changed since the pair was proven"
    return doubt


def _sealed(
    state: PairState, folder: Path, report: pairs.Report | None, doubt: str, numerics: tuple[str, str]
) -> PairState:
    """What the report says, who signed it, and whether the pair was withdrawn."""
    if (taken := sealing.withdrawn(folder)) is not None:
        return msgspec.structs.replace(state, verdict="withdrawn", verdict_reason=f"{taken.reason} ({taken.date})")
    try:
        state = msgspec.structs.replace(state, signer=sealing.signer_of(folder))
    except LoadFailed as error:
        doubt = str(error)
    return with_report(state, report, doubt, numerics)


def _other_numerics(state: PairState, reason: str) -> PairState:
    return msgspec.structs.replace(state, verdict="numerics_differ", verdict_reason=reason)


def with_report(state: PairState, report: pairs.Report | None, doubt: str, numerics: tuple[str, str]) -> PairState:
    """A report counts only for exactly the pair that runs: same fingerprint, which covers the dtype. `numerics` is the
    receiver's dtype and how KV is stored: a pair that was proven in others is refused, and told why.
    """
    if report is None:
        return msgspec.structs.replace(state, verdict="unproven", verdict_reason="no report")
    dtype, stored = numerics
    proven = report.numerics.split(",")[0]
    if report.fingerprint != state.fingerprint:
        if proven != dtype:
            return _other_numerics(state, f"proven in {proven}, and this runs in {dtype}")
        return msgspec.structs.replace(
            state, verdict="unproven", verdict_reason="the report is about another fingerprint"
        )
    if stored != "exact" and f"kv {stored}" not in report.numerics:
        return _other_numerics(state, f"proven with exact KV, and stored KV is {stored} here")
    if doubt:
        return msgspec.structs.replace(state, verdict="unproven", verdict_reason=doubt)
    return msgspec.structs.replace(
        state,
        verdict=report.verdict,
        verdict_reason=report.reason,
        gain=report.gain.low if report.gain else None,
        retention=report.retention.low if report.retention else None,
        agreement=report.agreement.low if report.agreement else None,
    )

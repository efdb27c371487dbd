"""What a name stands for on a worker: one model alone, or a pair. Knows models, fusers and stored KV; no requests.

A runtime reads a prompt in chunks, under the engine's inference mode, as a generator that yields between them, so that
the engine can let running answers go on. What it returns is the KV that the receiver decodes from, and the logits of
the first token.

Taint: whatever a receiver computes after projected KV depends on that KV, so it is never stored as what the model
computes alone. Only `Alone` stores what it reads and writes under the `plain` space; a pair stores the sharer's and the
receiver's own reading (both untouched by fusing) and the projected slots under their own `fused` space.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Generator, Mapping
from collections.abc import Sequence as Listing
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import torch

from workers import pairs
from workers.buffers import Interrupted, Sequence
from workers.cache import KVCache
from workers.chunk import Chunk
from workers.errors import BadPrompt, PromptTooLong
from workers.fusers.base import Fuser, KVShape
from workers.fusers.several import JointFuser
from workers.keys import Scope, Space
from workers.loader import Loaded, shallow
from workers.prompt import Message, Prompt, chat_prompt, text_prompt
from workers.store import Claim, KVStore

if TYPE_CHECKING:
    from workers.response import Beside

_POLL = 0.002
"""Seconds between two looks whether another worker is done; answers that run get a token after each."""

Source = Callable[[tuple[int, ...]], tuple[int, ...] | None]
"""What a sharer reads in place of its ids, as many of them; None: it says nothing, its KV is zero."""

T = TypeVar("T")
Reading = Generator[tuple[Chunk, ...] | None, None, T]
"""Work in chunks, with its result at the end. Yields, before it reads them, the chunks that come next, which do not
need each other: others may read them. None where it only lets others go on."""
Steps = Generator[int | tuple[Chunk, ...] | None, None, T]
"""The same, of which steps may be no chunks of a prompt: then it yields how many tokens come next."""


@dataclass(frozen=True, slots=True)
class Keep:
    """Under which tenant KV may be found and stored, within what bounds, and what was: one for each request."""

    scope: Scope
    ttl: float
    max_bytes: int
    read: list[str] = field(default_factory=list, compare=False)
    """Artefacts that were used, as `role:digest:tokens`."""
    written: list[str] = field(default_factory=list, compare=False)


@dataclass(frozen=True, slots=True)
class Changed:
    """How far fusing moved the receiver's own KV, by layer: ‖fused − own‖₂ / ‖own‖₂."""

    keys: tuple[float, ...]
    values: tuple[float, ...]

    @property
    def mean(self) -> float:
        """Over layers, K and V."""
        both = (*self.keys, *self.values)
        return sum(both) / len(both)

    @classmethod
    def of(cls, parts: Listing[tuple[int, torch.Tensor]]) -> Changed:
        """Mean of `changes` over parts with weights. One transfer to the host."""
        total = sum(weight for weight, _ in parts)
        keys, values = sum(ratios * (weight / total) for weight, ratios in parts).tolist()  # type: ignore[union-attr]
        return cls(tuple(keys), tuple(values))


@dataclass(slots=True)
class Spent:
    """Where the time of one prompt went, in seconds of this thread, and what came from the store."""

    computed_tokens: int = 0
    compute_s: float = 0.0
    sharer_s: float = 0.0
    fuse_s: float = 0.0
    reused: int = 0
    gates_open: float = 1.0
    gates: str = ""
    change: Changed | None = None
    """None where nothing was fused beside the receiver's own KV."""
    score: float | None = None
    """Mean log probability of a token of the answer that was to be scored."""


@dataclass(slots=True)
class Prefilled:
    """The receiver's KV of the whole prompt, and the logits (vocabulary,) of what comes next."""

    kv: KVCache
    logits: torch.Tensor
    spent: Spent
    beside: Beside | None = None
    """Where the answer is fused as well: what that goes on from."""


class Runtime(Protocol):
    """One name on a worker."""

    name: str
    fingerprint: str
    context: int
    decoder: Loaded
    """The model that answers: it decodes, and its tokenizer makes the prompt."""
    chunk: int
    """Tokens of a prompt that it reads in one step, at most."""
    spaces: tuple[Space, ...]
    """Where its KV is stored."""
    digests: dict[str, str]
    """What its fingerprint is made of, part by part."""

    def chat(self, messages: Listing[Message]) -> Prompt:
        """OpenAI messages as it reads them. Raises BadPrompt."""

    def text(self, text: str) -> Prompt:
        """A raw completion prompt. Raises BadPrompt."""

    def rehearsal(self, tokens: int) -> Prompt:
        """A prompt of about so many tokens that takes the path of any other."""

    def prefill(self, prompt: Prompt, keep: Keep | None) -> Steps[Prefilled]:
        """Read the prompt. Raises BadPrompt."""

    def keep_answer(self, ids: tuple[int, ...], kv: KVCache, keep: Keep) -> None:
        """Store prompt and answer for the next turn, where that is exact."""


class OneTokenizer:
    """Prompts of runtimes whose models all read the decoder's ids."""

    decoder: Loaded
    template: Mapping[str, bool] = {}
    """Options of the decoder's chat template."""

    def chat(self, messages: Listing[Message]) -> Prompt:
        """Through the decoder's own template."""
        return chat_prompt(self.decoder.tokenizer, messages, **self.template)

    def text(self, text: str) -> Prompt:
        """No template."""
        return text_prompt(self.decoder.tokenizer, text)

    def rehearsal(self, tokens: int) -> Prompt:
        """Ids in their order; half of them are context."""
        return Prompt(tuple(i % (self.decoder.vocab - 1) for i in range(1, tokens + 1)), tokens // 2)


def abreast(*readings: Reading[T]) -> Reading[list[T]]:
    """Readings that do not need each other, at once: what they read next is yielded together."""
    results: dict[int, T] = {}
    try:
        while len(results) < len(readings):
            coming: list[Chunk] = []
            for index, reading in enumerate(readings):
                if index in results:
                    continue
                try:
                    read_next: tuple[Chunk, ...] | None = next(reading)
                    coming += read_next or ()
                except StopIteration as end:
                    results[index] = end.value
            if coming or len(results) < len(readings):
                yield tuple(coming) or None
    finally:
        for reading in readings:
            reading.close()
    return [results[index] for index in range(len(readings))]


class Reader:
    """Reads tokens with one model, from where stored KV ends."""

    def __init__(self, loaded: Loaded, store: KVStore | None, chunk: int, role: str, *, answers: bool = True) -> None:
        """`answers`: somebody wants the logits; else the model's last layer is not run."""
        self.loaded = loaded
        self.answers = answers
        self.store = store
        self.chunk = chunk
        self.role = role
        self.space = Space("plain", {**loaded.identity, "template": loaded.digests.template})

    def sequence(self, tokens: int) -> Sequence:
        """Room for so many tokens."""
        model = self.loaded
        return Sequence(model.shape, tokens, model.dtype, model.device)

    def recall(
        self, into: Sequence, ids: tuple[int, ...], keep: Keep | None, limit: int, *, tail: bool = False
    ) -> Reading[Claim | None]:
        """Put the longest stored prefix of at most `limit` tokens into the sequence; `into.seen` is its length.

        Where another worker is computing what is missing, wait for it within a bound. What is returned goes to
        `settle` when the rest is computed and kept, or given up.
        """
        if keep is None or self.store is None or limit <= 0:
            return None
        self._load(self.store, into, ids, keep, limit, tail)
        if into.seen >= limit:
            return None
        claim = self.store.claim(keep.scope, self.space, ids[:limit], start=into.seen)
        if claim is None or claim.mine:
            return claim
        until = time.monotonic() + claim.patience
        while time.monotonic() < until and self.store.flying(claim):
            time.sleep(_POLL)
            yield None
        self._load(self.store, into, ids, keep, limit, tail)
        return None

    def _load(self, store: KVStore, into: Sequence, ids: tuple[int, ...], keep: Keep, limit: int, tail: bool) -> None:
        hit = store.find(keep.scope, self.space, ids, limit=limit, tail=tail, role=self.role)
        if hit is not None and hit.tokens > into.seen:
            before = into.seen
            length = store.load_into(hit, into, start=before)
            if length > before:
                keep.read.append(artefact(self.role, hit.ids[-(-length // hit.block) - 1], length))

    def settle(self, claim: Claim | None) -> None:
        """Let others go on."""
        if self.store is not None:
            self.store.release(claim)

    def keep(self, ids: tuple[int, ...], kv: KVCache, keep: Keep | None, start: int, *, tail: bool = False) -> None:
        """Store whole blocks from `start` on, with `tail` all of it; returns at once."""
        if keep is not None and self.store is not None:
            last = self.store.save(
                keep.scope,
                self.space,
                ids[: len(kv)],
                kv,
                start=start,
                ttl=keep.ttl,
                max_bytes=keep.max_bytes,
                tail=tail,
                role=self.role,
            )
            if last is not None:
                whole = len(kv) if tail else len(kv) - len(kv) % self.store.block_tokens
                keep.written.append(artefact(self.role, last, whole))

    def read(self, into: Sequence, ids: tuple[int, ...], spent: Spent) -> Reading[torch.Tensor]:
        """Read ids[into.seen:] chunk by chunk. Returns the logits (vocabulary,) after the last one where it `answers`.

        The chunks end at multiples of the chunk size, wherever reading begins: a partial hit then computes the same
        chunks as a cold run from the last edge on. A chunk that is interrupted is read again.
        """
        logits = torch.empty(0)
        while into.seen < len(ids):
            end = min(len(ids), (into.seen // self.chunk + 1) * self.chunk)
            into.gives_way = True
            chunk = Chunk(self.loaded, into, ids[into.seen : end], answers=self.answers)
            yield (chunk,)
            if not chunk.done:
                with suppress(Interrupted):
                    chunk.compute()
            into.gives_way = False
            logits = logits if chunk.logits is None else chunk.logits
            spent.compute_s += chunk.seconds
        return logits


class Instead(Reader):
    """A reader without a store that reads something else than it is asked to, or nothing."""

    def __init__(self, reader: Reader, source: Source) -> None:
        super().__init__(reader.loaded, None, reader.chunk, reader.role, answers=reader.answers)
        self._source = source

    def read(self, into: Sequence, ids: tuple[int, ...], spent: Spent) -> Reading[torch.Tensor]:
        """What the source makes of all ids; KV that nothing was read for is zero."""
        instead = self._source(ids)
        if instead is None:
            into.seen = len(ids)
            yield None
            return torch.empty(0)
        return (yield from super().read(into, instead, spent))


class Alone(OneTokenizer):
    """One model reads and answers. Also an identity pair, where sharer and receiver are one model."""

    def __init__(
        self, name: str, loaded: Loaded, store: KVStore | None, chunk: int, *, fingerprint: str = "", role: str = "own"
    ) -> None:
        self.name = name
        self.decoder = loaded
        self.context = loaded.context
        self.fingerprint = fingerprint or loaded.fingerprint
        self.digests = {"model": loaded.fingerprint, "template": loaded.digests.template[:16]}
        self._reader = Reader(loaded, store, chunk, role)
        self.is_pair = role == "source"
        self.chunk = chunk
        self.spaces: tuple[Space, ...] = (self._reader.space,)

    def prefill(self, prompt: Prompt, keep: Keep | None) -> Steps[Prefilled]:
        spent, ids, reader = Spent(), prompt.ids, self._reader
        sequence = reader.sequence(len(ids))
        # The last token is always computed: its logits are the answer's beginning, and logits are not stored.
        claim = yield from reader.recall(sequence, ids, keep, len(ids) - 1)
        try:
            spent.reused = sequence.seen
            logits = yield from reader.read(sequence, ids, spent)
            spent.computed_tokens = len(ids) - spent.reused
            reader.keep(ids, sequence.kv(), keep, spent.reused)
        finally:
            reader.settle(claim)
        return Prefilled(sequence.kv(), logits, spent)

    def keep_answer(self, ids: tuple[int, ...], kv: KVCache, keep: Keep) -> None:
        self._reader.keep(ids, kv, keep, 0)


@dataclass(frozen=True, slots=True)
class Voice:
    """One sharer of a pair: its KV's shape, and who reads as many of its layers as are needed; None where none is."""

    shape: KVShape
    reader: Reader | None

    def whole(self, kv: KVCache, like: Loaded) -> KVCache:
        """With empty layers in the place of those that are not read."""
        missing = self.shape.layers - kv.layers
        if not missing:
            return kv
        blank = torch.empty(1, self.shape.heads, 0, self.shape.head_size, dtype=like.dtype, device=like.device)
        return KVCache([*kv.keys, *[blank] * missing], [*kv.values, *[blank] * missing])


def sharer_reader(sharer: Loaded, fuser: Fuser, store: KVStore | None, chunk: int) -> Reader | None:
    """Of the sharer up to the highest layer that an open gate needs."""
    model = shallow(sharer, fuser.source_layers)
    return None if model is None else Reader(model, store, chunk, "source", answers=False)


class Paired(OneTokenizer):
    """A sharer reads, a fuser projects, a receiver goes on and answers. With a `JointFuser` several sharers read: the
    first and `others`, in the order of its fusers.
    """

    def __init__(
        self,
        name: str,
        sharer: Loaded,
        receiver: Loaded,
        fuser: Fuser | JointFuser,
        *,
        mode: str,
        scope: str,
        store: KVStore | None,
        chunk: int,
        recipe: dict[str, Any] | None = None,
        template: Mapping[str, bool] | None = None,
        others: Listing[Loaded] = (),
        piecewise: bool = True,
    ) -> None:
        """`piecewise`: the fuser maps every slot by itself, so fused KV of a prefix serves the whole."""
        self.name = name
        self.decoder, self.sharer, self.others = receiver, sharer, tuple(others)
        self.fuser = fuser
        self.piecewise = piecewise
        self.chunk = chunk
        self.mode, self.scope = mode, scope
        self.context = min(model.context for model in (sharer, *others, receiver))
        self.template = template or {}
        self.fingerprint = pairs.fingerprint(
            sharer.identity,
            receiver.identity,
            kind=fuser.kind,
            digest=fuser.digest,
            mode=mode,
            scope=scope,
            recipe=recipe,
            others=[model.identity for model in others],
        )
        self.digests = pair_digests(sharer, receiver, fuser, others)
        fusers = fuser.fusers if isinstance(fuser, JointFuser) else (fuser,)
        # What is read abreast delays others by one chunk at most in all.
        share = max(1, chunk // (len(fusers) + fuser.needs_own))
        self._sources = tuple(
            Voice(model.shape, sharer_reader(model, each, store, share))
            for model, each in zip((sharer, *others), fusers, strict=True)
        )
        self._receiver = Reader(receiver, store, chunk, "own")
        self._own = Reader(receiver, store, share, "own", answers=False)
        self._fused = Reader(receiver, store, chunk, "fused")
        self._fused.space = Space("fused", {"pair": self.fingerprint, "template": receiver.digests.template})
        read = [source.reader.space for source in self._sources if source.reader is not None]
        self.spaces: tuple[Space, ...] = (*read, self._receiver.space, self._fused.space)

    def prefill(self, prompt: Prompt, keep: Keep | None) -> Steps[Prefilled]:
        spent, ids = Spent(), prompt.ids
        shared = self._shared(prompt)
        target = self._receiver.sequence(len(ids))
        fuser = self.fuser.change()
        spent.gates_open, spent.gates = fuser.gates_open, fuser.gates
        # With its tail: a context that was shared before needs no sharer, whatever its length.
        kept = keep if self.piecewise else None
        claim = yield from self._fused.recall(target, ids[:shared], kept, shared, tail=True)
        try:
            spent.reused = target.seen
            if spent.reused < shared:
                yield from self._fuse(target, ids[:shared], keep, spent)
        finally:
            self._fused.settle(claim)
        logits = yield from self._receiver.read(target, ids, spent)
        spent.computed_tokens = len(ids) - spent.reused
        return Prefilled(target.kv(), logits, spent)

    def keep_answer(self, ids: tuple[int, ...], kv: KVCache, keep: Keep) -> None:
        """Nothing: all that follows projected KV is tainted by it."""

    def with_source(self, source: Source) -> Paired:
        """The same pair without a store, whose sharers read what `source` makes of their ids."""
        twin = copy.copy(self)
        twin._sources = tuple(
            Voice(voice.shape, voice.reader and Instead(voice.reader, source)) for voice in self._sources
        )
        twin._receiver = Reader(self.decoder, None, self.chunk, "own")
        twin._own = Reader(self.decoder, None, self._own.chunk, "own", answers=False)
        twin._fused = Reader(self.decoder, None, self.chunk, "fused")
        twin.spaces = ()
        return twin

    def read_by_sharer(self, prompt: Prompt) -> tuple[int, ...]:
        return prompt.ids

    def _shared(self, prompt: Prompt) -> int:
        """How many tokens the sharer reads for the receiver; at least one is left for the receiver."""
        if self.scope == "prompt":
            return len(prompt) - 1
        if not prompt.context:
            raise BadPrompt(
                f"pair {self.name} shares what stands before the last user message, and nothing stands there: "
                "put the document into a system message or an earlier turn"
            )
        return prompt.context

    def _fuse(self, target: Sequence, ids: tuple[int, ...], keep: Keep | None, spent: Spent) -> Steps[None]:
        """Bring target from the end of its stored prefix to len(ids), through sharer and fuser."""
        start = target.seen
        sources, own, reused = yield from self._read_all(ids, ids, keep, spent)
        sources = [source.slice(start, len(ids)) for source in sources]
        own = None if own is None else own.slice(start, len(ids))
        if not start:
            spent.reused = min(reused)
        clock = time.perf_counter()
        projected = self._project(sources, own, start)
        if own is not None:
            spent.change = Changed.of([(1, changes(projected, own))])
        target.put(projected)
        spent.fuse_s = time.perf_counter() - clock
        self._fused.keep(ids, target.kv(), keep if self.piecewise else None, start, tail=True)
        yield None

    def _read_all(
        self, heard: tuple[int, ...], ids: tuple[int, ...], keep: Keep | None, spent: Spent
    ) -> Reading[tuple[list[KVCache], KVCache | None, list[int]]]:
        """The sharers' KV of what they hear and, where the fuser needs it, the receiver's own of its ids, read abreast;
        and how many tokens of each came from the store.
        """
        parts = [Spent() for _ in self._sources]
        readings = [self._hear(voice, heard, keep, part) for voice, part in zip(self._sources, parts, strict=True)]
        alone = Spent()
        if self.fuser.needs_own:
            readings.append(self._read_alone(self._own, ids, keep, alone))
        read = yield from abreast(*readings)
        spent.sharer_s = sum(part.compute_s for part in parts)
        spent.compute_s += spent.sharer_s + alone.compute_s
        reused = [known for _, known in read]
        own = read.pop()[0] if self.fuser.needs_own else None
        return [kv for kv, _ in read], own, reused

    def _project(self, sources: Listing[KVCache], own: KVCache | None, start: int) -> KVCache:
        if isinstance(self.fuser, JointFuser):
            return self.fuser.project(sources, own, start)
        return self.fuser.project(sources[0], own, start)

    def _hear(
        self, voice: Voice, ids: tuple[int, ...], keep: Keep | None, spent: Spent
    ) -> Reading[tuple[KVCache, int]]:
        """A sharer's KV with all its layers, of which those that no open gate needs are empty."""
        if voice.reader is None:
            return voice.whole(KVCache([], []), self.decoder), len(ids)
        read, known = yield from self._read_alone(voice.reader, ids, keep, spent)
        return voice.whole(read, self.decoder), known

    def _read_alone(
        self, reader: Reader, ids: tuple[int, ...], keep: Keep | None, spent: Spent
    ) -> Reading[tuple[KVCache, int]]:
        sequence = reader.sequence(len(ids))
        reused = yield from self._read_into(sequence, reader, ids, keep, spent)
        return sequence.kv(), reused

    def _read_into(
        self, sequence: Sequence, reader: Reader, ids: tuple[int, ...], keep: Keep | None, spent: Spent
    ) -> Reading[int]:
        """Returns how many of the tokens came from the store."""
        claim = yield from reader.recall(sequence, ids, keep, len(ids), tail=True)
        try:
            reused = sequence.seen
            yield from reader.read(sequence, ids, spent)
            if reused < len(ids):
                reader.keep(ids, sequence.kv(), keep, reused, tail=True)
        finally:
            reader.settle(claim)
        return reused


def pair_digests(
    sharer: Loaded, receiver: Loaded, fuser: Fuser | JointFuser, others: Listing[Loaded] = ()
) -> dict[str, str]:
    """By part, shortened: tells which of them changed when a fingerprint did."""
    return {
        "sharer": "+".join(model.fingerprint for model in (sharer, *others)),
        "receiver": receiver.fingerprint,
        "fuser": f"{fuser.kind}:{fuser.digest[:16]}",
        "template": receiver.digests.template[:16],
    }


def artefact(role: str, digest: bytes, tokens: int) -> str:
    """How a stretch of stored KV is named in a record."""
    return f"{role}:{digest.hex()}:{tokens}"


def changes(fused: KVCache, own: KVCache) -> torch.Tensor:
    """‖fused − own‖₂ / ‖own‖₂ as (K|V, layers), on the device."""
    ratios = [
        (f - o).float().norm() / o.float().norm().clamp_min(1e-12)
        for f, o in zip((*fused.keys, *fused.values), (*own.keys, *own.values), strict=True)
    ]
    return torch.stack(ratios).view(2, -1)


def require_room(prompt: Prompt, context: int, max_tokens: int | None) -> int:
    """Tokens the answer may have. Raises PromptTooLong in OpenAI's words."""
    room = context - prompt.positions
    if room < 1 or (max_tokens is not None and max_tokens > room):
        asked = f" and {max_tokens} in the completion" if max_tokens is not None else ""
        raise PromptTooLong(
            f"This model's maximum context length is {context} tokens. However, your messages resulted in "
            f"{prompt.positions} tokens{asked}. Please reduce the length of the messages or completion."
        )
    return room if max_tokens is None else max_tokens

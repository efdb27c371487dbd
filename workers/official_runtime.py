"""A pair of the official method whose two models have different tokenizers. Knows fusers and models; knows no HTTP.

The chat is aligned slot for slot (`workers.align`) and read part by part: both models read a part, then the message
parts are fused; the last part is read by the receiver alone. Padding is left out instead of masked: a padded slot keeps
its position and has no KV, so nothing can attend to it, in the prompt or in the answer.

No KV is stored: what such a pair reads depends on where the parts of the whole chat begin and end, not on a prefix of
ids alone. Every prompt is computed.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Listing
from dataclasses import dataclass, replace

import torch

from workers import pairs
from workers.align import Aligned, Aligner
from workers.buffers import Sequence
from workers.cache import KVCache
from workers.chunk import Chunk
from workers.errors import BadPrompt
from workers.fusers.c2c import Official
from workers.keys import Space
from workers.loader import Loaded
from workers.prompt import Message, Prompt, plain_messages, refuse_control_tokens
from workers.runtime import (
    Changed,
    Keep,
    Prefilled,
    Reading,
    Source,
    Spent,
    Steps,
    abreast,
    changes,
    pair_digests,
)


@dataclass(frozen=True, slots=True)
class Track:
    """What one model reads: token, position, and whether it stands for nothing, by slot kept."""

    ids: tuple[int, ...]
    positions: tuple[int, ...]
    blank: tuple[bool, ...]
    ends: tuple[int, ...]
    """By part: one past its last slot kept."""

    def start(self, part: int) -> int:
        return self.ends[part - 1] if part else 0


class AlignedPair:
    """Sharer and receiver with tokenizers of their own. Only message text is fused."""

    def __init__(self, name: str, sharer: Loaded, receiver: Loaded, official: Official, *, chunk: int) -> None:
        self.name = name
        self.decoder = receiver
        self.fuser = official.fuser
        self.context = min(sharer.context, receiver.context)
        self.spaces: tuple[Space, ...] = ()
        self.fingerprint = pairs.fingerprint(
            sharer.identity,
            receiver.identity,
            kind=official.fuser.kind,
            digest=official.fuser.digest,
            mode="fuse",
            scope="prompt",
            recipe=official.recipe,
        )
        self.digests = pair_digests(sharer, receiver, official.fuser)
        self.sharer = sharer
        self.others: tuple[Loaded, ...] = ()
        self.chunk = chunk
        self.template: Mapping[str, bool] = {"enable_thinking": False}
        self._source: Source | None = None
        self._aligner = Aligner(receiver.tokenizer, sharer.tokenizer, official.strategy)

    def chat(self, messages: Listing[Message]) -> Prompt:
        """Both models' templates, without thinking, as the official method trains and serves."""
        plain = plain_messages(messages)
        for model in (self.decoder, self.sharer):
            refuse_control_tokens(model.tokenizer, plain)
        return aligned_prompt(self._aligner.align(plain, "generate", **self.template))

    def text(self, text: str) -> Prompt:
        """Refused: only messages can be aligned."""
        raise BadPrompt(f"pair {self.name} has two tokenizers and reads chats only; use /v1/chat/completions")

    def rehearsal(self, tokens: int) -> Prompt:
        """A chat whose one message has about so many tokens."""
        return self.chat([{"role": "user", "content": "the " * tokens}])

    def keep_answer(self, ids: tuple[int, ...], kv: KVCache, keep: Keep) -> None:
        """Nothing: what follows fused KV is tainted by it."""

    def with_source(self, source: Source) -> AlignedPair:
        """The same pair, whose sharer reads what `source` makes of its ids."""
        twin = copy.copy(self)
        twin._source = source
        return twin

    def read_by_sharer(self, prompt: Prompt) -> tuple[int, ...]:
        if prompt.aligned is None:
            raise BadPrompt(f"pair {self.name} reads chats only")
        return sharer_track(prompt.aligned).ids

    def prefill(self, prompt: Prompt, keep: Keep | None) -> Steps[Prefilled]:
        """Part by part. `keep` is not used."""
        aligned = prompt.aligned
        if aligned is None:
            raise BadPrompt(f"pair {self.name} reads chats only")
        fuser, last = self.fuser.change(), len(aligned.parts) - 1
        spent = Spent(gates_open=fuser.gates_open, gates=fuser.gates)
        ours, theirs = receiver_track(aligned), sharer_track(aligned)
        instead = None if self._source is None else self._source(theirs.ids)
        theirs = theirs if instead is None else replace(theirs, ids=instead)
        silent = self._source is not None and instead is None
        fused = [i for i, part in enumerate(aligned.parts) if part.kind == "message" and i < last]
        target = _room(self.decoder, len(ours.ids))
        source = _room(self.sharer, theirs.ends[fused[-1]] if fused else 0)
        changed: list[tuple[int, torch.Tensor]] = []
        for part in range(last):
            own, heard = Spent(), Spent()
            readings = [self._read(self.decoder, target, ours, ours.ends[part], own)]
            if silent:
                source.seen = theirs.ends[part] if fused and part <= fused[-1] else source.seen
            elif fused and part <= fused[-1]:
                readings.append(self._read(self.sharer, source, theirs, theirs.ends[part], heard))
            yield from abreast(*readings)
            spent.sharer_s += heard.compute_s
            spent.compute_s += own.compute_s + heard.compute_s
            if part in fused:
                changed.append(self._fuse(target, source, ours, theirs, part, spent))
                yield None
        logits = yield from self._read(self.decoder, target, ours, len(ours.ids), spent)
        spent.computed_tokens = len(ours.ids)
        spent.change = Changed.of(changed) if changed else None
        return Prefilled(target.kv(), logits, spent)

    def _read(self, model: Loaded, into: Sequence, track: Track, stop: int, spent: Spent) -> Reading[torch.Tensor]:
        """Read slots into.seen..stop-1 chunk by chunk. Returns the logits (vocabulary,) after the last one, of the
        receiver alone.
        """
        logits = torch.empty(0)
        while into.seen < stop:
            # Both models' chunks, read abreast, delay others by one chunk in all.
            start, end = into.seen, min(stop, into.seen + max(1, self.chunk // 2))
            chunk = Chunk(
                model,
                into,
                track.ids[start:end],
                answers=model is self.decoder,
                positions=track.positions[start:end],
                mask=_mask(track.blank[:end], model.device),
            )
            yield (chunk,)
            if not chunk.done:
                chunk.compute()
            logits = logits if chunk.logits is None else chunk.logits
            spent.compute_s += chunk.seconds
        return logits

    def _fuse(
        self, target: Sequence, source: Sequence, ours: Track, theirs: Track, part: int, spent: Spent
    ) -> tuple[int, torch.Tensor]:
        """Fuse one part that both have just read. Returns its slots and the size of the change by layer."""
        clock = time.perf_counter()
        start, stop = ours.start(part), ours.ends[part]
        own = target.kv(start, stop)
        projected = self.fuser.project(source.kv(theirs.start(part), theirs.ends[part]), own, ours.positions[start])
        change = changes(projected, own)
        target.overwrite(start, projected)
        spent.fuse_s += time.perf_counter() - clock
        return stop - start, change


def aligned_prompt(aligned: Aligned) -> Prompt:
    """The receiver's ids without padding; the rest goes by the alignment."""
    slots = zip(aligned.receiver_ids, aligned.receiver_padding, strict=True)
    return Prompt(tuple(token for token, blank in slots if not blank), 0, aligned)


def receiver_track(aligned: Aligned) -> Track:
    """All that is not padding. A message has none on the receiver's side: its tokens are the receiver's."""
    return _track(aligned, aligned.receiver_ids, aligned.receiver_padding, ())


def sharer_track(aligned: Aligned) -> Track:
    """As the receiver's; of a message every slot is kept, because each is fused into one of the receiver's. Those that
    stand for nothing are read, and masked for all that follow.
    """
    return _track(aligned, aligned.sharer_ids, aligned.sharer_padding, ("message",))


def _track(aligned: Aligned, ids: Listing[int], padding: Listing[bool], whole: tuple[str, ...]) -> Track:
    kept, ends = list[int](), list[int]()
    for part in aligned.parts:
        kept += _kept(range(part.start, part.stop), padding, whole=part.kind in whole)
        ends.append(len(kept))
    return Track(tuple(ids[i] for i in kept), tuple(kept), tuple(padding[i] for i in kept), tuple(ends))


def _kept(slots: range, padding: Listing[bool], *, whole: bool) -> Iterator[int]:
    return (i for i in slots if whole or not padding[i])


def _room(model: Loaded, slots: int) -> Sequence:
    return Sequence(model.shape, slots, model.dtype, model.device)


def _mask(blank: Listing[bool], device: torch.device) -> torch.Tensor | None:
    """(1, slots), 0 where a slot stands for nothing; none where all stand for something."""
    return torch.tensor([[int(not b) for b in blank]], device=device) if any(blank) else None

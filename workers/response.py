"""Include-response: a pair that fuses the last part of the prompt and every token of the answer too.

Three streams grow side by side: the receiver's own KV, never fused; the sharer's; and the fused one, which is answered
from. For new tokens the first two are run, the fuser makes new KV of theirs, and the receiver runs once more over the
fused stream with that KV in the place of what it computes. So a token costs three passes.

Of several sharers the first alone goes on behind the prompt, as in the official code.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import torch

from workers.buffers import Rows, Sequence
from workers.cache import KVCache
from workers.errors import BadPrompt
from workers.fusers.base import Fuser
from workers.fusers.several import JointFuser
from workers.loader import Loaded
from workers.prompt import Prompt
from workers.runtime import Changed, Keep, Paired, Prefilled, Reader, Reading, Source, Spent, Steps, abreast, changes


@dataclass(frozen=True, slots=True, eq=False)
class Response:
    """Who goes on reading beside the answer, and what fuses the two."""

    sharer: Loaded
    receiver: Loaded
    fuser: Fuser

    def rows(self) -> ResponseRows:
        """For one running batch."""
        return ResponseRows(self)


@dataclass(frozen=True, slots=True)
class Beside:
    """The two streams of a prompt that is read."""

    response: Response
    own: KVCache
    source: KVCache


class ResponseRows:
    """The two streams of the answers in a running batch: row i belongs to choice i."""

    def __init__(self, response: Response) -> None:
        self._response = response
        streams = (response.sharer, response.receiver)
        self._theirs, self._own = (Rows(m.shape, 1, m.dtype, m.device) for m in streams)

    def join(self, beside: Beside, position: int, most: int) -> None:
        """A prompt is read; its next token stands at `position`, and its last will be one of `most`."""
        self._theirs.join(beside.source, position, most)
        self._own.join(beside.own, position, most)

    def leave(self, row: int) -> None:
        """As `Rows.leave`."""
        self._theirs.leave(row)
        self._own.leave(row)

    def step(self, tokens: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Read each row's next token (rows, 1). Returns by layer the K and V (rows, heads, 1, size) to be attended to
        in place of the receiver's own.
        """
        response = self._response
        source = _grow(response.sharer, self._theirs, tokens)
        own = _grow(response.receiver, self._own, tokens)
        return list(response.fuser.project(source, own, 0).tensors())


def _grow(model: Loaded, rows: Rows, tokens: torch.Tensor) -> KVCache:
    positions, mask = rows.prepare()
    _run(model, rows, tokens, positions, attention_mask=mask)
    new = rows.latest()
    rows.advance()
    return new


def _run(model: Loaded, cache: Any, tokens: torch.Tensor, positions: torch.Tensor, **more: Any) -> None:
    """For KV alone: the layer that makes logits is not run."""
    model.model.get_decoder()(input_ids=tokens, position_ids=positions, cache=cache, use_cache=True, **more)


class Responding(Paired):
    """A pair whose recipe is include_response. What it reuses is both models' own reading of what is shared."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """As `Paired`. The first fuser has an open gate: without one there is nothing to include."""
        super().__init__(*args, **kwargs)
        first = self.fuser.fusers[0] if isinstance(self.fuser, JointFuser) else self.fuser
        reader = self._sources[0].reader
        if reader is None:
            raise AssertionError("no gate is open")
        self._response = Response(reader.loaded, self.decoder, first)
        self.spaces = tuple(space for space in self.spaces if space is not self._fused.space)

    def with_source(self, source: Source) -> Paired:
        """Refused: the sharer goes on with the answer, which another source has no part in."""
        raise BadPrompt(f"pair {self.name} fuses its answer as well: it has no counterfactual with another sharer")

    def prefill(self, prompt: Prompt, keep: Keep | None) -> Steps[Prefilled]:
        spent, ids, shared = Spent(), prompt.ids, self._shared(prompt)
        fuser = self.fuser.change()
        spent.gates_open, spent.gates = fuser.gates_open, fuser.gates
        # A sharer behind the first may have all gates closed; it says nothing.
        readers = [reader for reader in (*[voice.reader for voice in self._sources], self._own) if reader is not None]
        parts = [Spent() for _ in readers]
        streams = yield from abreast(
            *[self._stream(reader, ids, shared, keep, part) for reader, part in zip(readers, parts, strict=True)]
        )
        spent.compute_s = sum(part.compute_s for part in parts)
        spent.sharer_s = spent.compute_s - parts[-1].compute_s
        spent.reused = min(reused for _, reused in streams)
        *heard, own = [stream for stream, _ in streams]
        source, said = heard[0], iter(heard)
        read = [KVCache([], []) if voice.reader is None else next(said).kv() for voice in self._sources]
        clock = time.perf_counter()
        fused = self._project(read, own.kv(), 0)
        spent.change = Changed.of([(1, changes(fused, own.kv()))])
        target = self._receiver.sequence(len(ids))
        target.put(fused)
        spent.fuse_s = time.perf_counter() - clock
        logits = yield from self._rest(target, own, source, ids, spent)
        spent.computed_tokens = len(ids) - spent.reused
        return Prefilled(target.kv(), logits, spent, Beside(self._response, own.kv(), source.kv()))

    def _stream(
        self, reader: Reader, ids: tuple[int, ...], shared: int, keep: Keep | None, spent: Spent
    ) -> Reading[tuple[Sequence, int]]:
        """What is shared, with room for the rest; and how much of it came from the store."""
        sequence = reader.sequence(len(ids))
        reused = yield from self._read_into(sequence, reader, ids[:shared], keep, spent)
        return sequence, reused

    def _rest(
        self, target: Sequence, own: Sequence, source: Sequence, ids: tuple[int, ...], spent: Spent
    ) -> Steps[torch.Tensor]:
        """Behind what is shared: three passes for each chunk. Returns the logits (vocabulary,) after the last one."""
        response, logits = self._response, torch.empty(0)
        while target.seen < len(ids):
            start, end = target.seen, min(len(ids), target.seen + self.chunk)
            yield end - start
            began = time.perf_counter()
            tokens = torch.tensor([ids[start:end]], device=self.decoder.device)
            positions = torch.arange(start, end, device=self.decoder.device)[None]
            for model, stream in ((response.sharer, source), (response.receiver, own)):
                _run(model, stream, tokens, positions)
                stream.advance(end - start)
            fused = response.fuser.project(source.kv(start, end), own.kv(start, end), start)
            target.given = list(fused.tensors())
            out = self.decoder.model(
                input_ids=tokens, position_ids=positions, cache=target, use_cache=True, logits_to_keep=1
            )
            target.given = None
            target.advance(end - start)
            logits = out.logits[0, -1]
            spent.compute_s += time.perf_counter() - began
        return logits

"""Forwards of packed decoders of the plain kind, without transformers' machinery around each layer.

For few rows, what a small model's forward costs on a CPU is up to a third the work between its products. Here that is
done once per forward and over one flat row of tokens: a token of each running answer, or whole prompts of several
requests one behind the other, each attending to its own KV only. Which models are plain is decided by their parts, and
by computing the same logits and KV as the model's own forward for some tokens; all others keep their own forward.
"""

from __future__ import annotations

from collections.abc import Sequence as Listing
from typing import Any, Protocol

import torch
from torch.nn import functional

from workers.buffers import Rows, Sequence
from workers.chunk import Chunk
from workers.loader import Loaded
from workers.packed_layers import PackedAttention, PackedGate, signed

_PLAIN_MODELS = {"LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"}
"""Of transformers: those whose layers add attention and a gated MLP, each behind a norm, to what goes through them."""

_MANY = 8
"""Rows from which two products and a softmax are faster than the fused attention, which is made for long queries:
measured on two AVX2 cores, 8 rows of 3 KV heads over 64 and 150 slots 0.83 and 0.89 of its time, 16 rows 0.67 and 0.78;
4 rows are equal.
"""


class _Attending(Protocol):
    """The KV that a forward extends and attends to."""

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float
    ) -> torch.Tensor:
        """Query (tokens, heads, size), key and value (tokens, KV heads, size) -> (tokens, heads · size)."""


class PlainDecoder:
    """One model's forwards. Made by `plain_decoder`, which knows that they are right."""

    def __init__(self, loaded: Loaded) -> None:
        decoder = loaded.model.get_decoder()
        self._device = loaded.device
        self._embed, self._rotary, self._norm = decoder.embed_tokens, decoder.rotary_emb, decoder.norm
        self._layers = [
            (each.input_layernorm, each.self_attn, each.post_attention_layernorm, each.mlp) for each in decoder.layers
        ]
        self._head = loaded.model.get_output_embeddings()

    def step(self, rows: Rows, tokens: Listing[int]) -> torch.Tensor:
        """Feed each row its next token. Returns logits (rows, vocabulary). The caller counts the step."""
        over = _Answers(rows)
        hidden = self._forward(torch.tensor(tokens, device=self._device), over.positions, over)
        logits: torch.Tensor = self._head(hidden)
        return logits

    def read(self, chunks: Listing[Chunk]) -> None:
        """Read all of them in one forward; each has its logits and is done."""
        over = _Prompts(chunks, self._device)
        tokens = torch.tensor([token for chunk in chunks for token in chunk.ids], device=self._device)
        hidden = self._forward(tokens, over.positions, over)
        asked = [(chunk, stop - 1) for chunk, stop in zip(chunks, over.stops, strict=True) if chunk.answers]
        if asked:
            logits = self._head(hidden[[last for _, last in asked]])
            for (chunk, _), row in zip(asked, logits, strict=True):
                chunk.logits = row
        for chunk in chunks:
            chunk.into.advance(len(chunk.ids))
            chunk.done = True

    def _forward(self, tokens: torch.Tensor, positions: torch.Tensor, over: _Attending) -> torch.Tensor:
        """Tokens (n,) at positions (n,) -> (n, hidden), behind the last norm."""
        hidden = self._embed(tokens)
        cos, sin = (turn[0].unsqueeze(1) for turn in self._rotary(hidden, positions[None]))
        sin = signed(sin)
        for index, (first, attention, second, mlp) in enumerate(self._layers):
            heads, shared = attention.heads
            flat = attention.project(_normed(first, hidden)).view(len(tokens), -1, attention.head_dim)
            turned = attention.turned(flat, cos, sin)
            query, key, value = turned[:, :heads], turned[:, heads:], flat[:, heads + shared :]
            hidden = hidden + attention.o_proj(over.attend(index, query, key, value, attention.scaling))
            hidden = hidden + mlp(_normed(second, hidden))
        return _normed(self._norm, hidden)


class _Answers:
    """One token of each running answer."""

    def __init__(self, rows: Rows) -> None:
        positions, mask = rows.prepare()
        self.positions = positions[:, 0]
        self._rows = rows
        # Once for all layers: attention would make as many of a mask of truth values itself.
        self._mask = None if mask is None else torch.where(mask, 0.0, float("-inf"))

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float
    ) -> torch.Tensor:
        rows, shared, size = key.shape
        self._rows.go_on()
        self._rows.put(layer, key, value)
        keys, values = self._rows.held(layer)
        # The heads that share a KV head stand as its queries: so it is read once.
        grouped = query.reshape(rows, shared, -1, size)
        if rows < _MANY:
            out = functional.scaled_dot_product_attention(grouped, keys, values, attn_mask=self._mask, scale=scale)
        else:
            scores = torch.matmul(grouped, keys.transpose(2, 3)).mul_(scale)
            if self._mask is not None:
                scores.add_(self._mask)
            out = torch.matmul(scores.softmax(dim=-1), values)
        return out.reshape(rows, -1)


class _Prompts:
    """Stretches of several prompts, one behind the other."""

    def __init__(self, chunks: Listing[Chunk], device: torch.device) -> None:
        self._chunks = chunks
        sizes = [len(chunk.ids) for chunk in chunks]
        self.stops = [sum(sizes[: i + 1]) for i in range(len(sizes))]
        self._spans = [slice(stop - size, stop) for size, stop in zip(sizes, self.stops, strict=True)]
        starts = [chunk.into.seen for chunk in chunks]
        self.positions = torch.cat(
            [torch.arange(start, start + size, device=device) for start, size in zip(starts, sizes, strict=True)]
        )
        self._masks = [
            torch.ones(size, start + size, dtype=torch.bool, device=device).tril(start) if start else None
            for start, size in zip(starts, sizes, strict=True)
        ]

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float
    ) -> torch.Tensor:
        found = []
        for chunk, mask, span in zip(self._chunks, self._masks, self._spans, strict=True):
            chunk.into.go_on()
            keys, values = chunk.into.write(layer, key[span].transpose(0, 1)[None], value[span].transpose(0, 1)[None])
            out = functional.scaled_dot_product_attention(
                query[span].transpose(0, 1)[None], keys, values, attn_mask=mask, is_causal=mask is None, scale=scale,
                enable_gqa=True,
            )  # fmt: skip
            found.append(out[0].transpose(0, 1).flatten(1))
        return torch.cat(found)


def _normed(norm: Any, x: torch.Tensor) -> torch.Tensor:
    return functional.rms_norm(x, norm.weight.shape, norm.weight, norm.variance_epsilon)


def plain_decoder(loaded: Loaded) -> PlainDecoder | None:
    """Of a model that is packed; None where it is not of the plain kind."""
    if type(loaded.model).__name__ not in _PLAIN_MODELS:
        return None
    parts = [(type(layer.self_attn), type(layer.mlp)) for layer in loaded.model.get_decoder().layers]
    if any(part != (PackedAttention, PackedGate) for part in parts):
        return None
    found = PlainDecoder(loaded)
    return found if _computes_alike(found, loaded) else None


def _computes_alike(found: PlainDecoder, loaded: Loaded) -> bool:
    """Whether it reads some tokens, in two chunks, and goes on from them as the model itself does."""
    tokens = tuple(token % loaded.vocab for token in range(3, 13))
    ours, theirs = (Sequence(loaded.shape, len(tokens), loaded.dtype, loaded.device) for _ in range(2))
    pairs = []
    with torch.inference_mode():
        for part in (tokens[:5], tokens[5:9]):
            chunk = Chunk(loaded, ours, part, answers=True)
            found.read([chunk])
            pairs.append((chunk.logits, _own_forward(loaded, theirs, part)))
        rows = Rows(loaded.shape, 1, loaded.dtype, loaded.device)
        rows.join(ours.kv())
        pairs.append((found.step(rows, tokens[9:])[0], _own_forward(loaded, theirs, tokens[9:])))
        rows.advance()
        mine, kept = rows.kv(0, 0, len(tokens)), theirs.kv()
        pairs += zip((*mine.keys, *mine.values), (*kept.keys, *kept.values), strict=True)
    return all(a is not None and b is not None and _alike(a, b) for a, b in pairs)


def _alike(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Up to rounding. What is no number is like nothing: of a broken model nobody can say that it is plain."""
    return bool(b.isfinite().all()) and torch.allclose(a, b, rtol=1e-3, atol=1e-4 * float(b.abs().max()))


def _own_forward(loaded: Loaded, into: Sequence, ids: tuple[int, ...]) -> torch.Tensor | None:
    """The model's own way: logits (vocabulary,) behind the ids."""
    chunk = Chunk(loaded, into, ids, answers=True)
    chunk.compute()
    return chunk.logits

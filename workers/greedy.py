"""Whole prompts read and answered greedily, without an engine: what training and verifying need. Knows no requests.

One context, many questions: the context's KV is read once and expanded over the questions' rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from workers.cache import KVCache
from workers.loader import Loaded


@torch.no_grad()
def read(loaded: Loaded, ids: Sequence[int]) -> KVCache:
    """KV of the tokens, read alone from position 0."""
    if not ids:
        shape = loaded.shape
        return KVCache.empty(shape.layers, shape.heads, shape.head_size, loaded.dtype, loaded.device)
    tokens = torch.tensor([list(ids)], device=loaded.device)
    out = loaded.model(input_ids=tokens, use_cache=True, logits_to_keep=1)
    return KVCache([layer.keys for layer in out.cache.layers], [layer.values for layer in out.cache.layers])


def expand(kv: KVCache, rows: int) -> Any:
    """A transformers cache that holds the same KV in every row; forward passes append to it."""
    if not len(kv):
        return DynamicCache()
    return DynamicCache([(k.expand(rows, -1, -1, -1), v.expand(rows, -1, -1, -1)) for k, v in kv.tensors()])


@torch.no_grad()
def answers(loaded: Loaded, kv: KVCache, rests: Sequence[Sequence[int]], most: int) -> list[list[int]]:
    """Greedy continuations, at most `most` tokens each, of `kv` followed by each rest; the ending token is cut off."""
    rows, device, seen = len(rests), loaded.device, len(kv)
    width = max(map(len, rests))
    # Padding stands between the context and the rest, masked; positions go on from the context without a gap.
    ids = torch.zeros(rows, width, dtype=torch.long, device=device)
    mask = torch.ones(rows, seen + width, dtype=torch.long, device=device)
    for row, rest in enumerate(rests):
        ids[row, width - len(rest) :] = torch.tensor(list(rest), device=device)
        mask[row, seen : seen + width - len(rest)] = 0
    positions = (mask.cumsum(1) - 1).clamp_min(0)[:, seen:]
    cache = expand(kv, rows)
    found: list[list[int]] = [[] for _ in rests]
    going = [True] * rows
    for _ in range(most):
        out = loaded.model(
            input_ids=ids,
            attention_mask=mask,
            position_ids=positions,
            cache=cache,
            use_cache=True,
            logits_to_keep=1,
        )
        ids = out.logits[:, -1:].argmax(-1)
        for row, token in enumerate(ids[:, 0].tolist()):
            going[row] = going[row] and token not in loaded.eos
            if going[row]:
                found[row].append(token)
        if not any(going):
            break
        mask = torch.cat((mask, mask.new_ones(rows, 1)), dim=1)
        positions = positions[:, -1:] + 1
    return found


def answer_logits(
    loaded: Loaded,
    kv: KVCache,
    rests: Sequence[Sequence[int]],
    given: Sequence[Sequence[int]],
    seen: Sequence[int] | None = None,
) -> Tensor:
    """Logits (sum of answer lengths, vocabulary) that predict each token of the given answers, row after row.

    `kv` is that of all rows, or one each, of which the first `seen` slots count. Gradients flow into it.
    """
    rows, device, room = len(rests), loaded.device, len(kv)
    lines = [[*rest, *answer] for rest, answer in zip(rests, given, strict=True)]
    width = max(map(len, lines))
    ids = torch.zeros(rows, width, dtype=torch.long)
    mask = torch.zeros(rows, room + width, dtype=torch.long)
    lengths = torch.tensor(seen if seen is not None else [room] * rows)
    for row, (line, length) in enumerate(zip(lines, lengths.tolist(), strict=True)):
        ids[row, : len(line)] = torch.tensor(line)
        mask[row, :length] = 1
        mask[row, room : room + len(line)] = 1
    positions = lengths[:, None] + torch.arange(width)
    ids, mask, positions = (t.to(device) for t in (ids, mask, positions))
    out = loaded.model.get_decoder()(
        input_ids=ids, attention_mask=mask, position_ids=positions, cache=expand(kv, rows), use_cache=True
    )
    hidden = [
        out.last_hidden_state[row, len(rest) - 1 : len(rest) - 1 + len(answer)]
        for row, (rest, answer) in enumerate(zip(rests, given, strict=True))
    ]
    logits: Tensor = loaded.model.get_output_embeddings()(torch.cat(hidden))
    return logits

"""The official method section by section: prefill, decoding, include-response, the training loss. Plain functions.

A prompt is a list of sections, each with a code: -1 and 0 fuse nothing, a positive one is a bitmask of sharers (bit 0
is the first). Every section is read over what was fused before it; the last one is never fused and its logits are the
result. Knows models and fusers; knows no tokenizer, request or store.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.cache_utils import Cache, DynamicCache

from workers.align import Aligned
from workers.errors import BadPrompt
from workers.fusers.c2c import KV, C2CFuser, Fusion
from workers.fusers.several import join_layer


@dataclass(frozen=True, slots=True)
class Sharer:
    """A model whose KV is read, and the fuser between it and the receiver."""

    model: Any
    fuser: C2CFuser


@dataclass(frozen=True, slots=True)
class Section:
    """Consecutive tokens that share a fusion code."""

    code: int
    length: int


@dataclass(frozen=True, slots=True)
class Prompt:
    """Ids (B, N), masks (B, N) of 1 and 0 where there is padding, positions (B, N)."""

    ids: Tensor
    sections: tuple[Section, ...]
    sharer_ids: tuple[Tensor, ...] | None = None
    """One per sharer; None gives all of them the receiver's."""
    mask: Tensor | None = None
    sharer_masks: tuple[Tensor, ...] | None = None
    """None gives all sharers the receiver's mask."""
    positions: Tensor | None = None

    def __post_init__(self) -> None:
        total = sum(s.length for s in self.sections)
        if not self.sections or any(s.length < 1 for s in self.sections) or total != self.ids.shape[1]:
            raise BadPrompt(f"sections cover {total} of the prompt's {self.ids.shape[1]} tokens")

    def ids_of(self, sharer: int) -> Tensor:
        return self.ids if self.sharer_ids is None else self.sharer_ids[sharer]

    def mask_of(self, sharer: int) -> Tensor | None:
        return self.mask if self.sharer_masks is None else self.sharer_masks[sharer]

    def fused_until(self, sharer: int) -> int:
        """Tokens up to the end of the last section that names the sharer; the prompt's last section is not fused."""
        return sum(s.length for s in self.sections[: _last_selected(self.sections[:-1], sharer)])


@dataclass(slots=True)
class Run:
    """A prompt that has been read. Each decoded token changes it."""

    receiver: Any
    sharers: tuple[Sharer, ...]
    cache: DynamicCache
    """The receiver's, fused."""
    sharer_caches: tuple[DynamicCache, ...]
    logits: Tensor
    """(B, n, V): of the last token; in training of the whole last section."""
    mask: Tensor | None
    sharer_mask: Tensor | None
    position: Tensor
    """(B, 1): of the next token."""
    clean: DynamicCache | None = None
    """Include-response: the receiver's KV before fusing."""


class Given(DynamicCache):
    """Another cache, grown by given K, V for the new tokens in place of those the model has just computed.

    `update` is the one place every decoder passes between RoPE and attention, whatever its attention module looks like.
    """

    def __init__(self, past: DynamicCache, given: Sequence[KV]) -> None:
        super().__init__()
        self.layers = past.layers
        self._given = given

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> KV:
        key, value = self._given[layer_idx]
        updated: KV = super().update(key.to(key_states.dtype), value.to(value_states.dtype), layer_idx, *args, **kwargs)
        return updated


def same_tokenizer_sections(tokens: int, code: int = 1) -> tuple[Section, ...]:
    """The ordinary call: all tokens but the last are fused."""
    return (Section(code, tokens - 1), Section(-1, 1)) if tokens > 1 else (Section(-1, tokens),)


def aligned_prompt(aligned: Aligned, device: torch.device | str = "cpu") -> Prompt:
    """A chat aligned for one sharer with another tokenizer. Only message text is fused."""

    def row(values: Sequence[int]) -> Tensor:
        return torch.tensor([values], device=device)

    return Prompt(
        ids=row(aligned.receiver_ids),
        sections=sections_of(aligned.codes),
        sharer_ids=(row(aligned.sharer_ids),),
        mask=row([int(not blank) for blank in aligned.receiver_padding]),
        sharer_masks=(row([int(not blank) for blank in aligned.sharer_padding]),),
    )


def sections_of(codes: Sequence[int]) -> tuple[Section, ...]:
    """One section per run of equal per-token codes."""
    return tuple(Section(code, len(list(run))) for code, run in groupby(codes))


@torch.no_grad()
def prefill(
    receiver: Any,
    sharers: Sequence[Sharer],
    prompt: Prompt,
    *,
    fusion: Fusion = "sequential",
    include_response: bool = False,
    idle_sharers: bool = False,
) -> Run:
    """Read the prompt. `include_response` fuses the last section and every later token too, from the first sharer,
    which must read the receiver's ids.
    `idle_sharers` runs sharers that no section selects, as the official code does. Raises BadPrompt, KVMismatch.
    """
    return _prefill(receiver, tuple(sharers), prompt, fusion, include_response=include_response, idle=idle_sharers)


@torch.no_grad()
def decode(run: Run, ids: Tensor, *, official_mask: bool = False) -> Tensor:
    """Append tokens (B, 1) and return the next logits (B, V). `official_mask` forgets the prompt's padding, as the
    official code does from here on: for conformance only.
    """
    if run.mask is not None:
        run.mask = torch.cat([run.mask, run.mask.new_ones(ids.shape)], dim=1)
    if run.sharer_mask is not None:
        run.sharer_mask = torch.cat([run.sharer_mask, run.sharer_mask.new_ones(ids.shape)], dim=1)
    mask = None if official_mask else run.mask
    if run.clean is None:
        run.logits = forward(run.receiver, ids, run.cache, mask, run.position)
    else:
        run.logits = _response(run, ids, mask, None if official_mask else run.sharer_mask, run.position)
    run.position = run.position + 1
    return run.logits[:, -1]


def greedy(run: Run, steps: int, *, official_mask: bool = False) -> tuple[Tensor, Tensor]:
    """The most likely tokens (B, steps) and the logits they were chosen from (B, steps, V)."""
    tokens, logits = [], [run.logits[:, -1]]
    for step in range(steps):
        tokens.append(logits[-1].argmax(-1, keepdim=True))
        if step + 1 < steps:
            logits.append(decode(run, tokens[-1], official_mask=official_mask))
    return torch.cat(tokens, dim=1), torch.stack(logits, dim=1)


def forward(
    model: Any, ids: Tensor, cache: Cache, mask: Tensor | None, positions: Tensor, *, all_logits: bool = False
) -> Tensor:
    """Logits (B, 1 or n, V) of new tokens over a cache, which grows. The mask covers cached and new tokens."""
    keep = 0 if all_logits else 1
    output = model(
        input_ids=ids,
        attention_mask=mask,
        position_ids=positions,
        cache=cache,
        use_cache=True,
        logits_to_keep=keep,
    )
    logits: Tensor = output.logits
    return logits


@torch.no_grad()
def read_sharer(model: Any, prompt: Prompt) -> DynamicCache:
    """What `prefill` has the first sharer read, section by section, as far as it is fused."""
    cache, start = DynamicCache(), 0
    positions = _positions(prompt)
    for section in prompt.sections[: _last_selected(prompt.sections[:-1], 0)]:
        end = start + section.length
        forward(model, prompt.ids_of(0)[:, start:end], cache, _upto(prompt.mask_of(0), end), positions[:, start:end])
        start = end
    return cache


def _positions(prompt: Prompt) -> Tensor:
    if prompt.positions is not None:
        return prompt.positions
    batch, tokens = prompt.ids.shape
    return torch.arange(tokens, device=prompt.ids.device).expand(batch, -1)


def _prefill(
    receiver: Any,
    sharers: tuple[Sharer, ...],
    prompt: Prompt,
    fusion: Fusion,
    *,
    include_response: bool = False,
    idle: bool = False,
    all_logits: bool = False,
    read: DynamicCache | None = None,
) -> Run:
    if include_response and (not sharers or prompt.sharer_ids is not None):
        raise BadPrompt("include-response needs a sharer that reads the receiver's own tokens")
    positions = _positions(prompt)
    run = Run(
        receiver=receiver,
        sharers=sharers,
        cache=DynamicCache(),
        sharer_caches=tuple(DynamicCache() for _ in sharers) if read is None else (read,),
        logits=torch.empty(0),
        mask=prompt.mask,
        sharer_mask=prompt.mask_of(0) if sharers else None,
        position=positions[:, -1:] + 1,
    )
    last = len(prompt.sections) - 1
    # A sharer runs as far as the last section that selects it, and not at all when none does.
    until = [last if idle else _last_selected(prompt.sections[:last], q) for q in range(len(sharers))]
    until = until if read is None else [0]
    start = 0
    for index, section in enumerate(prompt.sections):
        end = start + section.length
        where = positions[:, start:end]
        if index == last and include_response:
            new = prompt.ids[:, start:end]
            run.logits = _response(run, new, prompt.mask, prompt.mask_of(0), where, all_logits=all_logits)
            break
        ids, mask = prompt.ids[:, start:end], _upto(prompt.mask, end)
        run.logits = forward(receiver, ids, run.cache, mask, where, all_logits=all_logits and index == last)
        if index == last:
            break
        for q, sharer in enumerate(sharers):
            if index < until[q] or (include_response and q == 0):
                with torch.no_grad():
                    ids, mask = prompt.ids_of(q)[:, start:end], _upto(prompt.mask_of(q), end)
                    forward(sharer.model, ids, run.sharer_caches[q], mask, where)
        if include_response and index == last - 1:
            run.clean = _copy(run.cache)
        if section.code > 0:
            _fuse_section(run, section.code, start, end, fusion)
        start = end
    return run


def _last_selected(sections: Sequence[Section], sharer: int) -> int:
    """One past the last section whose code names the sharer."""
    return max((i + 1 for i, s in enumerate(sections) if s.code > 0 and s.code >> sharer & 1), default=0)


def _upto(mask: Tensor | None, end: int) -> Tensor | None:
    return None if mask is None else mask[:, :end]


def layers_of(cache: DynamicCache) -> list[Any]:
    """Each has `keys` and `values` (B, heads, tokens, size). Every layer is plain: the caches here have no config."""
    return cache.layers


def _copy(cache: DynamicCache) -> DynamicCache:
    """A cache that grows on its own. Tensors are shared: nothing here writes into them."""
    copy = DynamicCache()
    for index, layer in enumerate(layers_of(cache)):
        copy.update(layer.keys, layer.values, index)
    return copy


def _fuse_section(run: Run, code: int, start: int, end: int, fusion: Fusion) -> None:
    if code >> len(run.sharers):
        raise BadPrompt(f"fusion code {code} names more than the {len(run.sharers)} sharers there are")
    chosen = [q for q in range(len(run.sharers)) if code >> q & 1]
    for index, layer in enumerate(layers_of(run.cache)):
        own = layer.keys[:, :, start:end], layer.values[:, :, start:end]
        fused = _fuse_layer(run, chosen, index, own, (start, end), fusion)
        if fused is not own:
            # Not in place: earlier slices are part of the graph in training. `end` is the cache's own.
            layer.keys = torch.cat([layer.keys[:, :, :start], fused[0].to(layer.keys.dtype)], dim=2)
            layer.values = torch.cat([layer.values[:, :, :start], fused[1].to(layer.values.dtype)], dim=2)


def _fuse_layer(run: Run, chosen: Sequence[int], layer: int, own: KV, span: tuple[int, int], fusion: Fusion) -> KV:
    def source(nth: int, read: int) -> KV:
        held = layers_of(run.sharer_caches[chosen[nth]])[read]
        return held.keys[:, :, span[0] : span[1]], held.values[:, :, span[0] : span[1]]

    return join_layer([run.sharers[q].fuser for q in chosen], source, layer, own, fusion)


def _response(
    run: Run,
    ids: Tensor,
    mask: Tensor | None,
    sharer_mask: Tensor | None,
    where: Tensor,
    *,
    all_logits: bool = False,
) -> Tensor:
    """Three passes: receiver over its clean KV, sharer over its own, then the receiver over the fused KV with the new
    tokens' K, V replaced by the fused ones.
    """
    if run.clean is None:  # a prompt of one section: nothing stands before it
        run.clean = DynamicCache()
    start = run.clean.get_seq_length()
    with torch.no_grad():
        forward(run.sharers[0].model, ids, run.sharer_caches[0], sharer_mask, where)
    forward(run.receiver, ids, run.clean, mask, where)
    span = (start, start + ids.shape[1])
    given = []
    for index, layer in enumerate(layers_of(run.clean)):
        own = layer.keys[:, :, span[0] :], layer.values[:, :, span[0] :]
        given.append(_fuse_layer(run, (0,), index, own, span, "sequential"))
    return forward(run.receiver, ids, Given(run.cache, given), mask, where, all_logits=all_logits)


@dataclass(frozen=True, slots=True)
class Example:
    """One training conversation: ids, labels (-100 where nothing is learnt) and a fusion code per token."""

    ids: Sequence[int]
    labels: Sequence[int]
    codes: Sequence[int]


@dataclass(frozen=True, slots=True)
class Batch:
    """Examples padded section by section: ids, labels, mask and positions (B, N)."""

    prompt: Prompt
    labels: Tensor


@dataclass(frozen=True, slots=True)
class Loss:
    """Mean cross-entropy of the supervised tokens, and the last section's logits (B, n, V)."""

    loss: Tensor
    logits: Tensor


def collate(examples: Sequence[Example], pad: int, device: torch.device | str = "cpu") -> Batch:
    """Pad every section on its right to the batch's longest: mask 0, position 0, label -100. Raises BadPrompt when the
    examples' sections differ in number or code: they could not be fused alike.
    """
    split = [sections_of(e.codes) for e in examples]
    if len({tuple(s.code for s in sections) for sections in split}) != 1:
        raise BadPrompt("examples of one batch must have the same sections: group them by their fusion codes")
    lengths = [max(s.length for s in column) for column in zip(*split, strict=True)]
    rows = [_padded(e, sections, lengths, pad) for e, sections in zip(examples, split, strict=True)]
    ids, labels, mask, positions = (torch.tensor(column, device=device) for column in zip(*rows, strict=True))
    sections = tuple(replace(s, length=n) for s, n in zip(split[0], lengths, strict=True))
    return Batch(Prompt(ids, sections, mask=mask, positions=positions), labels)


def _padded(example: Example, sections: Sequence[Section], lengths: Sequence[int], pad: int) -> list[list[int]]:
    ids, labels, mask, positions = [], [], [], []
    start = 0
    for section, length in zip(sections, lengths, strict=True):
        end, blank = start + section.length, length - section.length
        ids += [*example.ids[start:end], *[pad] * blank]
        labels += [*example.labels[start:end], *[-100] * blank]
        mask += [1] * section.length + [0] * blank
        positions += [*range(start, end), *[0] * blank]
        start = end
    return [ids, labels, mask, positions]


def batch_loss(
    receiver: Any,
    sharers: Sequence[Sharer],
    batch: Batch,
    *,
    fusion: Fusion = "sequential",
    include_response: bool = False,
    read: DynamicCache | None = None,
) -> Loss:
    """The receiver's causal loss on the last section. Differentiable in the projectors; models are to be frozen.

    `read`: what `read_sharer` gave for the only sharer; without include-response.
    """
    run = _prefill(
        receiver, tuple(sharers), batch.prompt, fusion, include_response=include_response, all_logits=True, read=read
    )
    labels = batch.labels[:, -batch.prompt.sections[-1].length :]
    loss = F.cross_entropy(run.logits[:, :-1].float().flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100)
    return Loss(loss, run.logits)

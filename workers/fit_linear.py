"""Fits a `linear` fuser between two models of one tokenizer: one pass over texts, no gradients, minutes on a CPU.

    fitted = fit(sharer, receiver, texts, Recipe(tokens=20_000), tell=print)
    fitted.publish(folder, "my-pair", sharer, receiver, mode="handover", scope="context", made="2026-01-31")

`texts` is an iterable of token ids, a text or chat each (`encoded` makes them), read until `recipe.tokens` are counted;
`tell(Progress)` is called after each. Both models read every text alone. Of the first texts it is found which sharer
layers tell most about each receiver layer; then normal equations are summed up in float64 over all tokens, so memory
does not grow with their number. They are solved by Cholesky, with the ridge chosen for every head by its error on
texts that were held out. How much of the sharer's KV came through is judged on the same texts by what the receiver's
attention makes of it: an error in K or V that attention does not look at does no harm.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from workers import vocabulary
from workers.c2c_run import Given
from workers.cache import KVCache
from workers.errors import LoadFailed
from workers.fusers.base import KVShape
from workers.fusers.linear import LinearFuser, LinearShape, bare_rows
from workers.fusers.rope import unrotate
from workers.greedy import read
from workers.loader import Loaded
from workers.pair_file import publish
from workers.pairs import FuserInfo, PairFile
from workers.prompt import render

_HELD_OUT_EVERY = 8
_RIDGES = (1e-9, 1e-7, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1)
"""Tried in turn, as shares of each input's variance."""
_SCOUT_RIDGE = 1e-2
_KINDS = 2  # K and V


@dataclass(frozen=True, slots=True)
class Recipe:
    """How much to read, and what to accept."""

    tokens: int = 20_000
    top: int = 3
    """Sharer layers that each receiver layer is made from."""
    scout: int = 1024
    """Tokens that are looked at to choose them."""
    held_out: int = 1024
    """Tokens that are not fitted but judged on; every eighth text, until there are so many."""
    least: float = 0.5
    blend: float = 0.5
    """See `LinearShape`."""


@dataclass(frozen=True, slots=True)
class Progress:
    """After one text."""

    tokens: int
    total: int
    left_s: float

    def __str__(self) -> str:
        return f"token {self.tokens}/{self.total}  {self.left_s:.0f} s left"


@dataclass(frozen=True, slots=True)
class Fitted:
    """The maps that were found."""

    shape: LinearShape
    tensors: dict[str, Tensor]
    r2: tuple[tuple[float, float], ...]
    """By receiver layer, for K and V on the held-out texts: the share of variance explained."""
    tokens: int
    held_out: int

    def fuser(self, mode: str = "handover", dtype: torch.dtype = torch.float32) -> LinearFuser:
        """Ready to run. Raises LoadFailed where the fit is too bad for the mode."""
        return LinearFuser(self.shape, self.tensors, mode=mode, dtype=dtype)

    def publish(
        self, folder: Any, name: str, sharer: Loaded, receiver: Loaded, *, mode: str, scope: str, **more: Any
    ) -> PairFile:
        """Write the pair's folder; `more` is what `workers.pair_file.publish` takes. Raises as `fuser` does."""
        stored = self.fuser(mode, receiver.dtype).save(folder)
        info = FuserInfo(stored.kind, stored.digest, stored.shape.as_json(), stored.parameters)
        return publish(folder, name, sharer, receiver, info, mode=mode, scope=scope, **more)


def encoded(tokenizer: Any, texts: Iterable[str | Sequence[dict[str, Any]]], most: int = 512) -> Iterator[list[int]]:
    """Ids of texts and chats, the latter through the template; each cut to `most` tokens, and empty ones left out.

    Raises BadPrompt where the template refuses a chat.
    """
    for text in texts:
        if not isinstance(text, str):
            text = render(tokenizer, list(text), {}, generation=False)
            ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        else:
            ids = tokenizer(text)["input_ids"]
        if ids:
            yield list(ids[:most])


@torch.no_grad()
def fit(
    sharer: Loaded,
    receiver: Loaded,
    texts: Iterable[Sequence[int]],
    recipe: Recipe = Recipe(),
    tell: Callable[[Progress], None] | None = None,
    reads: Callable[[Loaded, Sequence[int]], KVCache] = read,
) -> Fitted:
    """`reads` gives the models' KV of a text, computed or kept.

    Raises LoadFailed: models that no linear fuser can stand between, or too few texts.
    """
    refuse(sharer, receiver)
    scouts: list[_Read] = []
    held: list[_Read] = []
    moments: _Moments | None = None
    began, seen, held_tokens = time.monotonic(), 0, 0
    for index, ids in enumerate(_until(texts, recipe.tokens)):
        one = _both(sharer, receiver, ids, reads)
        seen += len(ids)
        if index % _HELD_OUT_EVERY == 1 and held_tokens < recipe.held_out:
            held.append(one)
            held_tokens += len(ids)
        elif moments is not None:
            moments.add(one)
        else:
            scouts.append(one)
            if held and sum(len(s.ids) for s in scouts) >= recipe.scout:
                moments = _begin(scouts, held, recipe.top, receiver.shape.head_size)
                scouts = []
        if tell is not None:
            pace = (time.monotonic() - began) / seen
            tell(Progress(seen, recipe.tokens, pace * max(0, recipe.tokens - seen)))
    if not held or (moments is None and not scouts):
        more = f"more than {recipe.tokens} tokens" if seen >= recipe.tokens else "more items"
        raise LoadFailed(
            f"a linear fuser needs at least two texts, one to fit and one to judge on, and was given {len(scouts)} "
            f"({seen} tokens): let it read {more}"
        )
    moments = moments or _begin(scouts, held, recipe.top, receiver.shape.head_size)
    tensors, r2 = moments.solve(held)
    shape = LinearShape(
        sharer.shape, receiver.shape, moments.layers, (1.0,) * receiver.shape.layers, recipe.least, recipe.blend
    )
    maps = LinearFuser(replace(shape, least=-1.0), tensors, dtype=receiver.dtype)
    cosine = attention_cosine(sharer, receiver, maps, [one.ids for one in held], reads)
    return Fitted(replace(shape, cosine=cosine), tensors, r2, seen - held_tokens, held_tokens)


def refuse(sharer: Loaded, receiver: Loaded) -> None:
    """Raises LoadFailed where the sharer would misread the ids, or keys do not turn as plain RoPE does."""
    if sharer.digests.tokenizer != receiver.digests.tokenizer:
        overlap = vocabulary.compare(receiver.tokenizer.get_vocab(), sharer.tokenizer.get_vocab(), sharer.vocab)
        if not overlap.ids_pass:
            raise LoadFailed(f"a linear fuser needs one tokenizer on both sides, and {overlap}")
    for role, model in (("sharer", sharer), ("receiver", receiver)):
        if model.shape.rope_theta is None or not turns_plainly(model):
            raise LoadFailed(f"the {role}'s keys do not turn as plain RoPE does, so their rotation cannot be taken off")


@torch.no_grad()
def turns_plainly(model: Loaded) -> bool:
    """In the first layer one token has one key, wherever it stands, once the rotation is off."""
    keys = unrotate(read(model, [1] * 6).keys[0], 0, model.shape.rope_theta or 0.0)
    tolerance = 1e-3 if model.dtype is torch.float32 else 5e-2
    return bool((keys - keys[:, :, :1]).abs().max() <= tolerance * keys.abs().max())


@torch.no_grad()
def attention_cosine(
    sharer: Loaded,
    receiver: Loaded,
    fuser: LinearFuser,
    texts: Iterable[Sequence[int]],
    reads: Callable[[Loaded, Sequence[int]], KVCache] = read,
) -> tuple[float, ...]:
    """By receiver layer: mean cosine between what attention says with mapped KV and with its own, for the queries that
    the receiver has when it reads the text alone. The first token is left out: it can look at nothing but itself.
    """
    sums = torch.zeros(receiver.shape.layers, device=receiver.device)
    count = 0
    for ids in texts:
        mapped = fuser.project(reads(sharer, ids), None, 0)
        for layer, (own, other) in enumerate(_attention_outputs(receiver, ids, list(mapped.tensors()))):
            sums[layer] += torch.cosine_similarity(own[0, 1:].float(), other[0, 1:].float(), dim=-1).sum()
        count += len(ids) - 1
    return tuple((sums / max(1, count)).tolist())


def _attention_outputs(
    receiver: Loaded, ids: Sequence[int], given: list[tuple[Tensor, Tensor]]
) -> list[tuple[Tensor, Tensor]]:
    """Layer by layer: what attention says over its own KV, and over the given one."""
    found: list[tuple[Tensor, Tensor]] = []
    again = False

    def compare(module: Any, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        nonlocal again
        if again:
            return
        again = True
        other = module(*args, **{**kwargs, "cache": Given(DynamicCache(), given)})
        again = False
        found.append((output[0], other[0]))

    layers = receiver.model.get_decoder().layers
    hooks = [layer.self_attn.register_forward_hook(compare, with_kwargs=True) for layer in layers]
    try:
        read(receiver, ids)
    finally:
        for hook in hooks:
            hook.remove()
    return found


@dataclass(frozen=True, slots=True)
class _Read:
    """One text as both models hold it: by layer (K | V, tokens, width), keys without rotation; float32."""

    ids: Sequence[int]
    source: dict[int, Tensor]
    target: dict[int, Tensor]


def _both(
    sharer: Loaded, receiver: Loaded, ids: Sequence[int], reads: Callable[[Loaded, Sequence[int]], KVCache]
) -> _Read:
    def rows(model: Loaded) -> dict[int, Tensor]:
        shape: KVShape = model.shape
        return bare_rows(reads(model, ids), list(range(shape.layers)), 0, shape)

    return _Read(tuple(ids), rows(sharer), rows(receiver))


def _until(texts: Iterable[Sequence[int]], tokens: int) -> Iterator[Sequence[int]]:
    seen = 0
    for ids in texts:
        if len(ids) > 1:
            yield ids
            seen += len(ids)
        if seen >= tokens:
            return


def _begin(scouts: Sequence[_Read], held: Sequence[_Read], top: int, head: int) -> _Moments:
    moments = _Moments(_best_layers(scouts, held, top), scouts[0], head)
    for one in scouts:
        moments.add(one)
    return moments


def _best_layers(scouts: Sequence[_Read], held: Sequence[_Read], top: int) -> tuple[tuple[int, ...], ...]:
    """By receiver layer, the sharer layers that alone explain most of its K and V on the held-out texts."""
    layers, targets = len(scouts[0].source), range(len(scouts[0].target))
    scores = torch.zeros(layers, len(targets))
    for kind in range(_KINDS):
        fitted, judged = (
            torch.stack([torch.cat([one.target[t][kind] for one in reads]) for t in targets])
            for reads in (scouts, held)
        )
        middle = fitted.mean(1, keepdim=True)
        spread = (judged - middle).square().sum((1, 2))
        for layer in range(layers):
            seen, new = (torch.cat([one.source[layer][kind] for one in reads]) for reads in (scouts, held))
            mean = seen.mean(0)
            gram = (seen - mean).T @ (seen - mean)
            gram.diagonal().mul_(1 + _SCOUT_RIDGE).add_(1e-6)
            maps = torch.linalg.solve(gram, (seen - mean).T @ (fitted - middle))
            left = (judged - middle - (new - mean) @ maps).square().sum((1, 2))
            scores[layer] += (1 - left / spread.clamp_min(1e-12)).cpu()
    best = scores.sort(dim=0, descending=True, stable=True).indices[: min(top, layers)]
    return tuple(tuple(sorted(best[:, t].tolist())) for t in targets)


class _Moments:
    """Sums of products over tokens, in float64: inputs with inputs, inputs with outputs; by receiver layer and kind.

    Two inputs stand behind the sharer's: one that is always 1, and one that is 1 at position 0.
    """

    def __init__(self, layers: tuple[tuple[int, ...], ...], like: _Read, head: int) -> None:
        self.layers = layers
        self._head = head
        first, mine = like.source[0], like.target[0]
        inputs, outputs, count = len(layers[0]) * first.shape[2] + 2, mine.shape[2], len(layers)
        new = {"dtype": torch.float64, "device": first.device}
        self._gram = torch.zeros(count, _KINDS, inputs, inputs, **new)  # type: ignore[call-overload]
        self._cross = torch.zeros(count, _KINDS, inputs, outputs, **new)  # type: ignore[call-overload]

    def add(self, one: _Read) -> None:
        for layer, reads in enumerate(self.layers):
            x, y = _inputs(one, reads).double(), one.target[layer].double()
            self._gram[layer] += x.mT @ x
            self._cross[layer] += x.mT @ y

    def solve(self, held: Sequence[_Read]) -> tuple[dict[str, Tensor], tuple[tuple[float, float], ...]]:
        """The fuser's tensors, and the share of the held-out variance they explain, by layer and kind."""
        weight, r2 = torch.zeros(self._cross.shape, dtype=torch.float32, device=self._cross.device), []
        for layer, reads in enumerate(self.layers):
            x, y = torch.cat([_inputs(one, reads) for one in held], 1), torch.cat([o.target[layer] for o in held], 1)
            kinds = []
            for kind in range(_KINDS):
                weight[layer, kind], explained = self._solve(layer, kind, x[kind].double(), y[kind].double())
                kinds.append(explained)
            r2.append((kinds[0], kinds[1]))
        parts = {"weight": weight[:, :, :-2], "bias": weight[:, :, -2], "first": weight[:, :, -1]}
        return {name: t.contiguous() for name, t in parts.items()}, tuple(r2)

    def _solve(self, layer: int, kind: int, x: Tensor, y: Tensor) -> tuple[Tensor, float]:
        """Every head with the ridge that suits it best on x, y."""
        gram, cross = self._gram[layer, kind], self._cross[layer, kind]
        tokens = gram[-2, -2]
        variance = (gram.diagonal() / tokens - (gram[-2] / tokens).square()).clamp_min(1e-12)
        variance[-2:] = 0
        best = torch.full((y.shape[1],), float("inf"), dtype=y.dtype, device=y.device)
        chosen = torch.zeros_like(cross)
        for ridge in _RIDGES:
            maps = _cholesky(gram + torch.diag(ridge * tokens * variance), cross)
            if maps is None:
                continue
            by_head = (y - x @ maps).square().sum(0).view(-1, self._head).sum(1)
            error = by_head.repeat_interleave(self._head)
            better = error < best
            best = torch.where(better, error, best)  # of each output's whole head
            chosen = torch.where(better, maps, chosen)
        if not bool(best.isfinite().all()):
            raise LoadFailed("a linear fuser cannot be fitted: too few tokens, or KV that is not finite")
        spread = (y - y.mean(0)).square().sum().clamp_min(1e-12)
        return chosen.float(), float(1 - best.sum() / self._head / spread)


def _inputs(one: _Read, layers: Sequence[int]) -> Tensor:
    """(K | V, tokens, inputs): chosen sharer layers side by side, then 1, then 1 at position 0."""
    rows = torch.cat([one.source[i] for i in layers], dim=2)
    more = rows.new_zeros(_KINDS, rows.shape[1], 2)
    more[:, :, 0] = 1
    more[:, 0, 1] = 1
    return torch.cat((rows, more), dim=2)


def _cholesky(gram: Tensor, cross: Tensor) -> Tensor | None:
    """The solution, None where the equations do not hold one. Scaled, so that large inputs do not drown small ones."""
    scale = gram.diagonal().clamp_min(1e-30).rsqrt()
    factor, failed = torch.linalg.cholesky_ex(gram * scale[:, None] * scale)
    if bool(failed):
        return None
    solved: Tensor = scale[:, None] * torch.cholesky_solve(scale[:, None] * cross, factor)
    return solved

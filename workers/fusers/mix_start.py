"""Where a `mix` network in handover begins: the ridge regression of the receiver's KV on the sharer's, cut to its rank.

Solved over slots instead of dimensions, because a layer may read many thousands of them. Knows tensors and the network.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from workers.fusers.base import Slots
from workers.fusers.mix_net import MixLayer, MixNet

_MOST = 2048
"""Slots that are looked at: the equations have as many unknowns."""
_HELD_OUT_EVERY = 8
_RIDGES = (1e-4, 1e-3, 1e-2, 1e-1, 1.0)
"""Tried in turn, as shares of the mean square of an input row."""


@torch.no_grad()
def begin(net: MixNet, texts: Sequence[Slots]) -> tuple[float, ...]:
    """Set the layers' linear path to the best map of their rank that the texts tell of; statistics must be taken
    before. Returns by layer the share of variance that the map explains on slots that were held out, nothing where
    there are too few slots.
    """
    slots = Slots.concat(texts)
    count = len(slots.at)
    if count < 2 * _HELD_OUT_EVERY:
        return ()
    chosen = torch.arange(count)[:: -(-count // _MOST)]
    held = chosen[::_HELD_OUT_EVERY]
    fitted = chosen[torch.arange(len(chosen)) % _HELD_OUT_EVERY != 0]
    found = []
    duals: list[_Dual] = []
    modules = [module for module in net.layers if isinstance(module, MixLayer)]
    for layer, (module, (rows, wanted)) in enumerate(zip(modules, net.examples(slots), strict=True)):
        if not layer or net.shape.reads[layer] != net.shape.reads[layer - 1]:
            duals = [_Dual(rows[fitted], ridge) for ridge in _RIDGES]
        y, seen = wanted[fitted], rows[held]
        errors = [float((dual.predict(seen, y) - wanted[held]).square().sum()) for dual in duals]
        best = min(range(len(_RIDGES)), key=errors.__getitem__)
        _cut(module, duals[best].maps(y), rows[fitted])
        spread = (wanted[held] - y.mean(0)).square().sum().clamp_min(1e-12)
        found.append(1 - errors[best] / float(spread))
    return tuple(found)


class _Dual:
    """Ridge regression on one set of rows (slots, inputs), for any targets."""

    def __init__(self, rows: Tensor, ridge: float) -> None:
        self._rows = rows.double()
        gram = self._rows @ self._rows.T
        gram.diagonal().add_(ridge * gram.diagonal().mean().clamp_min(1e-9))
        self._factor = torch.linalg.cholesky(gram)

    def maps(self, y: Tensor) -> Tensor:
        """(inputs, outputs)."""
        return self._rows.T @ torch.cholesky_solve(y.double(), self._factor)

    def predict(self, rows: Tensor, y: Tensor) -> Tensor:
        """Of new rows."""
        return (rows.double() @ self.maps(y)).to(y.dtype)


def _cut(layer: MixLayer, maps: Tensor, rows: Tensor) -> None:
    """The map of the layer's rank that comes closest on these rows."""
    directions = torch.linalg.svd(rows.double() @ maps, full_matrices=False).Vh[: layer.down.out_features]
    rank = len(directions)
    layer.down.weight.zero_()
    layer.up.weight.zero_()
    layer.down.weight[:rank] = (maps @ directions.T).T.to(layer.down.weight.dtype)
    layer.up.weight[:, :rank] = directions.T.to(layer.up.weight.dtype)
    layer.down.bias.zero_()

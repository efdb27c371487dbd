"""Rotary position embedding on cached keys: put on, and taken off.

Keys are cached after rotation, so what a key says is mixed with where it stands. A fuser that maps contents takes the
rotation off first and puts it on again behind. The convention is the one of Llama: dimension i is paired with i + half.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

Angles = tuple[Tensor, Tensor]
"""Cosines and sines by token and dimension."""


def rotate(keys: Tensor, start: int, theta: float) -> Tensor:
    """Keys (..., tokens, head_size) as they are cached when the first one stands at position `start`; float32."""
    cos, sin = _angles(keys, start, theta)
    return _turn(keys.float(), cos, sin)


def unrotate(keys: Tensor, start: int, theta: float) -> Tensor:
    """The inverse of `rotate`; float32."""
    cos, sin = _angles(keys, start, theta)
    return _turn(keys.float(), cos, -sin)


def turn(keys: Tensor, angles: Angles) -> Tensor:
    """Keys (..., tokens, head_size) turned by `angles_at`; float32."""
    return _turn(keys.float(), *angles)


def angles_at(positions: Tensor, size: int, theta: float, *, back: bool = False) -> Angles:
    """Of tokens that stand anywhere, each (tokens, head_size); `back` takes the rotation off."""
    # On the CPU in float32, as `_table` does.
    inverse = 1.0 / theta ** (torch.arange(0, size, 2, dtype=torch.float32) / size)
    angles = torch.outer(positions.cpu().float(), inverse)
    both = torch.cat((angles, angles), dim=-1)
    cos, sin = both.cos().to(positions.device), both.sin().to(positions.device)
    return cos, -sin if back else sin


def _angles(keys: Tensor, start: int, theta: float) -> tuple[Tensor, Tensor]:
    tokens, size = keys.shape[-2:]
    # Whether in inference mode is part of the name: what is made there cannot take part in training.
    return _table(start, tokens, size, theta, keys.device, torch.is_inference_mode_enabled())


@lru_cache(maxsize=4)
def _table(
    start: int, tokens: int, size: int, theta: float, device: torch.device, inference: bool
) -> tuple[Tensor, Tensor]:
    """Kept for the next layers of the same call: each copy to a device would wait for all that it has to do."""
    # On the CPU in float32, as transformers computes them: the same positions give the same bits on every device.
    inverse = 1.0 / theta ** (torch.arange(0, size, 2, dtype=torch.float32) / size)
    angles = torch.outer(torch.arange(start, start + tokens, dtype=torch.float32), inverse)
    both = torch.cat((angles, angles), dim=-1)
    return both.cos().to(device), both.sin().to(device)


def _turn(keys: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = keys.chunk(2, dim=-1)
    return keys * cos + torch.cat((-second, first), dim=-1) * sin

"""Rotation put on and taken off."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from tests.workers.tiny import tiny
from workers.fusers.rope import rotate, unrotate
from workers.greedy import read


@settings(max_examples=30, deadline=None)
@given(start=st.integers(0, 8000), tokens=st.integers(0, 9), half=st.integers(1, 32), seed=st.integers(0, 9))
def test_unrotate_is_the_inverse(start: int, tokens: int, half: int, seed: int) -> None:
    """Taking the rotation off gives back what was rotated, at every position."""
    keys = torch.randn(1, 2, tokens, 2 * half, generator=torch.Generator().manual_seed(seed))
    assert torch.allclose(unrotate(rotate(keys, start, 1e5), start, 1e5), keys, atol=1e-5)


@pytest.mark.parametrize("start", [0, 7, 100])
def test_rotation_is_the_models_own(start: int) -> None:
    """Keys rotated here are the keys that transformers caches."""
    model = tiny(1)
    theta = model.shape.rope_theta
    assert theta is not None
    bare = torch.randn(1, 2, 5, 16)
    positions = torch.arange(start, start + 5)[None]
    cos, sin = model.model.model.rotary_emb(bare, positions)
    _, expected = apply_rotary_pos_emb(bare, bare, cos, sin)
    assert torch.allclose(rotate(bare, start, theta), expected, atol=1e-5)


def test_bare_keys_do_not_depend_on_position() -> None:
    """In the first layer the same token has the same key everywhere, once its rotation is off."""
    model = tiny(1)
    theta = model.shape.rope_theta
    assert theta is not None
    keys = unrotate(read(model, [5, 5, 5, 5]).keys[0], 0, theta)
    assert torch.allclose(keys, keys[:, :, :1].expand_as(keys), atol=1e-5)
    assert not torch.allclose(read(model, [5, 5]).keys[0][:, :, 0], read(model, [5, 5]).keys[0][:, :, 1], atol=1e-3)


def test_position_zero_is_untouched() -> None:
    """At position 0 the angle is nothing."""
    keys = torch.randn(1, 1, 1, 8)
    assert torch.equal(rotate(keys, 0, 1e4), keys)

"""The estimate of what training takes, against trainings that were measured."""

from __future__ import annotations

import pytest
import torch

from workers.train_cost import Kind, Sizes, Tokens, cost, speed_here

TINY, MIDDLE = Sizes(82_944, 19_200, 3), Sizes(4_726_784, 102_400, 8)
SMOL, CUT = Sizes(106_203_456, 28_311_552, 30), Sizes(70_802_304, 28_311_552, 20)

MEASURED: list[tuple[Kind, Sizes, Sizes, int, Tokens, float, float, float]] = [
    # operations a second of a large product on the core; seconds of a step: first, and with kept KV
    ("lite", TINY, TINY, 30_000, Tokens(250, 20, 6), 57e9, 0.027, 0.020),
    ("lite", TINY, TINY, 30_000, Tokens(250, 100, 80), 57e9, 0.033, 0.024),
    ("c2c", TINY, TINY, 180_000, Tokens(60, 20, 6), 57e9, 0.057, 0.047),
    ("lite", MIDDLE, MIDDLE, 1_150_000, Tokens(250, 20, 6), 63e9, 0.168, 0.098),
    ("lite", MIDDLE, MIDDLE, 1_150_000, Tokens(250, 100, 80), 63e9, 0.209, 0.138),
    ("c2c", MIDDLE, MIDDLE, 2_370_000, Tokens(250, 20, 6), 63e9, 0.408, 0.247),
    ("c2c", MIDDLE, MIDDLE, 2_370_000, Tokens(60, 20, 6), 63e9, 0.184, 0.157),
    ("lite", SMOL, CUT, 12_910_000, Tokens(250, 20, 6), 73e9, 1.878, 0.781),
    ("lite", SMOL, CUT, 12_910_000, Tokens(60, 20, 6), 73e9, 0.831, 0.619),
    ("lite", SMOL, CUT, 12_910_000, Tokens(250, 100, 80), 73e9, 2.645, 1.391),
    ("c2c", SMOL, CUT, 21_710_000, Tokens(250, 20, 6), 73e9, 3.344, 1.561),
    ("c2c", SMOL, CUT, 21_710_000, Tokens(60, 20, 6), 73e9, 1.546, 1.022),
]
"""Process time on one core, 30 November 2026: random tiny models, and SmolLM2-135M with a 20-layer cut of itself."""


@pytest.mark.parametrize(("kind", "sharer", "receiver", "fuser", "tokens", "speed", "first", "kept"), MEASURED)
def test_the_estimate_is_near_what_was_measured(
    kind: Kind, sharer: Sizes, receiver: Sizes, fuser: int, tokens: Tokens, speed: float, first: float, kept: float
) -> None:
    """Within a factor of 1.6 over three orders of magnitude, with and without kept KV."""
    found = cost(kind, sharer, receiver, fuser, tokens, own=kind == "c2c")
    assert first / 1.6 < found.seconds(0.6 * speed) < first * 1.6
    assert kept / 1.6 < found.seconds(0.6 * speed, kept=True) < kept * 1.6


def test_the_speed_of_this_machine_is_that_of_a_product() -> None:
    """Some operations a second, fewer than any core does; it asks for no device that is not here."""
    assert 1e6 < speed_here(torch.float32, "cpu") < 1e14

"""workers.muon: what torch's Muon does, in float32 and for many matrices at once."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from workers.muon import Muon, orthogonal

SHAPES = ((6, 9), (9, 6), (6, 9), (4, 4))


def matrices(seed: int = 0) -> list[torch.nn.Parameter]:
    random = torch.Generator().manual_seed(seed)
    return [torch.nn.Parameter(torch.randn(shape, generator=random)) for shape in SHAPES]


def stepped(made: list[torch.nn.Parameter], optimizer: torch.optim.Optimizer, steps: int, start: int = 0) -> None:
    for step in range(start, start + steps):
        random = torch.Generator().manual_seed(100 + step)
        for matrix in made:
            matrix.grad = torch.randn(matrix.shape, generator=random)
        optimizer.step()


def test_it_goes_where_torchs_own_goes() -> None:
    """After some steps, with weight decay, up to the rounding of bfloat16 that torch computes in."""
    ours, theirs = matrices(), matrices()
    stepped(ours, Muon(ours, lr=0.05, weight_decay=0.1), 5)
    stepped(theirs, torch.optim.Muon(theirs, lr=0.05, weight_decay=0.1), 5)
    for mine, other, before in zip(ours, theirs, matrices(), strict=True):
        moved, wanted = (mine - before).detach().flatten(), (other - before).detach().flatten()
        assert float(torch.cosine_similarity(moved, wanted, dim=0)) > 0.999
        assert float(moved.norm() / wanted.norm()) == pytest.approx(1.0, abs=0.02)


def test_a_matrix_among_others_goes_where_it_goes_alone() -> None:
    """Others of its shape change nothing; one without a gradient stays."""
    together, alone = matrices(), matrices()
    every, single = Muon(together, lr=0.1), Muon([alone[0]], lr=0.1)
    for optimizer, made in ((every, together), (single, alone)):
        for matrix in made[:3]:
            matrix.grad = torch.ones_like(matrix) * torch.arange(matrix.shape[1])
        optimizer.step()
    torch.testing.assert_close(together[0], alone[0])
    assert torch.equal(together[3], matrices()[3])


def test_it_goes_on_from_its_state() -> None:
    """Saved and loaded between two steps, it ends at the same bytes."""
    whole, cut = matrices(), matrices()
    stepped(whole, Muon(whole, lr=0.1), 4)
    first = Muon(cut, lr=0.1)
    stepped(cut, first, 2)
    second = Muon(cut, lr=0.1)
    second.load_state_dict(first.state_dict())
    stepped(cut, second, 2, start=2)
    assert all(torch.equal(a, b) for a, b in zip(whole, cut, strict=True))


@settings(max_examples=30, deadline=None)
@given(
    rows=st.integers(1, 12),
    columns=st.integers(1, 12),
    seed=st.integers(0, 99),
    scale=st.sampled_from([1e-4, 1.0, 1e4]),
)
def test_singular_values_come_near_one(rows: int, columns: int, seed: int, scale: float) -> None:
    """Whatever the shape and size, none grows beyond 1.3; a matrix of nothing stays nothing."""
    given_one = torch.randn(1, rows, columns, generator=torch.Generator().manual_seed(seed)) * scale
    values = torch.linalg.svdvals(orthogonal(given_one)[0])
    assert float(values.max()) < 1.3
    assert float(values.max()) > 0.6
    assert float(orthogonal(torch.zeros(1, rows, columns)).abs().max()) == 0.0


def test_only_matrices_are_taken() -> None:
    """A vector is refused."""
    with pytest.raises(ValueError, match="for matrices"):
        Muon([torch.nn.Parameter(torch.zeros(3))], lr=0.1)

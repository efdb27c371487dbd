"""How a worker's threads are told to wait."""

from __future__ import annotations

import pytest

from workers.spin import let_threads_spin


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, {"GOMP_SPINCOUNT": "3000"}),
        ({"OMP_WAIT_POLICY": "PASSIVE"}, {"OMP_WAIT_POLICY": "PASSIVE"}),
        ({"GOMP_SPINCOUNT": "7"}, {"GOMP_SPINCOUNT": "7"}),
        ({"OMP_NUM_THREADS": "4"}, {"OMP_NUM_THREADS": "4", "GOMP_SPINCOUNT": "3000"}),
    ],
)
def test_threads_spin_a_little_where_nobody_has_said_otherwise(
    environment: dict[str, str], expected: dict[str, str]
) -> None:
    """Either of OpenMP's own variables is left as it is."""
    let_threads_spin(environment)
    assert environment == expected

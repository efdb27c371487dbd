"""How long the threads of a CPU's forward spin before they sleep. Read by OpenMP when torch is imported."""

from __future__ import annotations

from collections.abc import MutableMapping

_SPINS = "3000"
"""Turns of GNU OpenMP's waiting loop. A decode step has some hundred parallel parts, each over in a few dozen
microseconds. Threads that sleep between them are woken as often: SmolLM2-135M on two quiet cores, 48 ms a step in place
of 40, and 8 answers 75 in place of 60. Threads that spin as long as is usual take the cores from whatever else runs
there, the router first: on busy cores a step then took up to fifty times as long.
"""


def let_threads_spin(environment: MutableMapping[str, str]) -> None:
    """A little, where nobody has said otherwise. Before torch is imported."""
    if "OMP_WAIT_POLICY" not in environment:
        environment.setdefault("GOMP_SPINCOUNT", _SPINS)

"""Identity: sharer and receiver are the same weights, so the sharer's KV is the receiver's, bit for bit.

Such a pair is pure reuse: what one role has read, the other need not read again.
"""

from __future__ import annotations

from workers.cache import KVCache
from workers.errors import LoadFailed
from workers.fusers.base import Change, KVShape


class IdentityFuser:
    """Hands KV over untouched. Refuses, at load, models that are not the same."""

    kind = "identity"
    digest = "identity"
    needs_own = False
    parameters = 0

    def __init__(self, sharer: dict[str, str], receiver: dict[str, str], shape: KVShape) -> None:
        different = sorted(k for k in sharer.keys() | receiver.keys() if sharer.get(k) != receiver.get(k))
        if different:
            raise LoadFailed(f"an identity pair needs the same model on both sides; these differ in {different}")
        self.source_layers = frozenset(range(shape.layers))

    def project(self, source: KVCache, own: KVCache | None, start: int) -> KVCache:
        """The source itself."""
        return source

    def change(self) -> Change:
        """Nothing is changed; every layer passes."""
        return Change(gates_open=1.0, relative=0.0)

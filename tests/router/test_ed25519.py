"""Signatures by Python's own OpenSSL, beside those of the cryptography package."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router import ed25519

SECRETS = st.binary(min_size=32, max_size=32)


@given(SECRETS, st.binary(max_size=300))
def test_both_makes_sign_alike(secret: bytes, message: bytes) -> None:
    """The same secret has the same public half and signs the same bytes by either, and each takes the other's."""
    own, packaged = ed25519.private_key(secret), ed25519._Packaged(secret)
    assert isinstance(own, ed25519._Own)
    assert (own.public, own.sign(message)) == (packaged.public, packaged.sign(message))
    assert ed25519.verify(own.public, packaged.sign(message), message)
    assert ed25519._verify_packaged(own.public, own.sign(message), message)


@given(SECRETS, st.binary(min_size=1, max_size=100), st.data())
def test_whatever_was_changed_does_not_verify(secret: bytes, message: bytes, data: st.DataObject) -> None:
    """One bit of the key, the signature or the message: by neither make."""
    key = ed25519.private_key(secret)
    parts = [key.public, key.sign(message), message]
    which = data.draw(st.integers(0, 2))
    bit = data.draw(st.integers(0, len(parts[which]) * 8 - 1))
    changed = bytearray(parts[which])
    changed[bit // 8] ^= 1 << bit % 8
    parts[which] = bytes(changed)
    assert not ed25519.verify(*parts)
    assert not ed25519._verify_packaged(*parts)


@pytest.mark.parametrize(("public", "signature"), [(b"", bytes(64)), (bytes(33), bytes(64)), (bytes(32), bytes(63))])
def test_odd_sizes_verify_nothing(public: bytes, signature: bytes) -> None:
    """Keys and signatures of another length are refused before any library reads them."""
    assert not ed25519.verify(public, signature, b"")


def test_a_key_has_its_size() -> None:
    """A truncated secret is refused."""
    with pytest.raises(ValueError, match="32 bytes"):
        ed25519.private_key(bytes(31))

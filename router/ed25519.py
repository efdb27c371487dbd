"""Ed25519 (RFC 8032) by the OpenSSL that Python itself runs on; by the cryptography package where that lacks it.

The package brings a second OpenSSL along: 6.5 MB of every router, whose audit log needs nothing else of it unless a
tenant has content sealed.
"""

from __future__ import annotations

import _ssl
import ctypes
import weakref
from functools import cache
from typing import Any, Protocol

_NID = 1087
"""`EVP_PKEY_ED25519`."""
_SIZE = 64
"""Bytes of a signature."""


class PrivateKey(Protocol):
    """A key that signs."""

    @property
    def public(self) -> bytes:
        """32 bytes."""

    def sign(self, message: bytes) -> bytes:
        """64 bytes, the same for the same message."""


def private_key(secret: bytes) -> PrivateKey:
    """The key of 32 secret bytes, of which any will do. Raises ValueError for another number."""
    if len(secret) != 32:
        raise ValueError("an Ed25519 key has 32 bytes")
    library = _library()
    return _Packaged(secret) if library is None else _Own(library, secret)


def verify(public: bytes, signature: bytes, message: bytes) -> bool:
    """Whether the key of these 32 bytes signed the message."""
    if len(public) != 32 or len(signature) != _SIZE:
        return False
    library = _library()
    return (
        _verify_packaged(public, signature, message)
        if library is None
        else _verify(library, public, signature, message)
    )


class _Own:
    def __init__(self, library: Any, secret: bytes) -> None:
        self._library = library
        self._key = library.EVP_PKEY_new_raw_private_key(_NID, None, secret, len(secret))
        if not self._key:
            raise _failed(library)
        weakref.finalize(self, library.EVP_PKEY_free, self._key)
        public = ctypes.create_string_buffer(32)
        if library.EVP_PKEY_get_raw_public_key(self._key, public, ctypes.byref(ctypes.c_size_t(32))) != 1:
            raise _failed(library)
        self.public = public.raw

    def sign(self, message: bytes) -> bytes:
        library, found, size = self._library, ctypes.create_string_buffer(_SIZE), ctypes.c_size_t(_SIZE)
        context = library.EVP_MD_CTX_new()
        try:
            if (
                library.EVP_DigestSignInit(context, None, None, None, self._key) != 1
                or library.EVP_DigestSign(context, found, ctypes.byref(size), message, len(message)) != 1
            ):
                raise _failed(library)
        finally:
            library.EVP_MD_CTX_free(context)
        return found.raw


def _verify(library: Any, public: bytes, signature: bytes, message: bytes) -> bool:
    key = library.EVP_PKEY_new_raw_public_key(_NID, None, public, len(public))
    context = library.EVP_MD_CTX_new()
    try:
        return bool(
            key
            and library.EVP_DigestVerifyInit(context, None, None, None, key) == 1
            and library.EVP_DigestVerify(context, signature, len(signature), message, len(message)) == 1
        )
    finally:
        library.EVP_MD_CTX_free(context)
        library.EVP_PKEY_free(key)
        library.ERR_clear_error()  # a signature that does not hold leaves an error, which is nobody else's


def _failed(library: Any) -> RuntimeError:
    library.ERR_clear_error()
    return RuntimeError("OpenSSL cannot sign")


class _Packaged:
    def __init__(self, secret: bytes) -> None:
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

        self._key = Ed25519PrivateKey.from_private_bytes(secret)
        self.public = self._key.public_key().public_bytes_raw()

    def sign(self, message: bytes) -> bytes:
        return self._key.sign(message)


def _verify_packaged(public: bytes, signature: bytes, message: bytes) -> bool:
    from cryptography.exceptions import InvalidSignature
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

    try:
        Ed25519PublicKey.from_public_bytes(public).verify(signature, message)
    except (InvalidSignature, ValueError):
        return False
    return True


_POINTER, _BYTES, _LENGTH = ctypes.c_void_p, ctypes.c_char_p, ctypes.c_size_t
_FUNCTIONS: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "EVP_PKEY_new_raw_private_key": (_POINTER, (ctypes.c_int, _POINTER, _BYTES, _LENGTH)),
    "EVP_PKEY_new_raw_public_key": (_POINTER, (ctypes.c_int, _POINTER, _BYTES, _LENGTH)),
    "EVP_PKEY_get_raw_public_key": (ctypes.c_int, (_POINTER, _BYTES, _POINTER)),
    "EVP_PKEY_free": (None, (_POINTER,)),
    "EVP_MD_CTX_new": (_POINTER, ()),
    "EVP_MD_CTX_free": (None, (_POINTER,)),
    "EVP_DigestSignInit": (ctypes.c_int, (_POINTER,) * 5),
    "EVP_DigestSign": (ctypes.c_int, (_POINTER, _BYTES, _POINTER, _BYTES, _LENGTH)),
    "EVP_DigestVerifyInit": (ctypes.c_int, (_POINTER,) * 5),
    "EVP_DigestVerify": (ctypes.c_int, (_POINTER, _BYTES, _LENGTH, _BYTES, _LENGTH)),
    "ERR_clear_error": (None, ()),
}
"""Result and arguments, by OpenSSL's manual (since 1.1.1)."""

_SECRET = bytes.fromhex("9d61b19deffd5a60ba844af492ec2cc44449c5697b326919703bac031cae7f60")
_PUBLIC = bytes.fromhex("d75a980182b10ab7d54bfed3c964073a0ee172f3daa62325af021a68f707511a")
_SIGNATURE = bytes.fromhex(
    "e5564300c360ac729086e2cc806e828a84877f1eb8e5d974d873e065224901555fb8821590a33bacc61e39701cf9b46bd25bf5f0595bbe24655141438e7a100b"
)
"""RFC 8032's first test, of an empty message."""


@cache
def _library() -> Any | None:
    """What the module `ssl` is linked to; None where that cannot be told, or does not do what the RFC says."""
    try:
        # A lookup in a module goes on in what it is linked to. No call lasts long enough to give the lock away for.
        library = ctypes.PyDLL(_ssl.__file__)
        for name, (result, arguments) in _FUNCTIONS.items():
            function = getattr(library, name)
            function.restype, function.argtypes = result, arguments
        key = _Own(library, _SECRET)
        right = key.public == _PUBLIC and key.sign(b"") == _SIGNATURE and _verify(library, _PUBLIC, _SIGNATURE, b"")
    except (AttributeError, OSError, RuntimeError):  # built in, or of another make; Ed25519 forbidden (FIPS)
        return None
    return library if right else None

"""Secrets: how an engine's key becomes the key that the pool knows.

Owns: the derivation, stated once for agents and controllers. Must not know: who has which secret,
or where it is kept.

An engine's key is a hash of a prompt, and whoever guesses the prompt has the key. In a namespace
with a secret, what stands on the wire, in the switch and in every index is a keyed hash of it
(BLAKE2b, RFC 7693, with the secret as its key, 16 bytes long): who does not have the secret cannot
name a block of the namespace, and the same prompt in two namespaces has two unrelated keys. The
agent derives keys where a client's request comes in; clients never see a secret, nor a derived
key.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Final

from kvcast.protocol.messages.wire import KEY_BYTES

SECRET_BYTES: Final = 32
_PERSON: Final = b"kvcast key"
"""Keeps these hashes apart from any others that might be made with the same key."""


class KeyDerivation:
    """A namespace's secret, ready to derive keys by; ValueError if it has not `SECRET_BYTES`."""

    __slots__ = ("_hash", "_secret")

    def __init__(self, secret: bytes) -> None:
        if len(secret) != SECRET_BYTES:
            raise ValueError(f"a secret has {SECRET_BYTES} bytes, not {len(secret)}")
        self._secret = secret
        self._hash = hashlib.blake2b(digest_size=KEY_BYTES, key=secret, person=_PERSON)

    def __repr__(self) -> str:
        return "Secret(…)"

    def is_made_of(self, secret: bytes) -> bool:
        """Whether it derives as a secret of these bytes would."""
        return self._secret == secret

    def key(self, engine_key: bytes) -> bytes:
        """The pool's key of an engine's."""
        state = self._hash.copy()
        state.update(engine_key)
        return state.digest()

    def keys(self, engine_keys: Sequence[bytes]) -> list[bytes]:
        """The pool's keys, in order."""
        return [self.key(engine_key) for engine_key in engine_keys]

"""The key of one preflight: derived from a secret, it proves who speaks and is never sent."""

from __future__ import annotations

import hashlib
import hmac
from dataclasses import dataclass, field

_SALT = b"rankscope preflight 2"
_LONG_ENOUGH = 32  # characters: a made secret cannot be guessed; what people write may be a word
_ROUNDS = 50_000  # 20 ms: for each guess at a word


@dataclass(frozen=True)
class RunKey:
    """What all agents of one preflight hold. Each use has a key of its own."""

    secret: bytes = field(repr=False)
    run_id: str = ""

    @classmethod
    def of(cls, text: str, run_id: str = "") -> RunKey:
        """Return the key of a secret that was given as text."""
        words = text.encode()
        if len(text) < _LONG_ENOUGH:
            words = hashlib.pbkdf2_hmac("sha256", words, _SALT, _ROUNDS)
        return cls(hmac.digest(_SALT, words, "sha256"), run_id)

    def derived(self, use: str) -> bytes:
        """Return a key for one use in this run; neither the secret nor another key follows."""
        return tag(self.secret, "use", use, self.run_id)

    def words_for_server(self) -> str:
        """Return what a server that coordinates this run may know: with it, it can only knock."""
        return self.derived("server").hex()


def tag(key: bytes, *parts: bytes | str) -> bytes:
    """Return the HMAC-SHA256 of `parts`; no two lists of parts are the same bytes."""
    return hmac.digest(key, packed(*parts), "sha256")


def packed(*parts: bytes | str) -> bytes:
    """Return `parts`, each with its length in front."""
    raw = (part.encode() if isinstance(part, str) else part for part in parts)
    return b"".join(len(part).to_bytes(4, "big") + part for part in raw)

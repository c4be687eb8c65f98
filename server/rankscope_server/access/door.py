"""Finds out who sends a request, and how often an address may try wrong tokens.

A token is verified once: scrypt costs 30 ms, a batch of a collector less than one. What was
verified is remembered by its digest, and its row is read again when that is older than
`RECHECK_S`: a token that another process revoked ends within that, one revoked here at once.
What was refused is remembered too, so that a thousand collectors with an old token are one try
and not a thousand: only *different* wrong tokens of an address count, as guesses are.
"""

from __future__ import annotations

import hashlib
import secrets
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import sqlalchemy as sa

from rankscope_server.access import tokens
from rankscope_server.access.roles import OPERATOR, Principal, included
from rankscope_server.store import tables

RECHECK_S = 2.0
USED_S = 60.0
MAX_REMEMBERED = 10_000  # verified and refused, each
_HASHING = 2  # at a time, of 16 MiB
_UNKNOWN = "this token is not known"
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Credential:
    """What a request carries to show who sends it."""

    text: str
    is_cookie: bool = False

    @property
    def digest(self) -> bytes:
        """Return the key under which it is remembered."""
        return hashlib.sha256(f"{self.is_cookie:d}{self.text}".encode()).digest()


@dataclass(frozen=True, slots=True)
class _Verified:
    principal: Principal
    at_s: float


class Door:
    """Verifies credentials. `known` and `is_open` may say that they do not know: then ask `admit`
    and `look`, which read the store, in a thread.
    """

    def __init__(
        self,
        token: str,
        reader: sa.Engine,
        clock: Callable[[], float] = time.monotonic,
        *,
        is_shut: bool = False,
        mark: str = "",
    ) -> None:
        """`mark`: of the rules by which an issuer's people come in; empty: none do."""
        self._token, self._reader, self._clock, self._mark = token, reader, clock, mark
        self._lock = threading.Lock()
        self._hashing = threading.Semaphore(_HASHING)
        self._verified = _Recent[_Verified]()
        self._refused = _Recent[str]()
        self._right = _Recent[bool]()  # secrets that were once found right: a hash never changes
        self._changes = 0  # counts what this process revoked
        self._is_shut = is_shut or bool(token)
        self._looked_s = float("-inf")
        self._used_s: dict[str, float] = {}

    @property
    def is_open(self) -> bool | None:
        """Return whether anyone may do anything: no token was ever made. None: `look` first."""
        if self._is_shut:
            return False
        return True if self._clock() - self._looked_s < RECHECK_S else None

    def look(self) -> bool:
        """Return `is_open`, from the store."""
        with self._reader.connect() as connection:
            self._is_shut = self._is_shut or tokens.exist(connection)
        self._looked_s = self._clock()
        return not self._is_shut

    def shut(self) -> None:
        """Take note that a token was made in this process."""
        self._is_shut = True

    def known(self, credential: Credential) -> Principal | None:
        """Return who was verified just now; None: ask `admit`."""
        found = self._verified.get(credential.digest)
        is_fresh = found is not None and self._clock() - found.at_s < RECHECK_S
        return found.principal if found is not None and is_fresh else None

    def is_guess(self, credential: Credential) -> bool:
        """Return whether this may be a guess: it was neither verified nor refused before."""
        digest = credential.digest
        return self._verified.get(digest) is None and self._refused.get(digest) is None

    def admit(self, credential: Credential) -> Principal | str:
        """Return who this is, or why it is refused; reads the store."""
        digest, changes = credential.digest, self._changes
        refused = self._refused.get(digest)
        if refused is not None:
            return refused
        found = self._session(credential) if credential.is_cookie else self._of_token(credential)
        with self._lock:
            if isinstance(found, str):
                self._verified.drop(digest)
                self._refused.put(digest, found)
            elif changes == self._changes:  # else what was read may have been revoked since
                self._verified.put(digest, _Verified(found, self._clock()))
        return found

    def is_use_news(self, token_id: str) -> bool:
        """Return whether the use of a token is to be stored: once in `USED_S`."""
        now = self._clock()
        if now - self._used_s.get(token_id, float("-inf")) < USED_S:
            return False
        self._used_s[token_id] = now
        return True

    def forget(self) -> None:
        """Read everything again: something was revoked, rotated, signed out in this process."""
        with self._lock:
            self._changes += 1
            self._verified.clear()

    def _of_token(self, credential: Credential) -> Principal | str:
        # Compared in a time that does not depend on how much was right.
        if self._token and secrets.compare_digest(credential.text.encode(), self._token.encode()):
            return OPERATOR
        parts = tokens.split(credential.text)
        if parts is None:
            return _UNKNOWN
        with self._reader.connect() as connection:
            row = _row(connection, parts[0])
        if row is None:
            return _UNKNOWN
        if not self._is_right(credential, parts[1], row.hash):
            return _UNKNOWN
        return tokens.principal(row, time.time_ns())

    def _is_right(self, credential: Credential, secret: str, stored: str) -> bool:
        digest = credential.digest
        if self._right.get(digest):
            return True
        with self._hashing:  # a thousand collectors may bring the same new token at once
            if not self._right.get(digest) and not tokens.matches(secret, stored):
                return False
        self._right.put(digest, True)
        return True

    def _session(self, credential: Credential) -> Principal | str:
        with self._reader.connect() as connection:
            table, now_ns = tables.session, time.time_ns()
            wanted = table.c.id == tokens.session_id(credential.text)
            session = connection.execute(sa.select(table).where(wanted)).first()
            if session is None or session.expires_ns <= now_ns:
                return "this session has ended"
            if session.holder:
                return self._person(session)
            if not session.token_id:
                proof = tokens.session_proof(credential.text, self._token)
                is_same = self._token and secrets.compare_digest(proof, session.proof)
                return OPERATOR if is_same else "the token of this session has changed"
            row = _row(connection, session.token_id)
        return "this session has ended" if row is None else tokens.principal(row, now_ns)

    def _person(self, session: sa.Row[Any]) -> Principal | str:
        if not (self._mark and secrets.compare_digest(session.proof, self._mark)):
            return "the rules of access have changed since this session began"
        return Principal(
            name=session.holder, roles=included(tokens.roles_of(session)), project=session.project,
            expires_ns=session.expires_ns,
        )  # fmt: skip


class _Recent(Generic[_T]):
    """The newest things by their key, a bounded number. One step each: safe in any thread."""

    def __init__(self) -> None:
        self._found: OrderedDict[bytes, _T] = OrderedDict()

    def get(self, key: bytes) -> _T | None:
        return self._found.get(key)

    def put(self, key: bytes, value: _T) -> None:
        self._found[key] = value
        while len(self._found) > MAX_REMEMBERED:
            self._found.popitem(last=False)

    def drop(self, key: bytes) -> None:
        self._found.pop(key, None)

    def clear(self) -> None:
        self._found.clear()


def _row(connection: sa.Connection, id: str) -> sa.Row[Any] | None:
    return connection.execute(sa.select(tables.token).where(tables.token.c.id == id)).first()

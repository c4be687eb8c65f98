"""Sign-ins that were begun at an issuer and not ended: each is good once, in one browser."""

from __future__ import annotations

import hashlib
import hmac

import sqlalchemy as sa

from rankscope_server.access.oidc import Login
from rankscope_server.store import tables

LOGIN_SECONDS = 600
MAX_LOGINS = 10_000  # at a time; the oldest go


def put(connection: sa.Connection, login: Login, browser: str, path: str, now_ns: int) -> None:
    """Store a sign-in that begins; `browser` is the cookie that goes with it."""
    table = tables.oidc_login
    connection.execute(sa.delete(table).where(table.c.expires_ns <= now_ns))
    old = sa.select(table.c.id).order_by(table.c.expires_ns.desc()).offset(MAX_LOGINS - 1)
    connection.execute(sa.delete(table).where(table.c.id.in_(list(connection.scalars(old)))))
    connection.execute(
        sa.insert(table).values(
            id=_digest(login.state), browser=_digest(browser), nonce=login.nonce,
            verifier=login.verifier, path=path, expires_ns=now_ns + LOGIN_SECONDS * 10**9,
        )
    )  # fmt: skip


def take(
    connection: sa.Connection, state: str, browser: str, now_ns: int
) -> tuple[Login, str] | None:
    """Return a sign-in and where to go afterwards; None if it is over, used, or another's."""
    table = tables.oidc_login
    row = connection.execute(sa.select(table).where(table.c.id == _digest(state))).first()
    if row is None:
        return None
    done = connection.execute(sa.delete(table).where(table.c.id == row.id))
    is_same = hmac.compare_digest(row.browser, _digest(browser))
    if not done.rowcount or not is_same or row.expires_ns <= now_ns:
        return None
    return Login(state, row.nonce, row.verifier), row.path


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()

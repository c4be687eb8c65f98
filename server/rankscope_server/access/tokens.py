"""Tokens and sessions: how they look, how they are stored, made, rotated, revoked.

A token is `rs_ID_SECRET`. The id is public and finds the row; of the secret the row holds scrypt
with a salt. 256 random bits would need no slow hash: it costs 30 ms once for each process (see
`door.py`, which remembers), and makes a stolen database worth nothing by any standard. A session
is 256 random bits in a cookie; SHA-256 of it finds the row at every look, so that is fast.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import re
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa

from rankscope_server.access.roles import (
    ALL_PROJECTS,
    OPERATOR,
    ROLES,
    Principal,
    Role,
    included,
)
from rankscope_server.answers import to_ms
from rankscope_server.problems import Problem, not_found
from rankscope_server.store import tables

PREFIX = "rs_"
MAX_TOKENS = 10_000  # that are not revoked
MAX_SESSIONS = 10_000
PROJECT = r"^([A-Za-z0-9][A-Za-z0-9._-]{0,63}|\*)$"
NAME = r"^[^\x00-\x1f\x7f]{1,64}$"
_TOKEN = re.compile(r"rs_([0-9a-f]{12})_([A-Za-z0-9_-]{43})")
_COST, _BLOCK, _PARALLEL = 1 << 14, 8, 1  # 16 MiB


@dataclass(frozen=True, slots=True, kw_only=True)
class NewToken:
    """What a token is to be."""

    name: str
    roles: tuple[Role, ...]
    project: str
    expires_ns: int | None = None
    bytes_per_second: int = 0
    events_per_second: int = 0


def split(text: str) -> tuple[str, str] | None:
    """Return (id, secret) of a token; None where it does not look like one."""
    match = _TOKEN.fullmatch(text)
    return None if match is None else (match[1], match[2])


def create(connection: sa.Connection, new: NewToken, by: str, now_ns: int) -> tuple[str, str]:
    """Store a token; return its id and its text, which is nowhere else. Raises Problem."""
    check(new, now_ns)
    table = tables.token
    living = sa.select(sa.func.count()).where(table.c.revoked_ns.is_(None))
    if int(connection.scalar(living) or 0) >= MAX_TOKENS:
        raise Problem(409, f"there are {MAX_TOKENS} tokens", "name", "revoke some first")
    id, secret = secrets.token_hex(6), secrets.token_urlsafe(32)
    connection.execute(
        sa.insert(table).values(
            id=id, hash=hashed(secret), name=new.name, project=new.project,
            roles=",".join(role for role in ROLES if role in new.roles),
            bytes_per_second=new.bytes_per_second, events_per_second=new.events_per_second,
            created_ns=now_ns, created_by=by, expires_ns=new.expires_ns,
        )
    )  # fmt: skip
    return id, f"{PREFIX}{id}_{secret}"


def check(new: NewToken, now_ns: int) -> None:
    """Raise Problem where a token cannot be so."""
    wrong = [role for role in new.roles if role not in ROLES]
    if wrong or not new.roles:
        raise Problem(
            422, f"{wrong[0][:20]!r} is no role" if wrong else "a token without a role", "roles",
            f"give one or more of {', '.join(ROLES)}",
        )  # fmt: skip
    if not re.fullmatch(NAME, new.name):
        raise Problem(422, "a token wants a name", "name", "say in 1 to 64 signs what it is for")
    if not re.fullmatch(PROJECT, new.project):
        raise Problem(
            422, f"{new.project[:80]!r} cannot be a project", "project",
            "use letters, digits, dots, dashes; * for all projects",
        )  # fmt: skip
    if new.expires_ns is not None and new.expires_ns <= now_ns:
        raise Problem(422, "it would have expired already", "expires", "name a later time")
    for thing in ("bytes", "events"):
        if not 0 <= getattr(new, f"{thing}_per_second") <= 1 << 40:
            raise Problem(
                422, "no quota", f"{thing}_per_second", f"say {thing} per second, 0 for none"
            )


def rows(connection: sa.Connection, project: str | None) -> list[sa.Row[Any]]:
    """Return tokens, of one project or all; the newest first."""
    table = tables.token
    query = sa.select(table).order_by(table.c.created_ns.desc(), table.c.id)
    if project is not None:
        query = query.where(table.c.project == project)
    return list(connection.execute(query))


def find(connection: sa.Connection, id: str, project: str | None) -> sa.Row[Any]:
    """Return a token's row. Raises Problem 404, also for one of another project."""
    table = tables.token
    row = None
    if re.fullmatch("[0-9a-f]{12}", id):
        row = connection.execute(sa.select(table).where(table.c.id == id)).first()
    if row is None or (project is not None and row.project != project):
        raise not_found(f"no token {id[:16]!r}", "see /api/v1/tokens", "token")
    return row


def revoke(connection: sa.Connection, id: str, project: str | None, now_ns: int) -> sa.Row[Any]:
    """End a token and its sessions; return its row. Raises Problem 404."""
    row, table = find(connection, id, project), tables.token
    connection.execute(
        sa.update(table)
        .where(table.c.id == id, table.c.revoked_ns.is_(None))
        .values(revoked_ns=now_ns)
    )
    connection.execute(sa.delete(tables.session).where(tables.session.c.token_id == id))
    return row


def rotate(
    connection: sa.Connection, id: str, project: str | None, by: str, now_ns: int, grace_ns: int
) -> tuple[str, str]:
    """Make a token like one that is there, which then ends after `grace_ns`. Raises Problem."""
    row, table = find(connection, id, project), tables.token
    if row.revoked_ns is not None or (row.expires_ns or now_ns + 1) <= now_ns:
        raise Problem(409, "this token has ended", "token", "create a new one")
    lifetime_ns = None if row.expires_ns is None else row.expires_ns - row.created_ns
    new = NewToken(
        name=row.name, roles=roles_of(row), project=row.project,
        expires_ns=None if lifetime_ns is None else now_ns + lifetime_ns,
        bytes_per_second=row.bytes_per_second, events_per_second=row.events_per_second,
    )  # fmt: skip
    made = create(connection, new, by, now_ns)
    ends_ns = now_ns + grace_ns
    connection.execute(
        sa.update(table)
        .where(table.c.id == id)
        .values(expires_ns=ends_ns if row.expires_ns is None else min(row.expires_ns, ends_ns))
    )
    return made


def used(connection: sa.Connection, id: str, now_ns: int) -> None:
    """Note that a token was used."""
    table = tables.token
    connection.execute(sa.update(table).where(table.c.id == id).values(used_ns=now_ns))


def exist(connection: sa.Connection) -> bool:
    """Return whether a token was ever made: revoked ones still keep the doors shut."""
    return connection.scalar(sa.select(tables.token.c.id).limit(1)) is not None


def roles_of(row: sa.Row[Any]) -> tuple[Role, ...]:
    """Return the roles that a token was given."""
    return tuple(role for role in ROLES if role in row.roles.split(","))


def row_shown(row: sa.Row[Any], now_ns: int) -> dict[str, Any]:
    """Return a token as lists show it, without its secret."""
    has_expired = row.expires_ns is not None and row.expires_ns <= now_ns
    times = ("created_ns", "expires_ns", "revoked_ns", "used_ns")
    state = "expired" if has_expired else "active"
    shown = {
        "id": row.id, "name": row.name, "project": row.project, "roles": list(roles_of(row)),
        "state": state if row.revoked_ns is None else "revoked",
        "bytes_per_second": row.bytes_per_second, "events_per_second": row.events_per_second,
        "created_by": row.created_by,
    }  # fmt: skip
    return shown | {name.replace("_ns", "_ms"): to_ms(getattr(row, name)) for name in times}


def principal(row: sa.Row[Any], now_ns: int) -> Principal | str:
    """Return who a token stands for, or why it does not any more."""
    if row.revoked_ns is not None:
        return "this token is revoked"
    if row.expires_ns is not None and row.expires_ns <= now_ns:
        return "this token has expired"
    return Principal(
        name=f"{row.name} ({row.id})", roles=included(roles_of(row)), project=row.project,
        token_id=row.id, bytes_per_second=row.bytes_per_second,
        events_per_second=row.events_per_second, expires_ns=row.expires_ns,
    )  # fmt: skip


def hashed(secret: str) -> str:
    """Return what is stored of a secret."""
    salt = secrets.token_bytes(16)
    words = (str(_COST), str(_BLOCK), str(_PARALLEL), _text(salt), _text(_scrypt(secret, salt)))
    return "$".join(("scrypt", *words))


def matches(secret: str, stored: str) -> bool:
    """Return whether a secret is the one that `stored` was made of; takes 16 MiB for 30 ms."""
    try:
        _, cost, block, parallel, salt, digest = stored.split("$")
        found = _scrypt(
            secret, base64.b64decode(salt), int(cost), int(block), int(parallel)
        )  # fmt: skip
        return hmac.compare_digest(found, base64.b64decode(digest))
    except ValueError:
        return False  # a row that was written by hand opens nothing


def start_session(
    connection: sa.Connection, token_id: str, proof_of: str, now_ns: int, expires_ns: int
) -> str:
    """Store a session; return the cookie. `proof_of`: RANKSCOPE_TOKEN, where it signs in."""

    def proof(cookie: str) -> str:
        return session_proof(cookie, proof_of) if proof_of else ""

    return _start_session(connection, now_ns, expires_ns, proof, token_id=token_id)


def start_session_of_person(
    connection: sa.Connection, person: Principal, mark: str, now_ns: int, expires_ns: int
) -> str:
    """Store a session of a person whom an issuer named; return the cookie.

    `mark` stands for the rules that let the person in.
    """
    return _start_session(
        connection, now_ns, expires_ns, lambda _: mark, token_id="", holder=person.name,
        roles=",".join(role for role in ROLES if role in person.roles), project=person.project,
    )  # fmt: skip


def _start_session(
    connection: sa.Connection, now_ns: int, expires_ns: int, proof: Callable[[str], str],
    **of_whom: str,
) -> str:  # fmt: skip
    table = tables.session
    connection.execute(sa.delete(table).where(table.c.expires_ns <= now_ns))
    old = sa.select(table.c.id).order_by(table.c.created_ns.desc()).offset(MAX_SESSIONS - 1)
    connection.execute(sa.delete(table).where(table.c.id.in_(list(connection.scalars(old)))))
    cookie = secrets.token_urlsafe(32)
    connection.execute(
        sa.insert(table).values(
            id=session_id(cookie), created_ns=now_ns, expires_ns=expires_ns,
            proof=proof(cookie), **of_whom,
        )
    )  # fmt: skip
    return cookie


def sessions(connection: sa.Connection, project: str | None, now_ns: int) -> list[sa.Row[Any]]:
    """Return who is signed in: in one project, or everywhere; the newest first."""
    session, token = tables.session.c, tables.token.c
    is_of_token, is_of_person = session.token_id != "", session.holder != ""

    def part(of_token: Any, of_person: Any, of_operator: str) -> sa.ColumnElement[str]:
        return sa.case((is_of_token, of_token), (is_of_person, of_person), else_=of_operator)

    where = part(token.project, session.project, ALL_PROJECTS)
    query = (
        sa.select(
            session.id, session.created_ns, session.expires_ns, session.token_id, session.holder,
            part(token.name, session.holder, OPERATOR.name).label("name"),
            part(token.roles, session.roles, "admin").label("roles"), where.label("project"),
        )
        .select_from(tables.session)
        .outerjoin(tables.token, token.id == session.token_id)
        .where(
            session.expires_ns > now_ns,
            sa.or_(~is_of_token, token.expires_ns.is_(None), token.expires_ns > now_ns),
        )
        .order_by(session.created_ns.desc(), session.id)
    )  # fmt: skip
    return list(connection.execute(query if project is None else query.where(where == project)))


def end_named_session(
    connection: sa.Connection, name: str, project: str | None, now_ns: int
) -> sa.Row[Any]:
    """End a session that another browser began; `name` is the start of its key. Raises Problem."""
    for row in sessions(connection, project, now_ns):
        if row.id.startswith(name):
            connection.execute(sa.delete(tables.session).where(tables.session.c.id == row.id))
            return row
    raise not_found(f"no session {name}", "see /api/v1/sessions", "session")


def end_session(connection: sa.Connection, cookie: str) -> None:
    """Forget a session."""
    table = tables.session
    connection.execute(sa.delete(table).where(table.c.id == session_id(cookie)))


def session_id(cookie: str) -> str:
    """Return the key of a session."""
    return hashlib.sha256(cookie.encode()).hexdigest()


def session_proof(cookie: str, token: str) -> str:
    """Return what shows that a session came from this token; the cookie is the key, not stored."""
    return hmac.new(cookie.encode(), token.encode(), hashlib.sha256).hexdigest()


def _scrypt(
    secret: str, salt: bytes, cost: int = _COST, block: int = _BLOCK, parallel: int = _PARALLEL
) -> bytes:
    return hashlib.scrypt(
        secret.encode(), salt=salt, n=cost, r=block, p=parallel, maxmem=256 << 20, dklen=32
    )


def _text(data: bytes) -> str:
    return base64.b64encode(data).decode()

"""What an issuer says of a person, and what the person may do here: tables [oidc.access.NAME]."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Annotated, Any

import msgspec

from rankscope_server.access.roles import Role
from rankscope_server.access.tokens import PROJECT
from rankscope_server.settings import Settings, SettingsError

_TABLE = "oidc"
MAX_NAME = 64  # characters of a person's name
_EMAIL = "email"


class Grant(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Who has a value in a claim may do this; the first grant of the file that fits counts."""

    claim: Annotated[str, msgspec.Meta(min_length=1, max_length=256)]
    value: Annotated[str, msgspec.Meta(min_length=1, max_length=256)]  # `*` as in a shell
    roles: Annotated[list[Role], msgspec.Meta(min_length=1, max_length=4)]
    project: Annotated[str, msgspec.Meta(pattern=PROJECT)]


@dataclass(frozen=True, slots=True)
class Person:
    """Someone whom the issuer named, with what the grants give."""

    name: str
    grant: Grant | None


def read(settings: Settings) -> tuple[Grant, ...]:
    """Return the grants of the file, in its order. Raises SettingsError."""
    file = settings.file
    tables = file.tables.get(_TABLE, {})
    for name, group in tables.items():
        if name != "access" or not isinstance(group, dict):
            raise SettingsError(
                f"{file.path}: {_TABLE}.{name} is not known; write [{_TABLE}.access.NAME]"
            )
    grants = []
    for name, given in tables.get("access", {}).items():
        where = f"{_TABLE}.access.{name}"
        grants.append(file.converted(given, where, Grant, "docs/access.md"))
    if settings.oidc_issuer and not grants:
        raise SettingsError(
            "oidc_issuer is set and no one could do anything: write [oidc.access.NAME] with "
            "claim, value, roles, project into the file of --config"
        )
    return tuple(grants)


def person_of(grants: Sequence[Grant], claims: Mapping[str, Any]) -> Person:
    """Return who an issuer named, and the first grant that fits; None where none does."""
    is_mail = claims.get("email_verified") is True
    names = (claims.get("preferred_username"), is_mail and claims.get(_EMAIL), claims.get("sub"))
    name = next(str(one) for one in names if one)
    shown = "".join(sign for sign in name if sign.isprintable())[:MAX_NAME]
    fitting = (grant for grant in grants if _fits(grant, claims, is_mail))
    return Person(shown, next(fitting, None))


def _fits(grant: Grant, claims: Mapping[str, Any], is_mail: bool) -> bool:
    if grant.claim == _EMAIL and not is_mail:
        return False  # anyone may say that an address is theirs
    values = _claim(claims, grant.claim)
    return any(
        fnmatchcase(one, grant.value)
        for one in (values if isinstance(values, list) else [values])
        if isinstance(one, str)
    )


def _claim(claims: Mapping[str, Any], name: str) -> Any:
    """Return a claim by its name, or by its path: `realm_access.roles`."""
    if name in claims:
        return claims[name]
    found: Any = claims
    for part in name.split("."):
        found = found.get(part) if isinstance(found, Mapping) else None
    return found

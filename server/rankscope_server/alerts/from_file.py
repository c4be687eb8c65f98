"""Channels and rules of the server's file: its tables [alerts.channel.NAME] and [alerts.rule.NAME].

They are read and checked before the server starts, stored when it does, and can be changed in the
file alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from rankscope_server.alerts import channels, rules
from rankscope_server.alerts.channels import KINDS, SECRETS, Channel
from rankscope_server.alerts.rules import RefusedError, Rule
from rankscope_server.settings import ConfigFile, SettingsError

_TABLE = "alerts"
_PAGE = "docs/alerts.md for the fields"


@dataclass(frozen=True, slots=True)
class FileAlerts:
    """What a file says; rules by name with the names of their channels."""

    channels: tuple[Channel, ...] = ()
    rules: Mapping[str, tuple[Rule, tuple[str, ...]]] = field(default_factory=dict)


def read(file: ConfigFile) -> FileAlerts:
    """Return what a file says. Raises SettingsError with the file, the place and a remedy."""
    tables = file.tables.get(_TABLE, {})
    for name, group in tables.items():
        are_tables = isinstance(group, dict) and all(isinstance(x, dict) for x in group.values())
        if name not in ("channel", "rule") or not are_tables:
            raise SettingsError(
                f"{file.path}: {_TABLE}.{name} is not known; write [{_TABLE}.channel.NAME] and "
                f"[{_TABLE}.rule.NAME]"
            )
    found = tuple(_channel(file, *one) for one in tables.get("channel", {}).items())
    known = [one.name for one in found]
    return FileAlerts(
        found, {name: _rule(file, name, one, known) for name, one in tables.get("rule", {}).items()}
    )


def _channel(file: ConfigFile, name: str, given: Mapping[str, Any]) -> Channel:
    where = f"{_TABLE}.channel.{name}"
    target = dict(given)
    of_channel: dict[str, Any] = {
        key: target.pop(key) for key in ("quiet", "is_enabled") if key in target
    }
    for secret in SECRETS.get(KINDS.get(str(target.get("kind")), channels.Webhook), ()):
        file.check_secret(target.get(secret), f"{where}.{secret}")
    values = {"name": name, "target": target, **of_channel}
    made = file.converted(values, where, Channel, _PAGE, flat="target")
    try:
        channels.check_quiet(made.quiet)
        channels.check(made.target)
    except RefusedError as error:
        raise _refused(file, where, error) from error
    return made


def _rule(
    file: ConfigFile, name: str, given: Mapping[str, Any], known: list[str]
) -> tuple[Rule, tuple[str, ...]]:
    where = f"{_TABLE}.rule.{name}"
    values = dict(given)
    names = values.pop("channels", [])
    missing = [one for one in names if one not in known] if isinstance(names, list) else [names]
    if missing:
        raise SettingsError(
            f"{file.path}: {where}.channels: no channel {missing[0]!r} in this file; "
            f"there are: {', '.join(known) or 'none'}"
        )
    made = file.converted(values, where, Rule, _PAGE)
    try:
        rules.check(made)
    except RefusedError as error:
        raise _refused(file, where, error) from error
    return made, tuple(names)


def _refused(file: ConfigFile, where: str, error: RefusedError) -> SettingsError:
    field_name = error.field.removeprefix("target.")
    return SettingsError(f"{file.path}: {where}.{field_name}: {error}; {error.remedy}")

"""The settings of the server, each written once: name, default, sentence.

The flags of `rankscope serve`, the environment variables RANKSCOPE_SERVER_*, docs/api.md and
`GET /api/v1/settings` all come from the table `SETTINGS`.
"""

from __future__ import annotations

import argparse
import ipaddress
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path

ENVIRONMENT_PREFIX = "RANKSCOPE_SERVER_"
TOKEN_VARIABLE = "RANKSCOPE_TOKEN"


class SettingsError(ValueError):
    """The settings contradict each other or hold a value that cannot work."""


@dataclass(frozen=True, slots=True)
class Setting:
    """One setting: its field in `Settings`, its default and the sentence shown for it."""

    name: str
    default: str | int | float | bool
    text: str
    secret: bool = False

    @property
    def flag(self) -> str:
        """Return the command line flag."""
        return "--" + self.name.replace("_", "-")

    @property
    def variable(self) -> str:
        """Return the environment variable."""
        return TOKEN_VARIABLE if self.name == "token" else ENVIRONMENT_PREFIX + self.name.upper()


MIB = 1 << 20
SETTINGS: tuple[Setting, ...] = (
    Setting("host", "127.0.0.1", "Address to listen on; another than loopback needs a token."),
    Setting("port", 8787, "Port to listen on; 0 picks a free one."),
    Setting("data_dir", "", "Folder of the embedded database; default: the user's data folder."),
    Setting("database_url", "", "SQLAlchemy address of the store; default is SQLite in data_dir."),
    Setting("ready_file", "", "File that receives {url, pid} as JSON once requests are accepted."),
    Setting("token", "", "Secret that requests must carry, as a bearer token or by sign-in.", True),
    Setting("insecure_bind", False, "Listen on another address than loopback without a token."),
    Setting("allowed_hosts", "", "More host names to answer to, separated by commas."),
    Setting("max_batch_bytes", 16 * MIB, "Largest request body that ingest takes, in bytes."),
    Setting("max_unpacked_bytes", 64 * MIB, "Largest batch after decompression, in bytes."),
    Setting("synchronous", "normal", "normal survives a killed server, full also a loss of power."),
    Setting("group_commit_batches", 64, "Most batches that one transaction takes."),
    Setting("look_seconds", 1.0, "Pause between two looks of the detectors at a live run."),
    Setting("silent_after_seconds", 10.0, "A rank without news for so long is called silent."),
    Setting("forget_after_seconds", 3600.0, "A run without news for so long leaves memory."),
    Setting("replay_hours", 6.0, "How far back dense events are read when a run is taken up."),
    Setting("heartbeat_seconds", 15.0, "Pause between two heartbeats of the event stream."),
    Setting("preflight_networks", "", "Networks that preflight may dial; default: joined nodes."),
    Setting("shutdown_seconds", 3, "How long open requests may finish after a signal to stop."),
    Setting("log_level", "warning", "Least level of the own log: debug, info, warning, error."),
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The values in force; field by field the table `SETTINGS`."""

    host: str = "127.0.0.1"
    port: int = 8787
    data_dir: str = ""
    database_url: str = ""
    ready_file: str = ""
    token: str = ""
    insecure_bind: bool = False
    allowed_hosts: str = ""
    max_batch_bytes: int = 16 * MIB
    max_unpacked_bytes: int = 64 * MIB
    synchronous: str = "normal"
    group_commit_batches: int = 64
    look_seconds: float = 1.0
    silent_after_seconds: float = 10.0
    forget_after_seconds: float = 3600.0
    replay_hours: float = 6.0
    heartbeat_seconds: float = 15.0
    preflight_networks: str = ""
    shutdown_seconds: int = 3
    log_level: str = "warning"

    def directory(self, environ: Mapping[str, str] = os.environ) -> Path:
        """Return the data directory, by default that of the user."""
        if self.data_dir:
            return Path(self.data_dir).expanduser()
        home = environ.get("XDG_DATA_HOME") or os.path.join(os.path.expanduser("~"), ".local/share")
        return Path(home) / "rankscope"

    def networks(self) -> tuple[ipaddress.IPv4Network | ipaddress.IPv6Network, ...]:
        """Return the networks that preflight may dial; none: no list. Raises ValueError."""
        words = (word.strip() for word in self.preflight_networks.split(","))
        return tuple(ipaddress.ip_network(word) for word in words if word)

    def address_of_database(self) -> str:
        """Return the SQLAlchemy address of the store."""
        return self.database_url or f"sqlite:///{self.directory() / 'rankscope.db'}"


def parse(argv: Sequence[str], environ: Mapping[str, str]) -> Settings:
    """Return settings from flags, then environment, then defaults.

    Raises SettingsError on a value that cannot work; argparse exits on unknown flags.
    """
    parser = argparse.ArgumentParser(
        prog="rankscope serve", description="Store, diagnose and show runs."
    )
    for setting in SETTINGS:
        _add_flag(parser, setting)
    given = {
        name: value for name, value in vars(parser.parse_args(argv)).items() if value is not None
    }
    for setting in SETTINGS:
        if setting.name not in given and environ.get(setting.variable):
            given[setting.name] = _convert(setting, environ[setting.variable])
    settings = Settings(**given)
    check(settings)
    return settings


def check(settings: Settings) -> None:
    """Raise SettingsError where the settings would be unsafe or cannot work."""
    if not 0 <= settings.port <= 65535:
        raise SettingsError(f"port {settings.port} is outside 0..65535")
    if settings.synchronous not in {"normal", "full"}:
        raise SettingsError(f"synchronous is {settings.synchronous!r}; use normal or full")
    if settings.log_level not in {"debug", "info", "warning", "error"}:
        raise SettingsError(
            f"log_level is {settings.log_level!r}; use debug, info, warning or error"
        )
    try:
        settings.networks()
    except ValueError as error:
        raise SettingsError(f"preflight_networks: {error}; say 10.0.0.0/8,fd00::/8") from error
    for setting in SETTINGS:
        value = getattr(settings, setting.name)
        if setting.name != "port" and isinstance(value, int | float) and value < 0:
            raise SettingsError(f"{setting.name} is {value}; it cannot be negative")
    if not (is_loopback(settings.host) or settings.token or settings.insecure_bind):
        raise SettingsError(
            f"{settings.host} can be reached from other machines and no token is set: "
            f"set {TOKEN_VARIABLE}, or say --insecure-bind if the network is trusted"
        )


def is_loopback(host: str) -> bool:
    """Return whether an address is reachable from this machine only."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


def public_values(settings: Settings) -> list[dict[str, str | int | float | bool]]:
    """Return name, value, default and sentence of each setting; secrets only as set or not."""
    rows: list[dict[str, str | int | float | bool]] = []
    for setting in SETTINGS:
        value = getattr(settings, setting.name)
        if setting.secret:
            value = "(set)" if value else ""
        rows.append(
            {
                "name": setting.name,
                "value": value,
                "default": setting.default,
                "flag": setting.flag,
                "variable": setting.variable,
                "text": setting.text,
            }
        )
    return rows


def _add_flag(parser: argparse.ArgumentParser, setting: Setting) -> None:
    text = f"{setting.text} (default: {setting.default or 'none'})".replace("%", "%%")
    if isinstance(setting.default, bool):
        parser.add_argument(setting.flag, action="store_true", default=None, help=text)
    elif not setting.secret:  # a secret on a command line is seen by every user of the machine
        parser.add_argument(setting.flag, type=type(setting.default), default=None, help=text)


def _convert(setting: Setting, text: str) -> str | int | float | bool:
    kind = type(setting.default)
    if kind is bool:
        return text.strip().lower() in {"1", "true", "yes", "on"}
    try:
        return kind(text)
    except ValueError as error:
        raise SettingsError(f"{setting.variable}={text!r} is not {kind.__name__}") from error


assert [setting.name for setting in SETTINGS] == [field.name for field in fields(Settings)]

"""The settings of the server, each written once: name, default, sentence.

The flags of `rankscope serve`, the environment variables RANKSCOPE_SERVER_*, the keys of its file,
docs/api.md and `GET /api/v1/settings` all come from the fields of `Settings`.
"""

from __future__ import annotations

import argparse
import difflib
import importlib.util
import ipaddress
import os
import re
import ssl
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, TypeAlias, TypeVar
from urllib.parse import urlsplit

import msgspec

from rankscope_server import certificate
from rankscope_server.prices import PriceList, price_list

ENVIRONMENT_PREFIX = "RANKSCOPE_SERVER_"
TOKEN_VARIABLE = "RANKSCOPE_TOKEN"
FILE_VARIABLE = ENVIRONMENT_PREFIX + "CONFIG"


class SettingsError(ValueError):
    """The settings contradict each other or hold a value that cannot work."""


@dataclass(frozen=True, slots=True)
class Setting:
    """One setting: its field in `Settings`, its default and the sentence shown for it."""

    name: str
    default: str | int | float | bool
    text: str
    is_secret: bool = False
    bounds: tuple[float, float] | None = None  # the least and the greatest value of a number

    @property
    def flag(self) -> str:
        """Return the command line flag."""
        return "--" + self.name.replace("_", "-")

    @property
    def variable(self) -> str:
        """Return the environment variable."""
        return TOKEN_VARIABLE if self.name == "token" else ENVIRONMENT_PREFIX + self.name.upper()


MIB = 1 << 20
ROLES = ("ingest", "read", "operate", "admin")
PROCESS_ROLES = ("gateway", "worker", "web", "all")
_SWITCH = dict.fromkeys(("1", "true", "yes", "on"), True) | dict.fromkeys(
    ("0", "false", "no", "off"), False
)
# tables of the file, and one within each
TABLES = {"alerts": "channel.NAME", "oidc": "access.NAME"}
_VARIABLE = re.compile(r"\$\{(\w+)\}")
_LOG_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
_HOST_NAME = re.compile(r"[A-Za-z0-9._-]+|\[?[0-9A-Fa-f:.]+\]?")
_SIZES = (1024, 1 << 40)  # bytes
_PAUSES = (0.05, 86_400.0)  # seconds; without a pause a loop would keep a processor busy
_AGES = (0.1, 366 * 86_400.0)  # seconds
_DAYS = (0.0, 3_660.0)  # 0: for ever
_KEPT_SIZES = (0, 1 << 60)  # bytes; 0: any size
_Value = TypeVar("_Value", str, int, float, bool)
_Struct = TypeVar("_Struct", bound=msgspec.Struct)
Network: TypeAlias = ipaddress.IPv4Network | ipaddress.IPv6Network


def _setting(
    default: _Value,
    text: str,
    bounds: tuple[float, float] | None = None,
    *,
    is_secret: bool = False,
) -> _Value:
    return field(default=default, metadata={"text": text, "bounds": bounds, "is_secret": is_secret})


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfigFile:
    """The tables of the file beside its settings, for those who read them.

    In a text `${NAME}` stands for a variable of the environment, so that no secret is in the file.
    """

    path: str = ""
    is_private: bool = True  # other users cannot read it
    tables: Mapping[str, Any] = field(default_factory=dict)
    environ: Mapping[str, str] = field(default_factory=dict, repr=False)

    def filled(self, value: Any, where: str) -> Any:
        """Return a value with variables put in. Raises SettingsError where one is not set."""
        if isinstance(value, dict):
            return {name: self.filled(one, f"{where}.{name}") for name, one in value.items()}
        if isinstance(value, list):
            return [self.filled(one, where) for one in value]
        if not isinstance(value, str):
            return value
        missing = [name for name in _VARIABLE.findall(value) if name not in self.environ]
        if missing:
            raise SettingsError(f"{self.path}: {where}: {missing[0]} is not set; export it")
        return _VARIABLE.sub(lambda match: self.environ[match[1]], value)

    def converted(
        self, table: Mapping[str, Any], where: str, kind: type[_Struct], page: str, flat: str = ""
    ) -> _Struct:
        """Return a table as a struct, variables put in. Raises SettingsError with the page to read.

        The fields of `flat`, a field of the struct, stand in the table itself.
        """
        try:
            return msgspec.convert(self.filled(table, where), kind)
        except msgspec.ValidationError as error:
            # It names the field and what it must be, never its value.
            text = str(error).replace(f"`$.{flat}.", "`").replace("`$.", "`")
            raise SettingsError(f"{self.path}: {where}: {text}; see {page}") from error

    def check_secret(self, value: object, where: str) -> None:
        """Raise SettingsError where a secret stands in a file that others can read."""
        is_there = isinstance(value, str) and _VARIABLE.sub("", value)
        if is_there and not self.is_private:
            raise SettingsError(
                f"{self.path}: {where} can be read by other users; say chmod 600 {self.path}, or "
                "${NAME} for a variable"
            )


NO_FILE = ConfigFile()


@dataclass(frozen=True, slots=True)
class Source:
    """Where the value of a setting is from; `where` is the flag, the variable, or file and key."""

    kind: Literal["default", "file", "environment", "flag"]
    where: str = ""


DEFAULT = Source("default")


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The values in force."""

    host: str = _setting("127.0.0.1", "Address to listen on; another than loopback needs a token.")
    port: int = _setting(8787, "Port to listen on; 0 picks a free one.", (0, 65_535))
    data_dir: str = _setting(
        "", "Folder of the embedded database; default: the user's data folder."
    )
    database_url: str = _setting(
        "", "SQLAlchemy address of the store; default is SQLite in data_dir."
    )
    role: str = _setting(
        "all", "What this process does where there is a log: gateway, worker, web or all of it."
    )
    nats_url: str = _setting(
        "",
        "Servers of NATS JetStream that batches go through, separated by commas; default: none, "
        "batches are stored before they are answered.",
        is_secret=True,
    )
    nats_credentials: str = _setting("", "File with the credentials of this server for NATS.")
    log_name: str = _setting(
        "rankscope", "Name of the log, of its own for each store that shares servers of NATS."
    )
    log_partitions: int = _setting(
        8, "Parts of the log, each with its own worker; the same on all servers, and for good.",
        (1, 256),
    )  # fmt: skip
    log_partition_bytes: int = _setting(
        1 << 30, "Most bytes that wait in each part; then batches stay at their collectors.",
        (1 << 20, 1 << 50),
    )  # fmt: skip
    log_replicas: int = _setting(3, "Servers of NATS that each part is on.", (1, 5))
    blobs: str = _setting(
        "",
        "Store of objects for the data of chunks: s3://bucket/prefix, file:///folder or memory:; "
        "default is the database.",
    )
    segments: bool = _setting(
        False, "Put old chunks that are in objects together, as Parquet files."
    )
    ready_file: str = _setting(
        "", "File that receives {url, pid} as JSON once requests are accepted."
    )
    token: str = _setting(
        "", "Secret that requests must carry, as a bearer token or by sign-in.", is_secret=True
    )
    session_hours: float = _setting(
        24.0, "How long a browser stays signed in; no longer than its token.", (0.01, 8_784)
    )
    insecure_bind: bool = _setting(
        False, "Listen on another address than loopback without a token."
    )
    allowed_hosts: str = _setting("", "More host names to answer to, separated by commas.")
    tls_cert: str = _setting("", "File with the certificate chain (PEM), to speak HTTPS.")
    tls_key: str = _setting("", "File with its private key, where tls_cert does not hold it.")
    trusted_proxies: str = _setting(
        "", "Networks of proxies whose X-Forwarded-For and -Proto are believed; default: none."
    )
    proxy_user_header: str = _setting(
        "", "Header in which a trusted proxy names the user who signed in there."
    )
    proxy_user_roles: str = _setting(
        "read", "Roles of such users in all projects, separated by commas."
    )
    oidc_issuer: str = _setting(
        "", "Issuer of OpenID Connect that browsers sign in with, as it names itself."
    )
    oidc_client_id: str = _setting("", "Name of this server at the issuer.")
    oidc_client_secret: str = _setting(
        "", "Secret of this server at the issuer; none for a public client.", is_secret=True
    )
    oidc_scopes: str = _setting(
        "openid profile email", "Scopes that the issuer is asked for, separated by spaces."
    )
    max_batch_bytes: int = _setting(
        16 * MIB, "Largest request body that ingest takes, in bytes.", _SIZES
    )
    max_unpacked_bytes: int = _setting(
        64 * MIB, "Largest batch after decompression, in bytes.", _SIZES
    )
    max_bodies_bytes: int = _setting(
        96 * MIB, "Bytes of all bodies in work at a time, at least a batch; more: 429.", _SIZES
    )
    body_seconds: float = _setting(
        10.0, "Longest pause in a request, and before it; then the connection is closed.", _PAUSES
    )
    synchronous: str = _setting(
        "normal", "normal survives a killed server, full also a loss of power."
    )
    group_commit_batches: int = _setting(
        64, "Most batches that one transaction takes.", (1, 100_000)
    )
    look_seconds: float = _setting(
        1.0, "Pause between two looks of the detectors at a live run.", _PAUSES
    )
    silent_after_seconds: float = _setting(
        10.0, "A rank without news for so long is called silent.", _AGES
    )
    forget_after_seconds: float = _setting(
        3600.0, "A run without news for so long leaves memory.", _AGES
    )
    replay_hours: float = _setting(
        6.0, "How far back dense events are read when a run is taken up.", (0, 366 * 24)
    )
    heartbeat_seconds: float = _setting(
        15.0, "Pause between two heartbeats of the event stream.", _PAUSES
    )
    preflight_networks: str = _setting(
        "", "Networks that preflight may dial; default: joined nodes."
    )
    shutdown_seconds: int = _setting(
        3, "How long open requests may finish after a signal to stop.", (0, 3_600)
    )
    public_url: str = _setting(
        "", "Address at which people reach this server, for links in alerts."
    )
    alert_networks: str = _setting(
        "", "Networks that alerts may be sent to; default: all but link-local and metadata."
    )
    deadman_url: str = _setting(
        "", "Address that is asked by POST while the server is well.", is_secret=True
    )
    deadman_seconds: float = _setting(
        60.0, "Pause between two such requests, and how far the analysis may be behind.", _PAUSES
    )
    log_level: str = _setting("warning", "Least level of the own log: debug, info, warning, error.")
    log_format: str = _setting("text", "Form of the own log: text, or json, one object a line.")
    keep_collectives_days: float = _setting(
        0.0, "Single collectives are removed after so many days; 0 keeps them.", _DAYS
    )
    keep_collectives_bytes: int = _setting(
        0, "Most bytes of single collectives, oldest go first; 0 for any.", _KEPT_SIZES
    )
    keep_steps_days: float = _setting(
        0.0, "Single steps are removed after so many days; 0 keeps them.", _DAYS
    )
    keep_steps_bytes: int = _setting(
        0, "Most bytes of single steps, oldest go first; 0 for any.", _KEPT_SIZES
    )
    keep_samples_days: float = _setting(
        0.0, "Samples of machines are removed after so many days; 0 keeps them.", _DAYS
    )
    keep_samples_bytes: int = _setting(
        0, "Most bytes of samples of machines, oldest go first; 0 for any.", _KEPT_SIZES
    )
    keep_logs_days: float = _setting(
        0.0, "Log lines are removed after so many days; 0 keeps them.", _DAYS
    )
    keep_logs_bytes: int = _setting(
        0, "Most bytes of log lines, oldest go first; 0 for any.", _KEPT_SIZES
    )
    keep_events_days: float = _setting(
        0.0, "Events, stacks and traces are removed after so many days; 0 keeps them.", _DAYS
    )
    keep_events_bytes: int = _setting(
        0, "Most bytes of events, stacks and traces, oldest go first; 0 for any.", _KEPT_SIZES
    )
    keep_numbers_days: float = _setting(
        0.0, "Numbers of training are removed after so many days; 0 keeps them.", _DAYS
    )
    keep_numbers_bytes: int = _setting(
        0, "Most bytes of numbers of training, oldest go first; 0 for any.", _KEPT_SIZES
    )
    keep_runs_days: float = _setting(
        0.0, "A run without news for so many days is deleted; 0 keeps it.", _DAYS
    )
    keep_runs_bytes: int = _setting(
        0, "Most bytes of all runs, those longest without news go first; 0 for any.", _KEPT_SIZES
    )
    prices: str = _setting(
        "",
        "Price of a host-hour by name of the host, as gpu-*=24,*=3.50; the first that fits. "
        "24/9@0.02: 9 as spot, 0.02 interruptions of a host an hour.",
    )
    currency: str = _setting("", "Name of the currency of prices, as EUR.")
    retention_seconds: float = _setting(
        600.0, "Pause between two rounds of retention.", (0.05, 86_400.0)
    )
    disk_low_bytes: int = _setting(
        64 * MIB, "With less free on the disk nothing is taken; 0 writes to the end.", (0, 1 << 50)
    )
    disk_reserve_bytes: int = _setting(
        16 * MIB, "Size of the file that is given up so that a full disk can be freed.",
        (0, 1 << 40),
    )  # fmt: skip
    file: ConfigFile = NO_FILE
    sources: Mapping[str, Source] = field(default_factory=dict, compare=False)  # of no defaults

    @property
    def takes_batches(self) -> bool:
        """Return whether this process answers to batches."""
        return self.role in ("gateway", "all")

    @property
    def works(self) -> bool:
        """Return whether this process stores, looks and does what is to be done once."""
        return self.role in ("worker", "all")

    @property
    def holds_preflights(self) -> bool:
        """Return whether preflights may live in this process."""
        return self.role in ("web", "all")

    def directory(self, environ: Mapping[str, str] = os.environ) -> Path:
        """Return the data directory, by default that of the user."""
        if self.data_dir:
            return Path(self.data_dir).expanduser()
        home = environ.get("XDG_DATA_HOME") or os.path.join(os.path.expanduser("~"), ".local/share")
        return Path(home) / "rankscope"

    def networks(self) -> tuple[Network, ...]:
        """Return the networks that preflight may dial; none: no list. Raises ValueError."""
        return _networks(self.preflight_networks)

    def networks_of_alerts(self) -> tuple[Network, ...]:
        """Return the networks that alerts may be sent to; none: no list. Raises ValueError."""
        return _networks(self.alert_networks)

    def price_list(self) -> PriceList:
        """Return what hosts cost. Raises ValueError."""
        return price_list(self.prices, self.currency)

    def nats_servers(self) -> list[str]:
        """Return the addresses of the servers of NATS; none: there is no log."""
        return [url.strip() for url in self.nats_url.split(",") if url.strip()]

    def host_names(self) -> tuple[str, ...]:
        """Return the other names that are answered to."""
        return tuple(name.strip() for name in self.allowed_hosts.split(",") if name.strip())

    def proxies(self) -> tuple[str, ...]:
        """Return the networks of trusted proxies, each in full. Raises ValueError."""
        return tuple(map(str, _networks(self.trusted_proxies)))

    def proxy_roles(self) -> tuple[str, ...]:
        """Return the roles of users whom a proxy names."""
        return tuple(word.strip() for word in self.proxy_user_roles.split(",") if word.strip())

    @property
    def has_other_doors(self) -> bool:
        """Return whether people come in by a proxy or an issuer: then no one comes in freely."""
        return bool(self.proxy_user_header or self.oidc_issuer)

    def address_of_database(self) -> str:
        """Return the SQLAlchemy address of the store."""
        return self.database_url or f"sqlite:///{self.directory() / 'rankscope.db'}"


SETTINGS = tuple(
    Setting(each.name, getattr(Settings(), each.name), **each.metadata)
    for each in fields(Settings)
    if each.metadata
)


@dataclass(frozen=True, slots=True)
class Configuration:
    """The settings of one start."""

    settings: Settings
    is_check: bool = False  # nothing is to be started


def parse(argv: Sequence[str], environ: Mapping[str, str]) -> Settings:
    """Return settings as `read` does."""
    return read(argv, environ).settings


def read(argv: Sequence[str], environ: Mapping[str, str]) -> Configuration:
    """Return settings from flags, then environment, then the file, then defaults.

    Raises SettingsError on a value that cannot work; argparse exits on unknown flags.
    """
    parser = argparse.ArgumentParser(
        prog="rankscope serve",
        description="Store, diagnose and show runs.",
        allow_abbrev=False,
    )
    add_flags(parser)
    flags = vars(parser.parse_args(argv))
    path = flags["config"] or environ.get(FILE_VARIABLE, "")
    in_file, file = _read_file(Path(path), environ) if path else ({}, NO_FILE)
    given: dict[str, Any] = {}
    sources: dict[str, Source] = {}
    for setting in SETTINGS:
        for source, text in (
            (Source("flag", setting.flag), flags.get(setting.name)),
            (Source("environment", setting.variable), environ.get(setting.variable) or None),
            (Source("file", f"{path}: {setting.name}"), in_file.get(setting.name)),
        ):
            if text is not None:
                given[setting.name] = _convert(setting, text, source.where)
                sources[setting.name] = source
                break
    settings = Settings(**given, file=file, sources=sources)
    check(settings)
    return Configuration(settings, is_check=flags["check"])


def _read_file(path: Path, environ: Mapping[str, str]) -> tuple[dict[str, str], ConfigFile]:
    """Return what a TOML file says: settings as texts, and its tables.

    Raises SettingsError with the file and the key.
    """
    try:
        mode = path.stat().st_mode
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise SettingsError(
            f"{path} cannot be read: {error.strerror}; name another file with --config"
        ) from error
    except ValueError as error:  # of UTF-8 or TOML, with line and column
        raise SettingsError(f"{path}: {error}; say one `name = value` a line") from error
    tables = {name: values.pop(name) for name in TABLES if isinstance(values.get(name), dict)}
    names = [*(setting.name for setting in SETTINGS), *TABLES]
    for name in values:
        if name in TABLES:
            raise SettingsError(f"{path}: {name} is a table; write [{name}.{TABLES[name]}]")
        if name not in names:
            near = difflib.get_close_matches(name, names, 1)
            hint = f"use {near[0]}" if near else f"use one of {', '.join(names)}"
            raise SettingsError(f"{path}: {name} is no setting; {hint}")
    for name in (setting.name for setting in SETTINGS if setting.is_secret):
        if values.get(name) and mode & 0o077:
            raise SettingsError(f"{path}: {name} can be read by other users; say chmod 600 {path}")
    defaults = {setting.name: setting.default for setting in SETTINGS}
    texts = {
        name: _text_of(f"{path}: {name}", value, defaults[name]) for name, value in values.items()
    }
    is_private = not mode & 0o077
    return texts, ConfigFile(
        path=str(path), is_private=is_private, tables=tables, environ=dict(environ)
    )


def _text_of(source: str, value: object, default: str | int | float | bool) -> str:
    is_list = isinstance(value, list) and all(isinstance(one, str) for one in value)
    if isinstance(value, str):
        return value
    if isinstance(value, list) and is_list and isinstance(default, str):
        return ",".join(value)  # of host names or networks
    if isinstance(value, bool) and isinstance(default, bool):
        return "1" if value else "0"
    if type(value) in (int, float) and type(default) in (int, float):
        return str(value)
    raise SettingsError(f"{source} = {value!r} cannot be used; say for example {default!r}")


def check(settings: Settings) -> None:
    """Raise SettingsError where the settings would be unsafe or cannot work."""
    _check_words(settings)
    _check_addresses(settings)
    _check_log(settings)
    _check_blobs(settings)
    if settings.ready_file and not os.access(Path(settings.ready_file).parent, os.W_OK):
        raise SettingsError(
            f"ready_file {settings.ready_file!r}: its folder does not exist or is not writable; "
            "make it, or choose another with --ready-file"
        )
    for setting in SETTINGS:
        if setting.bounds is not None:
            _check_bounds(setting, getattr(settings, setting.name), *setting.bounds)
    _check_access(settings)


def check_door(settings: Settings, has_tokens: bool) -> None:
    """Raise SettingsError where strangers could come in; `has_tokens`: the store holds some."""
    is_shut = settings.token or settings.insecure_bind or settings.has_other_doors or has_tokens
    if not (is_loopback(settings.host) or is_shut):
        raise SettingsError(
            f"{settings.host} can be reached from other machines and no token is set: "
            f"set {TOKEN_VARIABLE}, make one with `rankscope token create`, or say "
            "--insecure-bind if the network is trusted"
        )


def _check_words(settings: Settings) -> None:
    if settings.synchronous not in {"normal", "full"}:
        raise SettingsError(f"synchronous is {settings.synchronous!r}; use normal or full")
    if settings.log_level not in {"debug", "info", "warning", "error"}:
        raise SettingsError(
            f"log_level is {settings.log_level!r}; use debug, info, warning or error"
        )
    if settings.log_format not in {"text", "json"}:
        raise SettingsError(f"log_format is {settings.log_format!r}; use text or json")
    try:
        settings.price_list()
    except ValueError as error:
        raise SettingsError(f"prices: {error}; say gpu-*=24,*=3.50") from error
    wrong = [name for name in settings.host_names() if not _HOST_NAME.fullmatch(name)]
    if wrong:
        raise SettingsError(f"allowed_hosts: {wrong[0]!r} is no name; say gpu.example,10.0.0.5")


def _check_log(settings: Settings) -> None:
    if settings.role not in PROCESS_ROLES:
        raise SettingsError(f"role is {settings.role!r}; use {', '.join(PROCESS_ROLES)}")
    if not settings.nats_url:
        if settings.role != "all":
            raise SettingsError(
                f"--role {settings.role} needs a log: set {ENVIRONMENT_PREFIX}NATS_URL too"
            )
        return
    for url in settings.nats_servers():
        parts = urlsplit(url)
        if parts.scheme not in ("nats", "tls") or not parts.hostname:
            raise SettingsError("nats_url: each is an address like nats://10.0.0.7:4222, or tls://")
    if not settings.database_url.startswith("postgresql"):
        raise SettingsError("nats_url needs PostgreSQL as the store: say --database-url too")
    if not _LOG_NAME.fullmatch(settings.log_name):
        raise SettingsError(f"log_name {settings.log_name!r}: use letters, digits, - and _")
    if importlib.util.find_spec("nats") is None:
        raise SettingsError("nats_url needs its client: pip install 'rankscope[server,fleet]'")
    if settings.nats_credentials and not os.access(settings.nats_credentials, os.R_OK):
        raise SettingsError(
            f"nats_credentials {settings.nats_credentials!r} cannot be read: name another file"
        )


def _networks(text: str) -> tuple[Network, ...]:
    words = (word.strip() for word in text.split(","))
    return tuple(ipaddress.ip_network(word) for word in words if word)


def _check_addresses(settings: Settings) -> None:
    for name in ("preflight_networks", "alert_networks"):
        try:
            _networks(getattr(settings, name))
        except ValueError as error:
            raise SettingsError(f"{name}: {error}; say 10.0.0.0/8,fd00::/8") from error
    for name in ("public_url", "deadman_url"):
        text = getattr(settings, name)
        try:
            parts = urlsplit(text)
            is_one = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
        except ValueError:
            is_one = False
        if text and (not is_one or parts.username or not (text.isascii() and text.isprintable())):
            # a secret is not shown, not even where it is wrong
            raise SettingsError(f"{name} is no address: use one like https://rankscope.example")


def _check_blobs(settings: Settings) -> None:
    try:
        parts = urlsplit(settings.blobs)
        has_more = bool(parts.query or parts.fragment or parts.username or parts.password)
    except ValueError:
        parts, has_more = urlsplit(""), True
    if settings.segments and not settings.blobs:
        raise SettingsError("segments is set and blobs is not: say where objects are with --blobs")
    is_whole = {
        "": not settings.blobs,
        "s3": bool(parts.netloc),
        "file": not parts.netloc and parts.path.startswith("/"),
        "memory": settings.blobs == "memory:",
    }
    if has_more or not is_whole.get(parts.scheme):
        # a secret is not shown, not even where it is wrong
        raise SettingsError(
            "blobs is no store of objects: use s3://bucket/prefix, file:///folder or memory:, with "
            "the key for S3 in AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
        )


def _check_access(settings: Settings) -> None:
    try:
        settings.proxies()
    except ValueError as error:
        raise SettingsError(f"trusted_proxies: {error}; say 10.0.0.7,10.1.0.0/16") from error
    if settings.proxy_user_header and not settings.trusted_proxies:
        raise SettingsError(
            "proxy_user_header is set and trusted_proxies is not: name the networks of the proxy"
        )
    wrong = set(settings.proxy_roles()) - set(ROLES)
    if wrong:
        raise SettingsError(
            f"proxy_user_roles: {', '.join(sorted(wrong))} is none of {', '.join(ROLES)}"
        )
    _check_oidc(settings)
    if settings.tls_key and not settings.tls_cert:
        raise SettingsError("tls_key is set and tls_cert is not: say --tls-cert too")
    if settings.tls_cert:
        _check_tls(settings)


def _check_oidc(settings: Settings) -> None:
    if not settings.oidc_issuer:
        if "oidc" in settings.file.tables:
            raise SettingsError("oidc_issuer is not set: say whose claims the tables [oidc] are of")
        return
    if not is_safe_url(settings.oidc_issuer):
        raise SettingsError("oidc_issuer is no address of HTTPS: use one like https://id.example")
    if not settings.oidc_client_id:
        raise SettingsError("oidc_client_id is not set: register this server at the issuer")
    if not settings.public_url:
        raise SettingsError(
            "public_url is not set: the issuer sends people back to it; say "
            "https://rankscope.example, and name that host in allowed_hosts"
        )
    if "openid" not in settings.oidc_scopes.split():
        raise SettingsError("oidc_scopes lacks openid: say for example openid profile email groups")


def is_safe_url(url: str) -> bool:
    """Return whether an address is one of HTTPS, or on this machine."""
    try:
        parts = urlsplit(url)
        is_one = bool(parts.hostname) and not parts.username and parts.port != 0
    except ValueError:
        return False
    if not is_one or not (url.isascii() and url.isprintable()) or " " in url:
        return False
    is_here = parts.scheme == "http" and is_loopback(parts.hostname or "")
    return parts.scheme == "https" or is_here


def _check_tls(settings: Settings) -> None:
    for name in ("tls_cert", "tls_key"):
        path = getattr(settings, name)
        if path and not os.access(path, os.R_OK):
            raise SettingsError(f"{name} {path!r} cannot be read: name another file")
    try:
        certificate.load(
            ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), settings.tls_cert, settings.tls_key
        )
    except OSError as error:
        raise SettingsError(
            f"tls_cert {settings.tls_cert!r} does not work with its key "
            f"{(settings.tls_key or settings.tls_cert)!r}: {error.args[-1]}; "
            "they must be PEM, of one pair, and the key without a password"
        ) from error


def _check_bounds(setting: Setting, value: float, least: float, greatest: float) -> None:
    if not least <= value <= greatest:  # "not a number" is between no two
        raise SettingsError(
            f"{setting.name} {value} is outside {least:.12g}..{greatest:.12g}: "
            f"set {setting.flag} or {setting.variable} to a number in that range"
        )


def is_loopback(host: str) -> bool:
    """Return whether an address is reachable from this machine only."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


def without_password(url: str) -> str:
    """Return an address of a database as it may be shown."""
    url = re.sub(r"(://[^:/@]*:).*@", r"\1***@", url)
    return re.sub(r"(?i)([?&]password=)[^&]*", r"\1***", url)


def public_value(settings: Settings, setting: Setting) -> str | int | float | bool:
    """Return the value in force; of a secret only whether it is set."""
    value: str | int | float | bool = getattr(settings, setting.name)
    if setting.name == "database_url":
        return without_password(str(value))
    return ("(set)" if value else "") if setting.is_secret else value


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flag of each setting; values stay text."""
    parser.add_argument(
        "--config", metavar="FILE", help=f"TOML file of settings by name (${FILE_VARIABLE})"
    )
    parser.add_argument(
        "--check", action="store_true",
        help="show the settings in force, see whether the server could start with them, and end",
    )  # fmt: skip
    for setting in SETTINGS:
        text = f"{setting.text} (default: {setting.default or 'none'})".replace("%", "%%")
        if isinstance(setting.default, bool):
            parser.add_argument(setting.flag, action="store_const", const="1", help=text)
        elif not setting.is_secret:  # a secret on a command line is seen by every user
            parser.add_argument(setting.flag, help=text)


def _convert(setting: Setting, text: str, source: str) -> str | int | float | bool:
    kind = type(setting.default)
    if setting.is_secret:
        return text.strip()  # of a file it has a line end
    if kind is bool:
        if text.strip().lower() not in _SWITCH:
            raise SettingsError(f"{source}={text!r} is neither yes nor no: say 1 or 0")
        return _SWITCH[text.strip().lower()]
    try:
        return kind(text)
    except ValueError as error:
        raise SettingsError(
            f"{source}={text!r} is not {kind.__name__}: say for example {setting.default}"
        ) from error

"""Where messages go: kinds of channels, and which of their fields never leave the server again."""

from __future__ import annotations

import ipaddress
import json
import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeAlias
from urllib.parse import unquote, urlsplit

import msgspec

from rankscope_server.alerts import quiet as quiet_hours
from rankscope_server.alerts.quiet import QuietHours
from rankscope_server.alerts.rules import Name, RefusedError

Url: TypeAlias = Annotated[str, msgspec.Meta(min_length=1, max_length=2_048)]
Line: TypeAlias = Annotated[str, msgspec.Meta(max_length=256, pattern=r"^[^\x00-\x1f\x7f]*$")]
Mail: TypeAlias = Annotated[str, msgspec.Meta(max_length=254, pattern=r"^[^@\s<>,;]+@[^@\s<>,;]+$")]
PAGERDUTY_URL = "https://events.pagerduty.com/v2/enqueue"
_LEAST_WORD = 8  # characters of a part of an address that may be a secret
LEAST_KEY = 16  # characters that a signing key must have
_MAKE_KEY = "make one: openssl rand -hex 32"


class Target(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="kind"
):
    """Where a channel leads. An empty secret of a known channel leaves it as it is."""


class Webhook(Target, tag="webhook", frozen=True, kw_only=True):
    """Any program: JSON by POST, signed with HMAC-SHA256."""

    url: Annotated[str, msgspec.Meta(max_length=2_048)] = ""
    signing_key: Line = ""


class Slack(Target, tag="slack", frozen=True, kw_only=True):
    """An incoming webhook of Slack, Mattermost or whatever takes the same."""

    url: Annotated[str, msgspec.Meta(max_length=2_048)] = ""


class PagerDuty(Target, tag="pagerduty", frozen=True, kw_only=True):
    """Events API v2: an incident for each alert, resolved with it."""

    url: Url = PAGERDUTY_URL
    routing_key: Line = ""


class Email(Target, tag="email", frozen=True, kw_only=True):
    """Mail through an SMTP server."""

    host: Annotated[str, msgspec.Meta(min_length=1, max_length=253, pattern=r"^[^\s/@]+$")]
    port: Annotated[int, msgspec.Meta(ge=1, le=65_535)] = 587
    security: Literal["starttls", "tls", "none"] = "starttls"
    user: Line = ""
    password: Line = ""
    sender: Mail
    recipients: Annotated[list[Mail], msgspec.Meta(min_length=1, max_length=50)]


class Otlp(Target, tag="otlp", frozen=True, kw_only=True):
    """Logs of OpenTelemetry: a record for each message, to any collector or store of them."""

    url: Url
    headers: Annotated[str, msgspec.Meta(max_length=2_048, pattern=r"^[^\x00-\x1f\x7f]*$")] = ""


AnyTarget: TypeAlias = Webhook | Slack | PagerDuty | Email | Otlp
KINDS: dict[str, type[AnyTarget]] = {
    "webhook": Webhook, "slack": Slack, "pagerduty": PagerDuty, "email": Email,
    "otlp": Otlp,
}  # fmt: skip
# The address of a webhook or of Slack is a password: who has it can send.
SECRETS: dict[type[AnyTarget], tuple[str, ...]] = {
    Webhook: ("url", "signing_key"),
    Slack: ("url",),
    PagerDuty: ("routing_key",),
    Email: ("password",),
    Otlp: ("headers",),
}
_OPTIONAL = frozenset({"password", "headers"})  # not each mail server or collector wants one
# Where a secret is sent to: who changes this must know the secret.
_PLACES: dict[type[AnyTarget], tuple[str, ...]] = {
    Webhook: (),
    Slack: (),
    PagerDuty: ("url",),
    Email: ("host", "port", "security", "user"),
    Otlp: ("url",),
}


class Channel(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A channel as it is given."""

    name: Name
    target: AnyTarget
    quiet: QuietHours | None = None
    is_enabled: bool = True


def with_secrets(new: AnyTarget, old: AnyTarget | None) -> AnyTarget:
    """Return a target whose empty secrets are those that are stored. Raises RefusedError."""
    kind = type(new)
    if old is None or type(old) is not kind:
        return new
    empty = [name for name in SECRETS[kind] if not getattr(new, name) and getattr(old, name)]
    moved = [name for name in _PLACES[kind] if getattr(new, name) != getattr(old, name)]
    if empty and moved:
        raise RefusedError(
            f"target.{empty[0]}",
            f"{moved[0]} is another one now, and {empty[0]} would be sent there",
            f"give {empty[0]} again",
        )  # fmt: skip
    return msgspec.structs.replace(new, **{name: getattr(old, name) for name in empty})


def check_quiet(quiet: QuietHours | None) -> None:
    """Raise RefusedError where the quiet hours cannot be."""
    if quiet is None:
        return
    try:
        quiet_hours.check(quiet)
    except ValueError as error:
        field, _, what = str(error).partition(": ")
        what, _, remedy = what.partition("; ")
        raise RefusedError(field, what, remedy) from error


def check(target: AnyTarget) -> None:
    """Raise RefusedError where something is missing or cannot be."""
    for name in SECRETS[type(target)]:
        if not getattr(target, name) and name not in _OPTIONAL:
            remedy = _MAKE_KEY if name == "signing_key" else f"give {name}"
            raise RefusedError(f"target.{name}", f"{name} is missing", remedy)
    if isinstance(target, Webhook) and len(target.signing_key) < LEAST_KEY:
        raise RefusedError(
            "target.signing_key", f"a key of less than {LEAST_KEY} characters can be guessed",
            _MAKE_KEY,
        )  # fmt: skip
    if isinstance(target, Email):
        if target.password and target.security == "none" and not _is_here(target.host):
            raise RefusedError(
                "target.security", "the password would be sent in clear",
                "use starttls or tls, or leave the password out",
            )  # fmt: skip
        return
    if isinstance(target, Otlp):
        try:
            headers_of(target.headers)
        except ValueError as error:
            raise RefusedError(
                "target.headers", str(error), "write them as in OTEL_EXPORTER_OTLP_HEADERS"
            ) from error
    _check_url(target.url)


def headers_of(text: str) -> dict[str, str]:
    """Return headers that are given as in OTEL_EXPORTER_OTLP_HEADERS. Raises ValueError."""
    found = {}
    for part in filter(None, (one.strip() for one in text.split(","))):
        name, equals, value = (unquote(word.strip()) for word in part.partition("="))
        is_name = name.replace("-", "").replace("_", "").isalnum() and name.isascii()
        if not equals or not is_name or not value.isascii() or not value.isprintable():
            raise ValueError("headers are not like Name=value,Other=value")
        found[name] = value
    return found


def _check_url(url: str) -> None:
    remedy = "give an address like https://hooks.example/path"
    try:
        parts = urlsplit(url)
        known = bool(parts.hostname) and parts.scheme in ("http", "https") and parts.port != 0
    except ValueError:
        known = False
    if not known or not url.isascii() or any(c <= " " or c == "\x7f" for c in url):
        raise RefusedError("target.url", "this is no address of HTTP", remedy)
    if parts.username or parts.password:
        raise RefusedError(
            "target.url", "the address has a user or a password in it",
            "leave them out; requests are signed, or put a token into the path",
        )  # fmt: skip


def _is_here(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def split(target: AnyTarget) -> tuple[str, str]:
    """Return as JSON what may be shown of a target, and its secrets."""
    values: dict[str, Any] = msgspec.to_builtins(target)
    secrets = {name: values.pop(name) for name in SECRETS[type(target)]}
    return json.dumps(values), json.dumps(secrets)


def join(body: str, secrets: str) -> AnyTarget:
    """Return the target that was split."""
    values: Mapping[str, Any] = json.loads(body) | json.loads(secrets)
    target: AnyTarget = msgspec.convert(values, KINDS[values["kind"]])
    return target


def shown(target: AnyTarget) -> dict[str, Any]:
    """Return a target for people: of secrets that they are set, of addresses the host."""
    values: dict[str, Any] = msgspec.to_builtins(target)
    for name in SECRETS[type(target)]:
        values[name] = "(set)" if values[name] else ""
    return values


def place_of(target: AnyTarget) -> str:
    """Return in words where a channel leads, without what is secret."""
    if isinstance(target, Email):
        first, *more = target.recipients
        return f"{first}{f' and {len(more)} more' * bool(more)} through {target.host}:{target.port}"
    return f"{urlsplit(target.url).scheme}://{urlsplit(target.url).hostname}"


def secrets_of(target: AnyTarget) -> tuple[str, ...]:
    """Return every text that must not be in a message of an error, the longest first."""
    found = {str(getattr(target, name)) for name in SECRETS[type(target)]}
    if isinstance(target, Otlp):
        found |= set(headers_of(target.headers).values())
    elif not isinstance(target, Email):
        found |= secrets_of_url(target.url)
    return tuple(sorted((text for text in found if len(text) > 3), key=len, reverse=True))


def secrets_of_url(url: str) -> set[str]:
    """Return what of an address must not be shown: its path, its query, and their parts."""
    parts = urlsplit(url)
    words = re.split(r"[/?&=]", f"{parts.path}?{parts.query}")
    return {url, parts.path, parts.query, *(word for word in words if len(word) >= _LEAST_WORD)}

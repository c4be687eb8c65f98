"""`rankscope alerts`: what is open on a server, its channels and rules, and a test of a channel."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import sys
import tomllib
from pathlib import Path
from typing import Any, ClassVar

from rankscope.address import AddressError
from rankscope.cli import EXIT_USAGE
from rankscope.cli.ask import DEFAULT_SERVER, EXIT_REFUSED, EXIT_UNREACHABLE
from rankscope.http import Client, HttpError
from rankscope.settings import SettingError, from_environment
from rankscope.terminal import one_line, shown

_TIMEOUT_SECONDS = 40.0  # a test waits for the receiver
_VARIABLE = re.compile(r"\$\{(\w+)\}")


class AlertsFailed(Exception):
    """It was not done; the message says why, `exit_code` how bad it is."""

    def __init__(self, text: str, exit_code: int) -> None:
        super().__init__(text)
        self.exit_code = exit_code


class AlertsCommand:
    """Show alerts of a server, try its channels, set channels and rules from a file.

    Examples:
      rankscope alerts list                 what is open, with what to do next
      rankscope alerts channels             where messages go
      rankscope alerts rules                what is worth a message
      rankscope alerts deliveries           what was sent, what waits, what was given up
      rankscope alerts test pager           send a test message to a channel
      rankscope alerts close 12             close an alert
      rankscope alerts apply alerts.toml    make channels and rules as the file says

    In a file ${NAME} stands for a variable of the environment, so that no secret is in it;
    docs/alerts.md shows one.

    Exit codes: 0 done; 1 refused, or a test that did not arrive; 2 the server cannot be reached;
    64 wrong usage. A token for the server is taken from RANKSCOPE_TOKEN only.
    """

    name: ClassVar[str] = "alerts"

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Describe the options."""
        parser.add_argument("action", choices=tuple(_ACTIONS), help="what to do")
        parser.add_argument(
            "what", nargs="?", default="", metavar="NAME|ID|FILE",
            help="channel to test, alert to close, file to apply",
        )  # fmt: skip
        parser.add_argument(
            "--server", metavar="URL", help=f"default $RANKSCOPE_SERVER, else {DEFAULT_SERVER}"
        )
        parser.add_argument("--json", action="store_true", help="print one JSON object on stdout")

    def run(self, arguments: argparse.Namespace) -> int:
        """Do it. Returns the exit code."""
        needs = arguments.action in ("test", "close", "apply")
        if needs != bool(arguments.what):
            wrong = "say which" if needs else f"{arguments.what!r} is one word too many"
            sys.stderr.write(f"rankscope alerts {arguments.action}: {wrong}\n")
            return EXIT_USAGE
        try:
            settings = from_environment(os.environ)
            url = arguments.server or settings.server or DEFAULT_SERVER
            client = Client(url, settings.token, timeout_seconds=_TIMEOUT_SECONDS)
        except (SettingError, AddressError) as error:
            sys.stderr.write(f"rankscope alerts: {one_line(error)}\n")
            return EXIT_USAGE if isinstance(error, SettingError) else EXIT_UNREACHABLE
        with contextlib.closing(client):
            try:
                return _ACTIONS[arguments.action](_Server(client), arguments)
            except AlertsFailed as error:
                sys.stderr.write(f"rankscope alerts: {one_line(error)}\n")
                return error.exit_code


class _Server:
    """The alerts of one server."""

    def __init__(self, client: Client) -> None:
        self._client = client

    def ask(self, method: str, path: str, body: Any = None) -> dict[str, Any]:
        """Return an answer. Raises AlertsFailed."""
        data = None if body is None else json.dumps(body).encode()
        headers = {"Content-Type": "application/json"} if data else {}
        try:
            answer = self._client.request(method, f"/api/v1/alerts{path}", data, headers)
        except HttpError as error:
            url = self._client.address.url
            raise AlertsFailed(f"{url} does not answer: {error}", EXIT_UNREACHABLE) from error
        if answer.status != 200:
            code = EXIT_REFUSED if answer.status in (404, 409, 422) else EXIT_UNREACHABLE
            raise AlertsFailed(answer.why(), code)
        return answer.fields


def _print(arguments: argparse.Namespace, fields: dict[str, Any], lines: list[str]) -> None:
    print(json.dumps(fields) if arguments.json else shown("\n".join(lines)))


def _list(server: _Server, arguments: argparse.Namespace) -> int:
    fields = server.ask("GET", "?state=open")
    lines = []
    for alert in fields["alerts"]:
        about = one_line(alert["run_name"] or alert["run_id"] or "the server")
        lines += [
            f"{alert['id']}  {alert['severity']}  {one_line(alert['what'])}  ({about})",
            f"   why: {one_line(alert['why'])}",
            f"   next: {one_line(alert['next'])}",
        ]
    _print(arguments, fields, lines or ["No alert is open."])
    return 0


def _channels(server: _Server, arguments: argparse.Namespace) -> int:
    fields = server.ask("GET", "/channels")
    lines = [
        f"{one['id']}  {one_line(one['name'])}  {one['kind']}  {one_line(one['place'])}  "
        f"{_switch(one)}  {one['last_state'] or 'nothing sent yet'}"
        f"{'  ' * bool(one['last_note'])}{one_line(one['last_note'])}"
        for one in fields["channels"]
    ]
    _print(arguments, fields, lines or ["No channel: nothing is sent."])
    return 0


def _switch(one: dict[str, Any]) -> str:
    """Return whether a channel or a rule works, and whose it is; older servers have no file."""
    return ("on" if one["is_enabled"] else "off") + ", from file" * bool(one.get("is_from_file"))


def _rules(server: _Server, arguments: argparse.Namespace) -> int:
    fields = server.ask("GET", "/rules")
    lines = []
    for one in fields["rules"]:
        when = dict(one["when"])
        more = ", ".join(f"{name} {value}" for name, value in when.items() if name != "about")
        lines.append(
            f"{one['id']}  {one_line(one['name'])}  {when['about']}: {one_line(more)}  "
            f"{_switch(one)}"
        )
    _print(arguments, fields, lines or ["No rule: nothing opens an alert."])
    return 0


def _deliveries(server: _Server, arguments: argparse.Namespace) -> int:
    fields = server.ask("GET", "/deliveries")
    lines = [
        f"{one['id']}  {one['state']}  {one_line(one['channel_name'])}  {one_line(one['what'])}"
        f"{'  ' * bool(one['note'])}{one_line(one['note'])}"
        for one in fields["deliveries"]
    ]
    _print(arguments, fields, lines or ["Nothing was sent yet."])
    return 0


def _test(server: _Server, arguments: argparse.Namespace) -> int:
    found = server.ask("GET", "/channels")["channels"]
    wanted = [one for one in found if arguments.what in (one["name"], str(one["id"]))]
    if not wanted:
        known = ", ".join(one["name"] for one in found) or "none"
        raise AlertsFailed(f"no channel {arguments.what!r}; there are: {known}", EXIT_REFUSED)
    sent = server.ask("POST", f"/channels/{wanted[0]['id']}/test")
    arrived = sent["state"] == "sent"
    line = "It arrived." if arrived else f"It did not arrive: {one_line(sent['note'])}"
    _print(arguments, sent, [line])
    return 0 if arrived else EXIT_REFUSED


def _close(server: _Server, arguments: argparse.Namespace) -> int:
    if not arguments.what.isdecimal():
        raise AlertsFailed("an alert is named by its number; see rankscope alerts list", EXIT_USAGE)
    done = server.ask("POST", f"/{arguments.what}/close")
    _print(arguments, done, [f"{done['id']}  {done['state']}  {one_line(done['what'])}"])
    return 0


def _apply(server: _Server, arguments: argparse.Namespace) -> int:
    """Make channels, then rules, of these names as a file says; others stay as they are."""
    wanted = _read(Path(arguments.what))
    ids = {one["name"]: one["id"] for one in server.ask("GET", "/channels")["channels"]}
    lines = []
    for name, channel in wanted.get("channel", {}).items():
        quiet, is_enabled = channel.pop("quiet", None), channel.pop("is_enabled", True)
        body = {"name": name, "target": channel, "quiet": quiet, "is_enabled": is_enabled}
        lines.append(_put(server, "channels", ids, body))
    known = {one["name"]: one["id"] for one in server.ask("GET", "/rules")["rules"]}
    for name, rule in wanted.get("rule", {}).items():
        missing = [one for one in rule.get("channels", []) if one not in ids]
        if missing:
            raise AlertsFailed(f"rule {name!r}: no channel {missing[0]!r}", EXIT_REFUSED)
        body = rule | {"name": name, "channels": [ids[one] for one in rule.get("channels", [])]}
        lines.append(_put(server, "rules", known, body))
    _print(arguments, {"applied": lines}, lines)
    return 0


def _put(server: _Server, group: str, ids: dict[str, int], body: dict[str, Any]) -> str:
    name = body["name"]
    is_known = name in ids
    try:
        path = f"/{group}/{ids[name]}" if is_known else f"/{group}"
        ids[name] = server.ask("PUT" if is_known else "POST", path, body)["id"]
    except AlertsFailed as error:
        raise AlertsFailed(f"{group[:-1]} {name!r}: {error}", error.exit_code) from error
    return f"{group[:-1]} {name}: {'changed' if is_known else 'made'}"


def _read(path: Path) -> dict[str, Any]:
    """Return what a file says, variables put in. Raises AlertsFailed."""
    try:
        found = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise AlertsFailed(f"{path} cannot be read: {error.strerror}", EXIT_USAGE) from error
    except ValueError as error:
        raise AlertsFailed(f"{path}: {error}", EXIT_USAGE) from error
    for name in found:
        if name not in ("channel", "rule") or not isinstance(found[name], dict):
            text = f"{path}: {name} is not known; write [channel.NAME] and [rule.NAME]"
            raise AlertsFailed(text, EXIT_USAGE)
    filled: dict[str, Any] = _filled(found)
    return filled


def _filled(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _filled(one) for name, one in value.items()}
    if isinstance(value, list):
        return [_filled(one) for one in value]
    return _VARIABLE.sub(_variable, value) if isinstance(value, str) else value


def _variable(match: re.Match[str]) -> str:
    if match[1] not in os.environ:
        raise AlertsFailed(f"the variable {match[1]} is not set; export it", EXIT_USAGE)
    return os.environ[match[1]]


_ACTIONS = {
    "list": _list, "channels": _channels, "rules": _rules, "deliveries": _deliveries,
    "test": _test, "close": _close, "apply": _apply,
}  # fmt: skip

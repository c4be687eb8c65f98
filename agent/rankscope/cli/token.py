"""`rankscope token`: who may send, read, operate and administer, and for how long."""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Protocol
from urllib.parse import quote

from rich.table import Table

from rankscope.address import AddressError
from rankscope.cli import EXIT_USAGE
from rankscope.http import Client, HttpError
from rankscope.settings import SettingError, from_environment
from rankscope.terminal import SafeConsole, shown

EXIT_REFUSED = 1
ROLES = ("ingest", "read", "operate", "admin")
_PATH = "/api/v1/tokens"
_HOURS_A_DAY = 24.0
_MOST_DAYS, _MOST_GRACE_HOURS = 3_660, 24 * 366


class TokenFailed(Exception):
    """A token was not made, listed or revoked; the message says why and what to do."""


class _Place(Protocol):
    """Where tokens are: behind a server, or in a data directory."""

    def create(self, asked: dict[str, Any]) -> dict[str, str]: ...

    def rotate(self, id: str, grace_hours: float) -> dict[str, str]: ...

    def rows(self) -> list[dict[str, Any]]: ...

    def revoke(self, id: str) -> None: ...


class TokenCommand:
    """Make, list, rotate and revoke the tokens of a server.

    A token has one or more roles in one project (or in all: '*'). ingest sends batches and
    preflights and reads nothing: it is for the nodes of a job. read sees the runs of its project.
    operate also asks ranks for stacks and profiles. admin also makes tokens. The first run that a
    token sends belongs to its project.

    Examples:
      rankscope token create ops --role admin --project '*'
      export RANKSCOPE_TOKEN=$(rankscope token create cluster-a --role ingest --project vision)
      rankscope token create grafana --role read --project '*' --days 90
      rankscope token list
      rankscope token rotate 3f9a0c1d2e4b --grace-hours 48
      rankscope token revoke 3f9a0c1d2e4b

    It works on the data directory of this machine, also while the server runs, which takes note
    within two seconds. With --server, or $RANKSCOPE_SERVER and no --data-dir, it asks that server,
    with an admin's token in RANKSCOPE_TOKEN.

    Exit codes: 0 done; 1 refused, or not reached; 64 wrong usage.
    """

    name: ClassVar[str] = "token"

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Describe the options."""
        actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
        create = actions.add_parser("create", help="make one; it is printed this once")
        create.add_argument("title", metavar="NAME", help="what it is for, as lists show it")
        create.add_argument("--role", action="append", required=True, choices=ROLES)
        create.add_argument("--project", default="default", help="'*' for all; default: default")
        create.add_argument(
            "--days", type=float, metavar="N", help="end it by itself after so long"
        )
        create.add_argument(
            "--bytes-per-second", type=int, default=0, metavar="N",
            help="quota of what it sends; beyond it, collectors wait",
        )  # fmt: skip
        create.add_argument(
            "--events-per-second", type=int, default=0, metavar="N",
            help="quota of the records and collectives that it sends",
        )  # fmt: skip
        listing = actions.add_parser("list", help="show all, without their secrets")
        rotate = actions.add_parser("rotate", help="make one like it, which then ends")
        rotate.add_argument("id", metavar="ID")
        rotate.add_argument(
            "--grace-hours", type=float, default=_HOURS_A_DAY, metavar="N",
            help="how long the old one still works; default 24",
        )  # fmt: skip
        revoke = actions.add_parser("revoke", help="end one now, and its sessions")
        revoke.add_argument("id", metavar="ID")
        for each in (create, listing, rotate, revoke):
            each.add_argument("--server", metavar="URL", help="ask this server")
            each.add_argument("--data-dir", metavar="DIR", help="work on this data directory")
            each.add_argument("--database-url", metavar="URL", help="work on this database")
            each.add_argument("--json", action="store_true", help="print one JSON object on stdout")

    def run(self, arguments: argparse.Namespace) -> int:
        """Do it. Returns the exit code."""
        try:
            place = _place(arguments)
            _ACTIONS[arguments.action](place, arguments)
        except SettingError as error:
            sys.stderr.write(f"rankscope token: {shown(str(error))}\n")
            return EXIT_USAGE
        except (TokenFailed, AddressError, HttpError) as error:
            sys.stderr.write(f"rankscope token: {shown(str(error))}\n")
            return EXIT_REFUSED
        return 0


def _create(place: _Place, arguments: argparse.Namespace) -> None:
    if arguments.days is not None and not 0 < arguments.days <= _MOST_DAYS:
        raise SettingError(f"--days {arguments.days:g}: say more than 0, at most {_MOST_DAYS}")
    asked: dict[str, Any] = {
        "name": arguments.title, "roles": sorted(set(arguments.role), key=ROLES.index),
        "project": arguments.project, "bytes_per_second": arguments.bytes_per_second,
        "events_per_second": arguments.events_per_second,
    }  # fmt: skip
    if arguments.days is not None:
        asked["expires_days"] = arguments.days
    _print_made(
        place.create(asked),
        arguments,
        f"keep it: revoke it with its id, project {arguments.project}",
    )


def _rotate(place: _Place, arguments: argparse.Namespace) -> None:
    if not 0 <= arguments.grace_hours <= _MOST_GRACE_HOURS:
        raise SettingError(f"--grace-hours {arguments.grace_hours:g}: 0 to {_MOST_GRACE_HOURS}")
    made = place.rotate(arguments.id, arguments.grace_hours)
    _print_made(made, arguments, f"{arguments.id} works for {arguments.grace_hours:g} h more")


def _print_made(made: dict[str, str], arguments: argparse.Namespace, note: str) -> None:
    if arguments.json:
        print(json.dumps(made))
        return
    print(shown(made["token"]))  # alone on stdout, for $(...)
    sys.stderr.write(f"token {shown(made['id'])}: {shown(note)}\n")


def _list(place: _Place, arguments: argparse.Namespace) -> None:
    rows = place.rows()
    if arguments.json:
        print(json.dumps({"tokens": rows}))
        return
    table = Table(box=None, pad_edge=False)
    quotas = [_quota(row) for row in rows]
    columns = ["id", "name", "project", "roles", "state", "expires", "last used"]
    for column in columns + ["quota"] * any(quotas):
        table.add_column(column, overflow="fold")
    for row, quota in zip(rows, quotas, strict=True):
        words = (row["id"], row["name"], row["project"], ", ".join(row["roles"]), row["state"])
        times = (_day(row["expires_ms"]), _day(row["used_ms"]))
        table.add_row(*map(_plain, words), *times, *([quota] if any(quotas) else []))
    console = SafeConsole(highlight=False)
    console.print(table if rows else "no tokens: the server is open on loopback")


def _revoke(place: _Place, arguments: argparse.Namespace) -> None:
    place.revoke(arguments.id)
    if arguments.json:
        print(json.dumps({"id": arguments.id, "state": "revoked"}))
        return
    print(f"token {shown(arguments.id)} is revoked")


_ACTIONS: dict[str, Callable[[_Place, argparse.Namespace], None]] = {
    "create": _create, "list": _list, "rotate": _rotate, "revoke": _revoke,
}  # fmt: skip


def _place(arguments: argparse.Namespace) -> _Place:
    settings = from_environment(os.environ)
    is_local = arguments.data_dir or arguments.database_url
    server = arguments.server or ("" if is_local else settings.server)
    if arguments.server and is_local:
        raise SettingError("--server and --data-dir exclude each other: name one of them")
    if server:
        return _Server(Client(server, settings.token, timeout_seconds=30.0))
    if importlib.util.find_spec("sqlalchemy") is None:
        raise TokenFailed(
            "a data directory wants the server's packages: pip install 'rankscope[server]', "
            "or ask a server with --server"
        )
    given = {"--data-dir": arguments.data_dir, "--database-url": arguments.database_url}
    return _Directory([word for pair in given.items() if pair[1] for word in pair])


class _Server:
    """A server's tokens, by its API."""

    def __init__(self, client: Client) -> None:
        self._client = client

    def create(self, asked: dict[str, Any]) -> dict[str, str]:
        return self._ask("POST", _PATH, asked)

    def rotate(self, id: str, grace_hours: float) -> dict[str, str]:
        path = f"{_PATH}/{quote(id, safe='')}/rotate"
        return self._ask("POST", path, {"grace_hours": grace_hours})

    def rows(self) -> list[dict[str, Any]]:
        rows: list[dict[str, Any]] = self._ask("GET", _PATH)["tokens"]
        return rows

    def revoke(self, id: str) -> None:
        self._ask("DELETE", f"{_PATH}/{quote(id, safe='')}")

    def _ask(self, method: str, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        data = None if body is None else json.dumps(body).encode()
        headers = {"Content-Type": "application/json"} if body is not None else {}
        try:
            answer = self._client.request(method, path, data, headers)
        finally:
            self._client.close()
        if answer.status != 200 or not answer.fields:
            raise TokenFailed(answer.why())
        return answer.fields


class _Directory:
    """The tokens of a data directory; `flags` name it as `rankscope serve` does."""

    def __init__(self, flags: Sequence[str]) -> None:
        # by name: the agent package imports no other
        self._local = importlib.import_module("rankscope_server.access.local")
        self._flags = flags

    def create(self, asked: dict[str, Any]) -> dict[str, str]:
        made: dict[str, str] = self._do("create", asked)
        return made

    def rotate(self, id: str, grace_hours: float) -> dict[str, str]:
        made: dict[str, str] = self._do("rotate", id, grace_hours)
        return made

    def rows(self) -> list[dict[str, Any]]:
        rows: list[dict[str, Any]] = self._do("rows")
        return rows

    def revoke(self, id: str) -> None:
        self._do("revoke", id)

    def _do(self, action: str, *about: Any) -> Any:
        try:
            return getattr(self._local, action)(self._flags, os.environ, *about)
        except self._local.LocalError as error:
            raise TokenFailed(str(error)) from error


def _plain(text: str) -> str:
    """Return a text that rich does not take for markup."""
    return text.replace("[", r"\[")


def _quota(row: dict[str, Any]) -> str:
    """Return what a token may send; a server of before knows no quota of events."""
    quotas = [(thing, row.get(f"{thing}_per_second", 0)) for thing in ("bytes", "events")]
    return ", ".join(f"{rate:,} {thing}/s" for thing, rate in quotas if rate)


def _day(ms: float | None) -> str:
    return "never" if ms is None else time.strftime("%Y-%m-%d %H:%M", time.localtime(ms / 1e3))

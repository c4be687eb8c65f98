"""Every operation of OpenAPI by schemathesis, with the token of a role."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from benchmarks.fuzzing.server import MOST_SHOWN, Result, Watched, running
from tests.server.seed import seed_run

OPERATOR = "operator of everything"
ROLES = ("open", "none", "ingest", "read", "operate", "admin", "preflight")
ENDLESS = "/api/v1/stream"
_TOPICS = (
    "runs", "run:demo-run", "run:none", "*", "", "\0", "run:", "runs,,runs", "é", "x" * 5_000,
)  # fmt: skip
_CHECKS = (
    "not_a_server_error", "status_code_conformance", "content_type_conformance",
    "response_schema_conformance", "response_headers_conformance",
)  # fmt: skip
_SPARE = 12  # things of a kind that may be ended


@dataclass
class World:
    """What a server holds that requests may name, and the token that they carry."""

    known: dict[str, list[Any]] = field(default_factory=dict)
    token: str = ""


def fuzz_openapi(result: Result, count: int, folder: Path, url: str, paths: str) -> None:
    """Let schemathesis ask every operation (of `paths`) to the end; fill the result."""
    flags = ["--alert-networks", "127.0.0.0/8"]  # whatever a channel says, nothing is dialled
    flags += ["--database-url", url] if url else []
    environ = {} if result.role == "open" else {"RANKSCOPE_TOKEN": OPERATOR}
    began = time.monotonic()
    with running(folder, result, *flags, **environ) as server:
        world = fill(server.server.url, result.role)
        ask_everything(result, server, world, count, folder, paths)
        if not paths:
            ask_streams(result, server.server.url, world.token)
        with client_of(server.server.url, world.token) as client:
            result.stored["runs"] = len(client.get("/api/v1/runs").json().get("runs", []))
    result.seconds = time.monotonic() - began


def client_of(url: str, token: str) -> httpx.Client:
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    return httpx.Client(base_url=url, headers=headers, timeout=60, trust_env=False)


def fill(url: str, role: str) -> World:
    """Store a run in which every page has something to show, and things that may be ended."""
    operator, world = "" if role == "open" else OPERATOR, World()
    for run in ("demo-run", *(f"spare-{number}" for number in range(_SPARE))):
        is_spare = run != "demo-run"
        seed_run(url, operator, run_id=run, steps=20 if is_spare else 100, gpus=not is_spare)
    with client_of(url, operator) as client:
        world.known = known(client)
        world.known |= {"run": ["demo-run"], "rank": [0, 2], "node": ["node-a"]}
        world.known["ended run"] = [f"spare-{number}" for number in range(_SPARE)]
        made = client.post("/api/v1/preflight/runs", json={"nodes": ["node-a", "node-b"]}).json()
        world.known["id of preflights"] = [made["id"]]
        joining = {"Authorization": f"Bearer {made['token']}"}
        client.post(
            f"/api/v1/preflight/runs/{made['id']}/join", json={"node": "node-a"}, headers=joining
        ).raise_for_status()
        world.token = {"open": "", "none": "", "preflight": made["token"]}.get(role) or ""
        if role in ("ingest", "read", "operate", "admin"):
            world.token = make_token(client, role)["token"]
        if operator:
            spare = [make_token(client, "read")["id"] for _ in range(_SPARE)]
            world.known |= {"token": spare, "ended token": spare[: _SPARE // 2]}
    return world


def known(client: httpx.Client) -> dict[str, list[Any]]:
    """Make one of everything that has a number, and return the numbers."""

    def post(path: str, body: Any) -> Any:
        reply = client.post(f"/api/v1{path}", json=body)
        reply.raise_for_status()
        return reply.json()

    for number in range(_SPARE):
        post("/searches", {"name": f"s{number}", "q": "loss"})
    searches = [row["id"] for row in client.get("/api/v1/searches").json()["searches"]]
    target = {"kind": "webhook", "url": "http://127.0.0.1:9/x", "signing_key": "k" * 20}
    channels = [
        post("/alerts/channels", {"name": f"c{number}", "target": target})["id"]
        for number in range(_SPARE)
    ]
    when = {"about": "stall", "seconds": 60}
    rules = [
        post("/alerts/rules", {"name": f"r{number}", "when": when})["id"]
        for number in range(_SPARE)
    ]
    post(f"/alerts/channels/{channels[0]}/test", {})
    lines = client.get("/api/v1/runs/demo-run/logs").json()["lines"]
    return {
        "id of searches": searches[:4], "ended id of searches": searches[4:],
        "id of channels": channels[:4], "ended id of channels": channels[4:],
        "id of rules": rules[:4], "ended id of rules": rules[4:],
        "id of logs": [line["id"] for line in lines[:9]],
        "id of findings": [1, 2], "id of deliveries": [1], "id of alerts": [1, 2],
        "id of commands": [1],
    }  # fmt: skip


def make_token(client: httpx.Client, role: str) -> dict[str, str]:
    reply = client.post("/api/v1/tokens", json={"name": role, "roles": [role], "project": "*"})
    reply.raise_for_status()
    made: dict[str, str] = reply.json()
    return made


def ask_everything(
    result: Result, server: Watched, world: World, count: int, folder: Path, paths: str
) -> None:
    """Run schemathesis; take its counts and what it says of failures."""
    counts = folder / "counts.json"
    root = Path(__file__).parents[2]
    environ = os.environ | {
        "SCHEMATHESIS_HOOKS": "benchmarks.fuzzing.hooks", "FUZZ_KNOWN": json.dumps(world.known),
        "FUZZ_COUNTS": str(counts),
        "PYTHONPATH": os.pathsep.join([str(root), os.environ.get("PYTHONPATH", "")]),
    }  # fmt: skip
    command = [
        str(Path(sys.executable).with_name("schemathesis")), "run",
        f"{server.server.url}/api/v1/openapi.json", "--url", server.server.url,
        "--exclude-path", ENDLESS, "--checks", ",".join(_CHECKS), "--max-examples", str(count),
        "--seed", str(result.seed), "--continue-on-failure", "--no-shrink", "--warnings", "off",
        "--suppress-health-check", "all", "--generation-database", "none",
        "--generation-allow-x00", "true", "--request-timeout", "60", "--no-color",
        "--output-truncate", "true",
    ]  # fmt: skip
    if world.token:
        command += ["--header", f"Authorization:Bearer {world.token}"]
    if paths:
        command += ["--include-path-regex", paths]
    with (folder / "openapi.json").open("wb") as file:  # not everyone may read it from the server
        file.write(document(server.server.url, result.role))
    command[2] = str(folder / "openapi.json")
    done = subprocess.run(command, env=environ, capture_output=True, text=True, cwd=folder)
    if done.returncode:
        lines = (done.stdout + done.stderr).splitlines()
        begin = next((n for n, line in enumerate(lines) if " FAILURES " in line), 0)
        result.failures += lines[begin : begin + 15 * MOST_SHOWN]
    result.statuses = json.loads(counts.read_text()) if counts.exists() else {}
    result.inputs = sum(sum(answers.values()) for answers in result.statuses.values())
    for label, answers in result.statuses.items():
        result.server_errors += [
            f"{label}: {number} times {status}"
            for status, number in answers.items()
            if status.startswith("5") and status not in ("503", "507")
        ]


def document(url: str, role: str) -> bytes:
    with client_of(url, "" if role == "open" else OPERATOR) as client:
        return client.get("/api/v1/openapi.json").raise_for_status().content


def ask_streams(result: Result, url: str, token: str) -> None:
    """Ask for streams, which do not end, and read how they begin."""
    counts: Counter[str] = Counter()
    with client_of(url, token) as client:
        for topics in _TOPICS:
            with begun(client, topics) as reply:
                counts[str(reply.status_code)] += 1
    result.statuses[f"GET {ENDLESS}"] = dict(counts)
    result.inputs += len(_TOPICS)
    if failed := {status: n for status, n in counts.items() if status.startswith("5")}:
        result.server_errors.append(f"GET {ENDLESS}: {failed}")


@contextlib.contextmanager
def begun(client: httpx.Client, topics: str) -> Iterator[httpx.Response]:
    with client.stream("GET", ENDLESS, params={"topics": topics}) as reply:
        yield reply

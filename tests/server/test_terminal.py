"""Text of strangers in the output of every command: shown, and nothing of it acts on a terminal."""

from __future__ import annotations

import json
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from io import StringIO
from pathlib import Path

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from rankscope import cli
from rankscope.terminal import _ACTS, SafeConsole, shown, shown_json
from rankscope.wire import schema
from tests import command_server, doctor
from tests.server.conftest import Sender, ServerProcess, log_line
from tests.server.seed import seed_run

# a title, an erased screen, hidden text, a sequence by its single sign, a line turned around
HOSTILE = "\x1b]0;owned\x07\x1b[2J\x1b[8mhid\x1b[0m\x9b31m\u202efed\u2066 \r\x08end"
_STYLE = re.compile(r"\x1b\[[0-9;]*m")  # what rich sends for its own colours
# These print nothing that came from elsewhere; `preflight` has tests of its own, see Intake.
_NO_FOREIGN_TEXT = {"serve", "completion", "man", "demo", "uninstall"}


@given(st.text(alphabet=st.characters(codec="utf-8") | st.sampled_from(HOSTILE)))
def test_nothing_acts_and_nothing_is_lost(text: str) -> None:
    safe = shown(text)
    assert not _ACTS.search(safe)
    assert shown(safe) == safe
    assert len(safe) >= len(text) - text.count("\r\n")
    assert json.loads(shown_json(json.dumps(text, ensure_ascii=False))) == text
    assert not _ACTS.search(shown_json(json.dumps(text, ensure_ascii=False)))


def test_a_console_sends_its_own_styles_alone() -> None:
    stream = StringIO()
    console = SafeConsole(file=stream, force_terminal=True, width=60, color_system="standard")
    table = Table("column")
    table.add_row(Text(HOSTILE, style="red"))
    table.add_row(HOSTILE)
    for thing in (HOSTILE, Text(HOSTILE, style="bold"), table, Panel(HOSTILE, title=HOSTILE)):
        console.print(thing)
    console.print(HOSTILE, markup=False, highlight=True)
    console.print_json(json.dumps({"a": HOSTILE}, ensure_ascii=False))
    assert_safe(stream.getvalue())
    assert "\x1b[1m" in stream.getvalue()


def assert_safe(output: str) -> None:
    assert "\x1b[8m" not in output
    plain = _STYLE.sub("", output)
    found = _ACTS.search(plain)
    assert found is None, plain[max(0, found.start() - 60) : found.end() + 60]


class Handler(BaseHTTPRequestHandler):
    """A server that answers everything with hostile words."""

    def do_GET(self) -> None:
        operator = {"name": HOSTILE, "count": 1, "total_ms": 1.0, "self_ms": None}
        rank = {"rank": 0, "state": "done", "reason": HOSTILE, "trace": None, "trace_bytes": None,
                "operators": [operator]}  # fmt: skip
        verdict = {"kind": "x", "ranks": [0], "severity": "warning", "what": HOSTILE,
                   "why": HOSTILE, "next": HOSTILE}  # fmt: skip
        token = {"id": HOSTILE, "name": HOSTILE, "project": HOSTILE, "roles": [HOSTILE],
                 "state": HOSTILE, "expires_ms": None, "used_ms": None}  # fmt: skip
        alert = {"id": 1, "severity": HOSTILE, "run_name": HOSTILE, "run_id": HOSTILE,
                 "what": HOSTILE, "why": HOSTILE, "next": HOSTILE}  # fmt: skip
        cost = {"text": HOSTILE}
        advice = {"run_id": HOSTILE, "epoch": 1, "action": "exclude_host", "hosts": ["node-1"],
                  "what": HOSTILE, "why": HOSTILE, "confidence": 0.9, "least_confidence": 0.85,
                  "cost_of_doing": cost, "cost_of_not_doing": cost, "evidence": [cost],
                  "valid_until_ms": 0}  # fmt: skip
        row = {"label": HOSTILE, "before_median_ms": 1.0, "after_median_ms": 2.0,
               "before_p95_ms": None, "after_p95_ms": None, "difference_ms": 1.0, "low_ms": 1.0,
               "high_ms": 1.0, "state": HOSTILE}  # fmt: skip
        changed = {
            "label": HOSTILE, "step_ms": 1.0, "step_low_ms": 1.0, "step_high_ms": 2.0,
            "throughput_ratio": 1.0, "memory_bytes": 1.0, "no_memory": HOSTILE, "by": HOSTILE,
            "parts": {HOSTILE: 1.0}, "assumptions": [HOSTILE], "band": HOSTILE, "why_not": HOSTILE,
        }  # fmt: skip
        comparison = {
            "text": HOSTILE, "before": {"label": HOSTILE}, "after": {"label": HOSTILE},
            "step": row, "parts": [row], "noise_text": HOSTILE, "not_comparable": [HOSTILE],
            "left_out": [{"what": HOSTILE, "count": None}],
            "rates": [{"label": HOSTILE, "unit": HOSTILE, "before": 1.0, "after": 2.0,
                       "ratio": None}],
            "facts": [{"severity": HOSTILE, "text": HOSTILE}], "facts_capped": None,
            "num_common_facts": 1,
            "findings": [{"before_id": 1, "after_id": None, "what": HOSTILE}],
        }  # fmt: skip
        line = {"time_ms": 1e12, "run_id": HOSTILE, "rank": 1, "ranks": [1], "level": HOSTILE,
                "logger": HOSTILE, "stream": HOSTILE, "message": HOSTILE, "count": 2}  # fmt: skip
        answers = {
            "commands": {"id": 1, "kind": "stacks", "text": HOSTILE, "is_open": False,
                         "ranks": [rank]},
            "ranks/0": {"stacks": [{"command_id": 1, "text": HOSTILE}]},
            "runs/quiet": {"run": {"status": "ended"}, "answer": {"text": HOSTILE},
                           "verdict": verdict},
            "runs/tracked": {
                "run": {"status": "ended", "name": HOSTILE, "step": 1, "last_seen_ms": 1e12},
                "answer": {"text": HOSTILE, "state": HOSTILE}, "verdict": None,
                "trackers": [{"tracker": "tensorboard", "store": HOSTILE}],
            },
            "tokens": {"tokens": [token], "id": HOSTILE, "token": HOSTILE},
            "health": {"status": HOSTILE, "version": HOSTILE},
            "alerts?state=open": {"alerts": [alert]},
            "quiet/advice": advice,
            "runs/watched": {
                "run": {"run_id": "watched", "name": HOSTILE, "status": HOSTILE, "step": 1},
                "answer": {"text": HOSTILE, "detail": HOSTILE}, "verdict": verdict | {"id": 1},
                "numbers": [{"label": HOSTILE, "value": 1.0, "unit": HOSTILE}],
                "coverage": {"text": HOSTILE},
            },
            "watched/ranks": {"ranks": [{"rank": 0, "host": HOSTILE, "state": HOSTILE, "step": 1,
                                         "phase": HOSTILE}]},
            "watched/findings": {"open": [{"id": 2, "severity": HOSTILE, "what": HOSTILE}]},
            "watched/parallelism": {"mesh": {"rank": [0], "values": []}},
            "/search?q=x&limit=100": {"lines": [line], "next_cursor": None},
            "quiet/compare": comparison,
            "quiet/rows?kind=events&after=": {"columns": ["name"], "rows": [[HOSTILE]],
                                              "after": None},
            "quiet/what-if?strategy=ddp": {
                "text": HOSTILE, "step_lo": 1, "step_hi": 9, "num_steps": 9,
                "now": {"text": HOSTILE, "step_ms": 1.0, "memory_bytes": None},
                "answers": [changed, changed | {"step_ms": None}],
                "inputs": [{"label": HOSTILE, "value": HOSTILE, "unit": "", "source": HOSTILE}],
                "factors": [{"name": HOSTILE, "value": 1.0, "what": HOSTILE}],
            },
        }  # fmt: skip
        known = [name for name in answers if self.path.endswith(name)]
        refusal = {"error": {"what": HOSTILE, "field": HOSTILE, "remedy": HOSTILE}}
        body = json.dumps(answers[known[0]] if known else refusal).encode()
        length = int(self.headers.get("Content-Length", 0))
        self.rfile.read(length)
        self.send_response(200 if known else 404)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    do_POST = do_DELETE = do_PUT = do_GET

    def log_message(self, format: str, *arguments: object) -> None:
        """Say nothing."""


@pytest.fixture(scope="module")
def hostile_server() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def run(*words: str, colour: bool, folder: Path) -> str:
    """Return all that a command prints."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("RANKSCOPE")}
    clean |= {"RANKSCOPE_DIR": str(folder), "COLUMNS": "120"}
    clean |= {"FORCE_COLOR": "1", "TERM": "xterm-256color"} if colour else {}
    done = (
        doctor.run(*words[1:], env=clean)
        if words[0] == "doctor"
        else command_server.run([sys.executable, "-m", "rankscope", *words], env=clean)
    )
    assert "Traceback" not in done.stderr, done.stderr
    return done.stdout + done.stderr


CASES = {
    "ask": ("stacks", "quiet", "--server", "{url}"),
    "ask refused": ("off", "no such", "--server", "{url}"),
    "report": ("quiet", "--server", "{url}"),
    "token": ("list", "--server", "{url}"),
    "token made": ("create", "x", "--role", "read", "--server", "{url}"),
    "token refused": ("revoke", "x", "--server", "{url}"),
    "doctor": ("--server", "{url}", "--all"),
    "mcp": ("--server", "{log}"),
    "runs refused": ("delete", "no-such", "--yes", "no-such", "--server", "{url}"),
    "alerts": ("list", "--server", "{url}"),
    "alerts refused": ("close", "12", "--server", "{url}"),
    "advice": ("quiet", "--adapter", "slurm", "--server", "{url}"),
    "advice refused": ("no-such", "--server", "{url}"),
    "diff": ("quiet", "--server", "{url}"),
    "watch": ("watched", "--once", "--server", "{url}"),
    "watch refused": ("no-such", "--once", "--server", "{url}"),
    "search": ("x", "--server", "{url}"),
    "search refused": ("y", "--server", "{url}"),
    "diff refused": ("no-such", "--server", "{url}"),
    "what-if": ("quiet", "--strategy", "ddp", "--server", "{url}"),
    "what-if refused": ("no-such", "--server", "{url}"),
    "sql": ("quiet", "select name from events", "--server", "{url}"),
    "sql refused": ("no-such", "select 1", "--server", "{url}"),
    "export": ("quiet", "--tables", "events", "--out", "{folder}/exported", "--server", "{url}"),
    "export refused": ("no-such", "--out", "{folder}/none", "--server", "{url}"),
    "track": ("tracked", "--to", "tensorboard", "--store", "{folder}/runs", "--server", "{url}"),
    "track refused": ("no-such", "--to", "tensorboard", "--server", "{url}"),
    "backup": ("--data-dir", "{log}", "--out", "{folder}/copy"),
    "restore": ("{log}", "--data-dir", "{folder}/data"),
    "import": ("{log}", "--server", "{url}"),
    "explain": ("{log}",),
    "explain of a name": ("{folder}",),
    "run": ("--server", "{url}", "--run-id", "quiet", "--", sys.executable, "-c", "pass"),
    "preflight": ("--server", "{url}", "--nodes", "1", "--only", "limits"),
    "plan": ("--model", "llama2-7b", "--batch", "8", "--nodes", "2", "--devices", "2", "--device",
             "h100", "--links", "{links}"),
    "plan refused": ("--device", "h100", "--links", "{log}"),
}  # fmt: skip


def test_every_command_is_in_the_table() -> None:
    names = {command.name for command in (cli._load(*row) for row in cli._MODULES)}
    assert {case.partition(" ")[0] for case in CASES} | _NO_FOREIGN_TEXT == names


@pytest.mark.parametrize("colour", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_no_command_sends_what_a_server_or_a_file_says(
    case: str, colour: bool, hostile_server: str, tmp_path: Path
) -> None:
    name = "bad\x1b]0;owned\x07\x1b[8mname"
    log = tmp_path / f"{name}.log"
    log.write_text(
        f"[rank3]: RuntimeError: CUDA error: out of memory {HOSTILE}\n"
        f"torch.OutOfMemoryError: CUDA out of memory. Tried {HOSTILE}\n" * 3
    )
    links = tmp_path / f"{name}.json"
    edge = {"bandwidth": {"mbit_per_s": 1e4}}
    links.write_text(json.dumps({"reports": [{"node": HOSTILE, "edges": {HOSTILE: edge}}]}))
    values = {"url": hostile_server, "log": str(log), "folder": str(tmp_path), "links": str(links)}
    words = [word.format(**values) for word in CASES[case]]
    output = run(case.partition(" ")[0], *words, colour=colour, folder=tmp_path)
    assert output
    assert_safe(output)


def test_a_run_whose_every_text_is_hostile(
    start_server: Callable[..., ServerProcess], tmp_path: Path
) -> None:
    server = start_server()
    seed_run(server.url, run_id="run", steps=100)
    sender = Sender(None, "run", "hostile")  # type: ignore[arg-type]
    at = {"attempt": 0, "rank": 1, "time_ns": time.time_ns()}
    body = sender.body(
        schema.ErrorRaised(
            **at, type=f"E{HOSTILE}", message=HOSTILE, traceback=HOSTILE, step=9
        ),  # type: ignore[arg-type]
        log_line(HOSTILE, level=50), schema.Event(**at, name=HOSTILE, fields={"a": HOSTILE}),  # type: ignore[arg-type]
    )  # fmt: skip
    reply = httpx.post(f"{server.url}/api/v1/ingest", content=body, trust_env=False)
    assert reply.status_code == 200, reply.text
    assert reply.json()["refused"] == []
    for more in ((), ("--json",)):
        output = run("report", "run", "--server", server.url, *more, colour=True, folder=tmp_path)
        assert "owned" in output
        assert_safe(output)
        if more:
            assert HOSTILE in json.dumps(json.loads(output), ensure_ascii=False).replace(
                "\\u001b", "\x1b"
            ).replace("\\u0007", "\x07").replace("\\r", "\r").replace("\\b", "\x08")

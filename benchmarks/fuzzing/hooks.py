"""What schemathesis loads for `benchmarks/fuzz.py openapi`: requests that find something, counted.

Random ids find nothing, so most requests get those of the environment's FUZZ_KNOWN, a JSON map of
what exists by the name of its part of a path. Bodies of which OpenAPI does not say the fields are
sound ones that were harmed, some queries are of the language of the search box, and what is asked
to wait does not. Each answer is counted by operation and status; the file FUZZ_COUNTS has the
counts at the end.
"""

from __future__ import annotations

import atexit
import copy
import json
import os
import random
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import schemathesis

from rankscope.preflight.model import LaunchVerdict, NodeReport
from tests.server.mutations import harm_map, sound_struct

_KNOWN: dict[str, list[Any]] = json.loads(os.environ["FUZZ_KNOWN"])
_COUNTS = Path(os.environ["FUZZ_COUNTS"])
_KNOWN_RATIO, _SOUND_RATIO, _QUERY_RATIO = 0.8, 0.2, 0.5
_QUERIES = (
    "loss", '"loss is"', "los*", "*oss*", "-loss", "loss OR rank", "/lo.s|rank/", "rank:0-2",
    "level:>=warning", "step:1..50 loss", "since:-10m", "host:node-a -stream:finding", "/(/",
    "rank:", '"', "a" * 1_900, "/(a*)*b/", "(loss OR rank) -x*", "loss\0",
    "group:default_pg logger:train",
)  # fmt: skip
_REPORT = sound_struct(NodeReport) | {"node": "node-a"}
_VERDICT = sound_struct(LaunchVerdict)
_WHENS = (
    {"about": "finding", "kinds": ["hang"], "min_severity": "info", "lasts_seconds": 0},
    {"about": "stall", "seconds": 60}, {"about": "silence", "is_whole_run": True},
    {"about": "throughput", "share_ratio": 0.5}, {"about": "lag"}, {"about": "queue"},
    {"about": "disk", "free_bytes": 1},
)  # fmt: skip
_TARGETS = (
    {"kind": "webhook", "url": "http://127.0.0.1:9/a", "signing_key": "k" * 20},
    {"kind": "slack", "url": "http://127.0.0.1:9/b"},
    {"kind": "pagerduty", "url": "http://127.0.0.1:9/c", "routing_key": "r" * 32},
    {"kind": "email", "host": "127.0.0.1", "port": 9, "security": "none", "sender": "a@b.example",
     "recipients": ["c@d.example"]},
)  # fmt: skip
_chance = random.Random(1)
_counts: dict[str, Counter[int]] = {}
_lock = threading.Lock()


@schemathesis.serializer("application/msgpack", "application/gzip")
def as_it_is(context: Any, value: Any) -> Any:
    return value


@schemathesis.hook
def before_call(context: Any, case: Any, kwargs: dict[str, Any]) -> None:
    """Change a request so that it says something that the server can understand."""
    label = case.operation.label
    for name in case.path_parameters or {}:
        found = _known(label, name)
        if found and _chance.random() < _KNOWN_RATIO:
            case.path_parameters[name] = _chance.choice(found)
    query = case.query if isinstance(case.query, dict) else {}
    if "wait" in query:
        query["wait"] = 0
    if "q" in query and _chance.random() < _QUERY_RATIO:
        query["q"] = _chance.choice(_QUERIES)
    if label == "DELETE /api/v1/runs/{run}" and "confirm" in query:
        query["confirm"] = case.path_parameters["run"]
    body = _body(label)
    if body is not None and isinstance(case.body, dict):
        case.body = body


def _known(label: str, name: str) -> list[Any] | None:
    """Return the ids of what exists; those of things that may end, where the request ends them."""
    what = f"id of {_kind_of(label)}" if name == "id" else name
    if label.startswith("DELETE ") and not label.endswith("/pin"):
        return _KNOWN.get(f"ended {what}")
    return _KNOWN.get(what)


def _kind_of(label: str) -> str:
    """Return the collection that an operation is of: ids are numbers of different things."""
    found = label.split("/{id}")[0].rpartition("/")[2]
    return "preflights" if "/preflight/" in label else found


def _body(label: str) -> dict[str, Any] | None:
    """Return a body, mostly a harmed one, where OpenAPI does not say what is in it."""
    body: dict[str, Any]
    if "/alerts/rules" in label:
        body = {"name": f"rule {_chance.randrange(99)}", "when": _chance.choice(_WHENS),
                "runs": "*", "tags": {"a": "b"}, "channels": [1], "is_enabled": True}  # fmt: skip
    elif "/alerts/channels" in label and not label.endswith("/test"):
        quiet = {"start": "22:00", "end": "06:00", "zone": "Europe/Berlin"}
        body = {"name": f"channel {_chance.randrange(99)}", "target": _chance.choice(_TARGETS),
                "quiet": _chance.choice((None, quiet)), "is_enabled": True}  # fmt: skip
    elif label.endswith("/reports/{node}"):
        body = _REPORT
    elif label == "PUT /api/v1/preflight/runs/{id}":
        body = {"verdict": _VERDICT, "reports": [_REPORT], "run_id": "demo-run"}
    else:
        return None
    body = copy.deepcopy(body)
    if _chance.random() > _SOUND_RATIO:
        harm_map(_chance, body)
    made: dict[str, Any] = json.loads(json.dumps(body, default=str), parse_constant=str)
    return made


@schemathesis.hook
def after_call(context: Any, case: Any, response: Any) -> None:
    with _lock:
        _counts.setdefault(case.operation.label, Counter())[response.status_code] += 1


@atexit.register
def _write() -> None:
    text = {label: dict(sorted(counts.items())) for label, counts in sorted(_counts.items())}
    _COUNTS.write_text(json.dumps(text))

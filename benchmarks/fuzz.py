"""Sends a server what no agent and no page would, and looks whether it stays sound.

    python benchmarks/fuzz.py inputs --count 100000        # harmed batches, SQLite
    python benchmarks/fuzz.py inputs --count 100000 --database postgresql
    python benchmarks/fuzz.py inputs --only 4711           # one of them, shown and not sent
    python benchmarks/fuzz.py openapi --role open          # schemathesis over every operation
    python benchmarks/fuzz.py openapi --role read --count 30

`inputs`: batches that were harmed at one layer (tests/server/mutations.py). In the first half the
detectors are off, so that nothing but ingest writes: an input that is refused must leave the
database as it was. In the second half they look at what the first one stored. Now and then a sound
batch must be taken. At the end every stored chunk must decode, and every page of every run answer.

`openapi`: all phases of schemathesis (coverage, fuzzing with `--count` examples an operation,
stateful) by a server without tokens (`open`), or with them: without one (`none`), with one of a
role, with that of a preflight. Every answer must be as declared, and none a failure.

For both the server's own log must be empty and its memory stay within 512 MiB above idle. Appends
one line to benchmarks/results/fuzz.jsonl; exit status 1 where anything of this failed.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from benchmarks.fuzzing.inputs import fuzz_inputs, show
from benchmarks.fuzzing.openapi import ROLES, fuzz_openapi
from benchmarks.fuzzing.server import Result, database

RESULTS = Path(__file__).parent / "results" / "fuzz.jsonl"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=("inputs", "openapi"))
    parser.add_argument("--count", type=int, default=30, help="inputs, or examples an operation")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--database", choices=("sqlite", "postgresql"), default="sqlite")
    parser.add_argument("--connections", type=int, default=2)
    parser.add_argument("--role", choices=ROLES, default="open")
    parser.add_argument("--paths", default="", help="regular expression; only these operations")
    parser.add_argument("--only", type=int, help="show this input alone, and send nothing")
    parser.add_argument("--json", action="store_true", help="print one JSON object, keep nothing")
    choices = parser.parse_args()
    if choices.only is not None:
        show(choices.only, choices.seed)
        return 0
    result = Result(choices.what, choices.database, choices.seed)
    with (
        tempfile.TemporaryDirectory(prefix="rankscope-fuzz-") as folder,
        database(choices.database) as url,
    ):
        if choices.what == "inputs":
            fuzz_inputs(result, choices.count, Path(folder), url, choices.connections)
        else:
            result.role = choices.role
            fuzz_openapi(result, choices.count, Path(folder), url, choices.paths)
    line = json.dumps({**asdict(result), "passed": result.passed})
    print(line if choices.json else json.dumps(json.loads(line), indent=1))
    if not choices.json:
        with RESULTS.open("a") as file:
            file.write(line + "\n")
    return 0 if result.passed else 1


if __name__ == "__main__":
    sys.exit(main())

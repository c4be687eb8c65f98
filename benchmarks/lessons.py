"""Do the lessons run as they are written?

    python benchmarks/lessons.py [--lessons TEXT] [--out FILE]
    python benchmarks/lessons.py --check
    python benchmarks/lessons.py --table

Each command of docs/mistakes.md and of "Each strategy, as a run" in the trainer's README is typed
as it stands on the page, in an empty folder; the environment names a server, and nothing else is
added. What the page promises has to come true: a mistake is named by its kind, in the words that
the page quotes, no loss is called healthy, and where the page says what it costs, it is within
five points of that; a strategy prints the losses that are shown, to a tenth. `--check` runs nothing
and says which commands have no lesson here and which words are not on the page. Resumes where it
was stopped; results are in benchmarks/results/lessons.jsonl, a row for each command and label of
the code. Exit code 1 if one is not as the page says.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from real_ranks import RIGHT, Server, findings_of
from rows import RESULTS, ROOT, Rows, code_label, newest

KEYS = ("lesson",)
MISTAKES = ROOT / "docs" / "mistakes.md"
README = ROOT / "reference_trainer" / "README.md"
LONGEST_SECONDS = 600.0  # of a command
SETTLE_SECONDS = 30.0  # until what is said of a run that is over is said
POINTS = 0.05
LOSS_TENTH = 0.1
SHELL = re.compile(r"^```sh\n(.*?)^```$", re.M | re.S)
CONSOLE = re.compile(r"^\$ (rankscope run .+(?:\\\n.+)*)\n((?:rank .+\n)+)", re.M)
LINE = re.compile(r"(rank \d+) INFO step (\d+) loss (\d+\.\d+)")


@dataclass(frozen=True)
class Promise:
    """What a page says of one command. `words` stand on the page and in what is said."""

    kind: str
    words: str
    cost: float | None = None  # share of the throughput
    code: int = 0
    is_note: bool = False  # beside a healthy run


PROMISES: dict[str, tuple[Promise, ...]] = {  # by heading, in the order of its commands
    "A model on several ranks without a pipeline": (
        Promise("no_pipelining", "2 stages work one after the other", 0.5),
    ),
    "Stages of unequal work": (
        Promise("stage_imbalance", "stage 0"),
    ),
    "Too few microbatches": (
        Promise("pipeline_bubble", "2 microbatches are few for 4 stages"),
    ),
    "One parameter server for many workers": (
        Promise("server_bottleneck", "for 1 parameter server"),
    ),
    "Checkpoints that take too long, or come too rarely": (
        Promise("slow_checkpoint", "saves checkpoints slowly"),
        Promise("checkpoint_interval", "Saving every"),
    ),
    "The program ends before its first step": (
        Promise("failed_start", "3 ranks cannot share 4 heads evenly", code=1),
    ),
    "Every rank trains on the same samples": (
        Promise("same_samples", "All 4 ranks train on the same samples"),
    ),
    "Every epoch in the same order": (
        Promise("same_order", "Every epoch has its samples in the same order"),
    ),
    "Nothing is learnt": (
        Promise("nothing_learnt", "Nothing is learnt"),  # by gradients, or, of few, by the loss
    ),
    "Accumulated gradients on the wrong scale": (
        Promise("accumulation", "is divided by 4 twice"),
        Promise("accumulation", "is not divided by 4"),
    ),
    "Learning rate and batch": (
        Promise("no_warm_up", "the first step of a batch of 1,024 samples", is_note=True),
        Promise("linear_scaling", "scaled in proportion to the batch, 4 times", is_note=True),
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Lesson:
    """One command of a page, and what is to come of it."""

    name: str
    command: str
    section: str  # text of the page
    promise: Promise | None = None  # of a mistake
    losses: tuple[tuple[str, str, str], ...] = ()  # rank, step, loss


def lessons() -> Iterator[Lesson]:
    """Yield the lessons of both pages in their order; SystemExit where one has no promise."""
    for heading, section in _sections(MISTAKES):
        commands = [
            command.replace("\\\n", " ")
            for block in SHELL.findall(section)
            for command in re.split(r"\n(?! )", block.strip())
        ]
        promises = PROMISES.get(heading, ())
        if len(commands) != len(promises):
            raise SystemExit(f"{heading}: {len(commands)} commands, {len(promises)} promises")
        for number, (command, promise) in enumerate(zip(commands, promises, strict=True), 1):
            name = f"{heading} ({number})" if len(commands) > 1 else heading
            yield Lesson(name, command, section, promise)
    (runs,) = (text for heading, text in _sections(README) if heading == "Each strategy, as a run")
    for command, printed in CONSOLE.findall(runs):
        config = re.search(r"configs/(\w+)\.toml", command)
        if config is None:
            raise SystemExit(f"no configuration in: {command}")
        found = tuple(LINE.findall(printed))
        yield Lesson(f"strategy {config[1]}", command.replace("\\\n", " "), runs, losses=found)


def _sections(page: Path) -> list[tuple[str, str]]:
    """Return the headings of a page and the text under each."""
    parts = re.split(r"^## (.+)\n", page.read_text(), flags=re.M)[1:]
    return [(heading, text) for heading, text in zip(parts[::2], parts[1::2], strict=True)]


def problems() -> list[str]:
    """Return what a page does not say of its own lessons."""
    found = list(lessons())
    missing = PROMISES.keys() - {heading for heading, _ in _sections(MISTAKES)}
    return [f"no heading {heading!r} in {MISTAKES.name}" for heading in sorted(missing)] + [
        f"{lesson.name}: the page does not say {text!r}"
        for lesson in found
        if lesson.promise is not None
        for text in (f"`{lesson.promise.kind}`", lesson.promise.words)
        if text.casefold() not in " ".join(lesson.section.split()).casefold()
    ]


def run_one(server: Server, lesson: Lesson, folder: Path) -> dict[str, Any]:
    """Type the command and return what came of it."""
    folder.mkdir()
    (folder / "reference_trainer").symlink_to(ROOT / "reference_trainer")
    run_id = folder.name
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith("RANKSCOPE")
    }
    environment |= {
        "RANKSCOPE_SERVER": server.url, "RANKSCOPE_RUN_ID": run_id,
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
    }  # fmt: skip
    began = time.monotonic()
    code, output = _typed(lesson.command, folder, environment)
    seconds = time.monotonic() - began
    answer, said = _said(server, run_id, lesson)
    expected_code = 0 if lesson.promise is None else lesson.promise.code
    if code != expected_code:
        judgement = f"exit code {code}: {output[-400:]}"
    elif lesson.promise is None:
        judgement = _losses_judged(lesson, output)
    else:
        judgement = _judged(lesson.promise, answer, said)
    return {
        "judgement": judgement, "answer": answer.get("text", ""),
        "said": said.get("what", ""), "cost": said.get("cost_throughput_ratio"),
        "seconds": round(seconds, 1),
    }  # fmt: skip


def _typed(command: str, folder: Path, environment: dict[str, str]) -> tuple[int | None, str]:
    """Return the exit code of a command, None where it took too long, and what it printed."""
    log = folder / "output"
    with log.open("wb") as output:
        process = subprocess.Popen(
            ["bash", "-c", command], cwd=folder, env=environment, stdout=output, stderr=output,
            start_new_session=True,
        )  # fmt: skip
        try:
            code: int | None = process.wait(LONGEST_SECONDS)
        except subprocess.TimeoutExpired:
            code = None
            os.killpg(process.pid, signal.SIGTERM)  # `rankscope run` passes it on
            process.wait()
    return code, log.read_text(errors="replace")


def _said(server: Server, run_id: str, lesson: Lesson) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the headline of a run that is over, and the finding that was promised."""
    deadline = time.monotonic() + SETTLE_SECONDS
    while True:
        run = server.get(f"runs/{run_id}")
        kind = "" if lesson.promise is None else lesson.promise.kind
        found = [one for one in findings_of(server, run_id) if one["kind"] == kind]
        is_over = run.get("run", {}).get("status") in ("ended", "failed")
        answer = run.get("answer", {})
        is_settled = is_over and answer.get("state") != "waiting" and (found or not kind)
        if is_settled or time.monotonic() > deadline:
            return answer, found[0] if found else {}
        time.sleep(0.5)


def _judged(promise: Promise, answer: dict[str, Any], said: dict[str, Any]) -> str:
    """Return "right", or what is not as the page says."""
    if not said:
        return f"no {promise.kind}"
    text = f"{said['what']} {answer['text']}"
    if promise.words.casefold() not in text.casefold():
        return f"not said: {promise.words}"
    if answer["state"] == "healthy" and not promise.is_note:
        return "called healthy"
    cost = said.get("cost_throughput_ratio")
    if promise.cost is not None and not abs((cost or 0.0) - promise.cost) <= POINTS:
        return f"the cost is {cost}"
    return RIGHT


def _losses_judged(lesson: Lesson, output: str) -> str:
    printed = {(rank, step): float(loss) for rank, step, loss in LINE.findall(output)}
    for rank, step, shown in lesson.losses:
        loss = printed.get((rank, step))
        if loss is None or abs(loss / float(shown) - 1) > LOSS_TENTH:
            return f"{rank}, step {step}: loss {loss}, the page shows {shown}"
    return RIGHT


def table(rows: list[dict[str, Any]]) -> list[str]:
    """Return the lines of a table by lesson."""
    lines = ["| lesson | as the page says | seconds | headline |", "|---|---|---|---|"]
    for row in rows:
        is_right = "yes" if row["judgement"] == RIGHT else row["judgement"].splitlines()[0]
        lines.append(f"| {row['lesson']} | {is_right} | {row['seconds']:.0f} | {row['answer']} |")
    return lines


def main() -> int:
    """Run what is missing, print the table, return the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--lessons", default="", help="only those whose name holds this")
    parser.add_argument("--label", default=code_label(), help="of the code (default: %(default)s)")
    parser.add_argument("--out", type=Path, default=RESULTS / "lessons.jsonl")
    parser.add_argument("--check", action="store_true", help="run nothing, compare with the pages")
    parser.add_argument("--table", action="store_true", help="run nothing")
    chosen = parser.parse_args()
    if chosen.check:
        found = problems()
        print("\n".join(found) or f"{len(list(lessons()))} commands, all with their lesson")
        return bool(found)
    wanted = {one.name: one for one in lessons() if chosen.lessons in one.name}
    rows = Rows(chosen.out, KEYS, chosen.label)
    missing = [] if chosen.table else rows.missing((name,) for name in wanted)
    if missing:
        with tempfile.TemporaryDirectory(prefix="rankscope-lessons-") as scratch:
            server = Server(Path(scratch))
            try:
                for number, (name,) in enumerate(missing):
                    lesson = wanted[name]
                    row = rows.add((name,), run_one(server, lesson, Path(scratch, f"run{number}")))
                    print(f"{name:<52} {row['judgement']}", flush=True)
            finally:
                server.close()
    made = [row for row in rows.all() or newest(chosen.out, KEYS) if row["lesson"] in wanted]
    print("\n".join(table(made)))
    is_whole = len(made) == len(wanted)
    return 0 if is_whole and all(row["judgement"] == RIGHT for row in made) else 1


if __name__ == "__main__":
    sys.exit(main())

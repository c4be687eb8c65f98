"""How long the demo watches, what it calls wrong, and what it says of its recording."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rankscope.cli.demo import _data_directory
from rankscope.demo.plan import draw
from rankscope.demo.processes import Api, Demo, DemoFailed
from rankscope.demo.result import Recording, recording, result
from rankscope.demo.watch import Watch

Answers = dict[str, Any]
RUNNING: Answers = {"run": {"status": "running", "step": 10}, "verdict": None, "answer": {}}
ENDED: Answers = {"run": {"status": "ended", "step": 260}, "verdict": None, "answer": {}}


class ScriptedApi(Api):
    """Answers by a table; the demo's own code asks it as it asks a server."""

    def __init__(self, answers: Callable[[str], Answers | None]) -> None:
        super().__init__("http://127.0.0.1:1")
        self._answers = answers

    def get(self, path: str) -> Answers | None:
        return self._answers(path)


class Scripted(Demo):
    """A demo whose processes are a script over the seconds that have passed."""

    def __init__(self, directory: Path, fault: str = "slow_compute") -> None:
        super().__init__(draw(fault, 4, "ddp", seed=1), directory, port=0)
        self.now = 0.0
        self.stopped = False
        self.ends = 20.0
        self.arrives_until = 0.0
        self.overview: Callable[[float], Answers | None] = lambda now: (
            ENDED if now > self.ends else RUNNING
        )
        self.api = ScriptedApi(self._answer)
        self.watch = Watch(self, True, lambda: self.now, self._sleep)

    def _sleep(self, seconds: float) -> None:
        self.now += seconds

    def _answer(self, path: str) -> Answers | None:
        overview = self.overview(self.now)
        return overview if path == f"runs/{self.run_id}" else overview and {}

    def training_ended(self) -> bool:
        return self.now >= self.ends

    def arriving(self) -> str:
        return "the collector was still sending" if self.now < self.arrives_until else ""

    def stop_training(self) -> None:
        self.stopped = True

    def last_words(self) -> str:
        return "no module named torch"

    def fire(self, fault: str, rank: int) -> None:
        self.manifest.parent.mkdir(parents=True, exist_ok=True)
        entry = {"fault": fault, "rank": rank, "start_step": 70, "start_time_ns": 10**9}
        self.manifest.write_text(json.dumps(entry) + "\n")

    def run(self) -> Answers:
        for _ in self.watch.views():
            pass
        return result(self, self.watch, Recording())


def named(kind: str, rank: int, status: str = "ended") -> Answers:
    verdict = dict.fromkeys(("onset_step", "cost_throughput_ratio", "what", "why", "next"))
    verdict |= {"kind": kind, "ranks": [rank], "severity": "warning"}
    return {"run": {"status": status, "step": 260}, "verdict": verdict, "answer": {}}


def test_it_waits_as_long_as_evidence_arrives(tmp_path: Path) -> None:
    demo = Scripted(tmp_path)
    demo.fire("slow_compute", 2)
    demo.arrives_until = 80.0
    demo.overview = lambda now: named("slow_compute", 2) if now > 79 else ENDED
    answer = demo.run()
    assert answer["match"]
    assert answer["not_judged"] == ""
    assert 83 < demo.now < 85  # the verdict has stood for three seconds


def test_what_still_changes_is_waited_for(tmp_path: Path) -> None:
    demo = Scripted(tmp_path)
    demo.fire("slow_compute", 2)
    demo.overview = lambda now: named("slow_data", 1 + int(now) // 2 % 2) if now < 60 else (
        named("slow_compute", 2)
    )  # fmt: skip
    assert demo.run()["match"]


def test_evidence_that_never_ends_is_not_called_wrong(tmp_path: Path) -> None:
    demo = Scripted(tmp_path)
    demo.fire("slow_compute", 2)
    demo.arrives_until = float("inf")
    answer = demo.run()
    assert not answer["match"]
    assert answer["not_judged"] == "the collector was still sending"
    assert 200 < demo.now < 202


def test_silence_after_everything_came_is_wrong(tmp_path: Path) -> None:
    demo = Scripted(tmp_path)
    demo.fire("slow_compute", 2)
    answer = demo.run()
    assert (answer["match"], answer["not_judged"]) == (False, "")
    assert demo.now < 25


def test_a_fault_that_never_began_is_not_judged(tmp_path: Path) -> None:
    answer = Scripted(tmp_path).run()
    assert not answer["match"]
    assert "never began" in answer["not_judged"]
    assert "training.log" in answer["not_judged"]


def test_a_clean_run_is_right_only_at_its_end(tmp_path: Path) -> None:
    demo = Scripted(tmp_path, "none")
    assert not result(demo, demo.watch, Recording())["match"]
    assert demo.run()["match"]


def test_a_hang_is_stopped_when_its_verdict_has_stood(tmp_path: Path) -> None:
    demo = Scripted(tmp_path, "hang")
    demo.fire("hang", 2)
    demo.ends = float("inf")
    demo.overview = lambda now: named("hang", 2, "stuck") if now > 60 else RUNNING
    assert demo.run()["match"]
    assert demo.stopped
    assert 63 < demo.now < 65


def test_a_run_that_neither_ends_nor_goes_on_ends_the_watch(tmp_path: Path) -> None:
    demo = Scripted(tmp_path, "hang")
    demo.fire("hang", 2)
    demo.ends = float("inf")
    answer = demo.run()
    assert (answer["match"], answer["not_judged"]) == (False, "")
    assert 300 < demo.now < 302


def test_a_training_that_the_server_never_heard_of_has_failed(tmp_path: Path) -> None:
    demo = Scripted(tmp_path)
    demo.ends = 2.0
    demo.overview = lambda now: None
    with pytest.raises(DemoFailed, match="no module named torch"):
        demo.run()


BUDGET = "recording took 0.8 % of the time, the budget is 0.5 % (RANKSCOPE_OVERHEAD_PERCENT)"
ASK = "`rankscope doctor` says more"


def source(text: str, *ranks: int, hook: str = "collectives") -> Answers:
    reason = text.removeprefix("skipped: ")
    is_skipped = reason != text
    return {"hook": hook, "ranks": list(ranks), "source": "" if is_skipped else text,
            "reason": reason if is_skipped else ""}  # fmt: skip


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        ([], Recording()),
        ([source("probe: C++ kernels", 0, 1)], Recording("probe")),
        (
            [source("kernels: Python", 0), source("skipped: no g++", 0, hook="collectives/probe")],
            Recording("kernels", f"probe costs the ranks least, but: no g++; {ASK}"),
        ),
        (
            [source(f"probe: one step in 2: {BUDGET}", 0), source("probe: C++ kernels", 1)],
            Recording("probe", thinned=f"one step in 2: {BUDGET}"),
        ),
        ([source(f"probe: everything is recorded, since step 9: {BUDGET}", 0)], Recording("probe")),
        (
            [source("probe: C++", 0), source("kernels: a", 3), source("kernels: b", 1)],
            Recording(
                "probe in ranks [0]; kernels in ranks [1, 3]", f"probe costs the ranks least; {ASK}"
            ),
        ),
        (
            [source("skipped: torch.distributed is not built in", 0)],
            Recording(
                "none, torch.distributed is not built in", f"probe costs the ranks least; {ASK}"
            ),
        ),
    ],
)
def test_it_says_how_collectives_were_recorded(rows: list[Answers], expected: Recording) -> None:
    assert recording(ScriptedApi(lambda _: {"sources": rows}), "run") == expected


def test_data_goes_to_a_folder_that_can_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    monkeypatch.delenv("XDG_DATA_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "a home"))
    assert _data_directory() == tmp_path / "a home" / ".local" / "share" / "rankscope"
    file = tmp_path / "file"
    file.touch()
    for home in ("", "relative", str(file)):
        monkeypatch.setenv("HOME", home)
        assert _data_directory().parent == tmp_path
    monkeypatch.delenv("HOME")
    monkeypatch.setattr(Path, "home", _no_home)
    assert _data_directory().parent == tmp_path


def _no_home() -> Path:
    raise RuntimeError("Could not determine home directory.")


@pytest.mark.multiproc
def test_it_works_beside_a_server_that_is_up(tmp_path: Path) -> None:
    plan = draw("none", 2, "ddp", seed=1)
    with Demo(plan, tmp_path, 0) as first:
        first.start_server()
        with Demo(plan, tmp_path, 0) as asked, pytest.raises(DemoFailed, match="in use"):
            asked.start_server()  # somebody named this directory
        with Demo(plan, tmp_path, 0, may_move=True) as second:
            second.start_server()
            assert second.directory == second.log_directory / "data"
            assert second.api.get("runs") == first.api.get("runs")

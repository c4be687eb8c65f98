"""An agent that is killed, stopped or interrupted while others run: what those say, and when."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import msgspec

from rankscope.preflight.model import LaunchVerdict
from tests.preflight.nslab import Lab
from tests.preflight.scene import Scene, base_environment
from tests.preflight.trial import ROOT

End = Literal["kill", "stop", "ctrl-c"]
SIGNALS: dict[End, signal.Signals] = {
    "kill": signal.SIGKILL, "stop": signal.SIGSTOP, "ctrl-c": signal.SIGINT,
}  # fmt: skip
LIMIT_S = 90.0  # above preflight's own 60 s for a node of which no other has heard


@dataclass(frozen=True)
class Death:
    """What became of the others."""

    end: End
    victim: str
    after_s: float  # since the victim's listener was up
    stage: str  # the last that the others heard of it
    took_s: float  # from then until the last of the others had answered
    exit_codes: tuple[int | None, ...]  # of the others
    named: tuple[tuple[str, ...], ...]  # by each of the others: "node.absent node1", ...
    left: tuple[str, ...]  # ports and processes that were there at the end

    @property
    def is_over(self) -> bool:
        """Return whether the victim had done its part: then nobody misses it."""
        return self.stage == "done"

    def wrong(self, most_s: float) -> list[str]:
        """Return what is wrong with it, one line each."""
        wanted, codes = ((), {0}) if self.is_over else ((f"node.absent {self.victim}",), {3})
        found = [f"{self.named} in place of {wanted}"] if set(self.named) != {wanted} else []
        found += [f"exit codes {self.exit_codes}"] if set(self.exit_codes) != codes else []
        found += [f"it took {self.took_s:.1f} s"] if self.took_s > most_s else []
        return found + [f"left behind: {self.left}"] * bool(self.left)


def die(end: End, victim: int, after_s: float, *, options: tuple[str, ...] = ()) -> Death:
    """End one of three agents `after_s` after it listens; return what the others made of it."""
    with Lab(base=base_environment()) as lab:
        scene = Scene(lab)
        nodes = ",".join(lab.names)
        agents: list[subprocess.Popen[str]] = []
        for number, name in enumerate(lab.names):
            document = str(scene.answers / f"{name}.json")
            command = [sys.executable, "-m", "rankscope", "preflight", "--nodes", nodes]
            environ = {**lab.environment(number), "PYTHONPATH": str(ROOT / "agent")}
            agents.append(
                scene.run_preflight(
                    number,
                    [*command, "--json", document, *options],
                    env=environ,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    errors="replace",
                )
            )
        try:
            _wait_for_listener(lab, victim, agents[victim])
            time.sleep(after_s)
            started = time.monotonic()
            lab.signal(agents[victim], SIGNALS[end])
            others = [agent for number, agent in enumerate(agents) if number != victim]
            for agent in others:
                agent.communicate(timeout=LIMIT_S)
            took_s = time.monotonic() - started
        finally:
            _end(lab, agents)
        names = [name for number, name in enumerate(lab.names) if number != victim]
        verdicts = [_verdict(scene.answers / f"{name}.json") for name in names]
        return Death(
            end=end, victim=lab.names[victim], after_s=after_s, took_s=took_s,
            stage=_stage(scene, names[0], lab.names[victim]),
            exit_codes=tuple(agent.returncode for agent in others),
            named=tuple(
                tuple(f"{f.id} {','.join(f.nodes)}" for f in verdict.findings)
                for verdict in verdicts
            ),
            left=tuple(line for number in range(3) for line in _left(lab, number)),
        )  # fmt: skip


def _wait_for_listener(lab: Lab, number: int, agent: subprocess.Popen[str]) -> None:
    while lab.run(number, "ss -ltn | grep -q :29500", check=False).returncode:
        assert agent.poll() is None, agent.communicate()[0]
        time.sleep(0.05)


def _end(lab: Lab, agents: list[subprocess.Popen[str]]) -> None:
    for agent in agents:
        if agent.poll() is None:
            lab.signal(agent, signal.SIGKILL)
            agent.send_signal(signal.SIGCONT)  # nsenter stops itself with what it waits for
            agent.communicate(timeout=LIMIT_S)


def _verdict(document: Path) -> LaunchVerdict:
    read = msgspec.json.decode(document.read_bytes())
    return msgspec.convert(read["verdict"], LaunchVerdict)


def _stage(scene: Scene, node: str, victim: str) -> str:
    read = msgspec.json.decode((scene.answers / f"{node}.json").read_bytes())
    reports = {report["node"]: report for report in read["reports"]}
    return str(reports.get(victim, {}).get("stage", "facts"))


def _left(lab: Lab, number: int, limit_s: float = 3.0) -> list[str]:
    """Return what is there after a moment: a child of a killed process is ended by the kernel."""
    deadline = time.monotonic() + limit_s
    while (left := _there(lab, number)) and time.monotonic() < deadline:
        time.sleep(0.1)
    return left


def _there(lab: Lab, number: int) -> list[str]:
    ports = lab.run(number, "ss -ltnu | tail -n +2").stdout.splitlines()
    names = lab.run(number, "cat /proc/[0-9]*/comm", check=False).stdout.split()  # some end now
    return ports + [name for name in names if name.startswith("python")]

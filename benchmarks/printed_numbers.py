"""Are steps, their times, throughput and the loss what a program itself prints, or named otherwise?

    python benchmarks/printed_numbers.py [--programs nanogpt,mingpt] [--seconds 45]

Programs of `tests/foreign/programs.py`, clean. The truth are their own lines and when they arrive:
which step a line is about, the time between two of them, the loss. Right is where

- a line about a step comes before the step behind it is over (the agent ends a step where the next
  begins, so what a script does after it counts to either);
- the recorded steps between two lines take as long as passed between these, within 2 % and the
  delay of a line;
- the headline's steps per second are those of the steps that it names, by the time they began;
- samples per second of a rank, times the step's time, are the samples that the script gives it;
- a rate that a line tells is that of the recorded steps since the line before it, within 2 %;
- the loss of the headline is among the newest that were printed, or is called the value of
  `backward()`.

Exit code 1 unless all are right.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from foreign import end, here, start
from real_ranks import Server

from tests.foreign import programs

MAX_TIME_ERROR = 0.02
NEWEST_LOSSES = 4
LOSS_SHARE = 1e-3  # as many digits as programs print
MOST_RATES = 20  # recorded ones that are looked at


@dataclass(frozen=True)
class Prints:
    """Lines about steps. `count` in a line means that count * each + done steps are done."""

    line: str
    done: int = 0
    each: int = 1
    samples: int = 0  # in a step of each rank, by its loader
    rated: int = 0  # what a step of all ranks adds to the `rate` in a line
    delay_ms: float = 20.0  # of a line on its way, at most


NUMBER = r"(?P<loss>\d+\.\d+(?:e-?\d+)?)"
PRINTS = {
    "nanogpt": Prints(rf"^iter (?P<count>\d+): loss {NUMBER}", done=1),
    "mingpt": Prints(
        rf"\[RANK\d\] Epoch 1 \| Iter (?P<count>\d+) \| Train Loss {NUMBER}", done=1, samples=16
    ),
    "tutorial": Prints(
        r"\[GPU0\] Epoch (?P<count>\d+) \| Batchsize: 32 \| Steps: 32", each=32, samples=32
    ),
    "tensor-parallel": Prints(r"Tensor Parallel iter (?P<count>\d+) completed", done=1),
    "trainer": Prints(rf"'loss': '?{NUMBER}.*'epoch'", samples=16),
    "small-gpt": Prints(rf"^iter (?P<count>\d+): loss {NUMBER}", done=1),
    "batchnorm": Prints(rf"^epoch (?P<count>\d+) loss {NUMBER}", done=32, each=32, samples=32),
    "batchnorm-4": Prints(rf"^epoch (?P<count>\d+) loss {NUMBER}", done=16, each=16, samples=32),
    "accumulate": Prints(rf"^step (?P<count>\d+): {NUMBER}"),
    "many-buckets": Prints(rf"^(?P<count>\d+) {NUMBER}$"),
    "accelerate": Prints(rf"^epoch \d+: {NUMBER}", samples=32),
    "two-networks": Prints(rf"^\[(?P<count>\d+)\] rank 0 G {NUMBER}", done=1),
    "validation": Prints(
        rf"^epoch (?P<count>\d+): train_loss {NUMBER}", done=32, each=32, samples=32
    ),
    "hooked-buckets": Prints(
        rf"^\[(?P<count>\d+)\] loss={NUMBER} tokens/s=(?P<rate>\d+\.\d)", rated=12 * 48 * 2
    ),
    "fsdp-one": Prints(rf"^step=(?P<count>\d+) loss={NUMBER}"),
    "one-tensor": Prints(rf"^update (?P<count>\d+) loss {NUMBER}"),
    "deepspeed": Prints(rf"^step (?P<count>\d+) loss {NUMBER}", samples=128),
    "ray-train": Prints(
        rf"epoch (?P<count>\d+) done: last loss {NUMBER}",
        done=16,
        each=16,
        samples=64,
        delay_ms=2_000.0,  # Ray reads what workers print from files, now and then
    ),
    "notebook": Prints(rf"^step (?P<count>\d+): loss {NUMBER}", samples=128),
}


@dataclass(frozen=True)
class Line:
    """One line of the program: when it came, after which step, with which loss and rate."""

    time_ms: float  # wall clock
    step: int | None
    loss: float | None
    rate: float | None = None


def run_one(name: str, seconds: float) -> list[str]:
    """Run a program and return what differs."""
    program, prints = programs.BY_NAME[name], PRINTS[name]
    with tempfile.TemporaryDirectory(prefix="rankscope-printed-") as scratch:
        folder = Path(scratch)
        server = Server(folder)
        try:
            process = start(program, "probe", server, folder, subprocess.PIPE)
            lines: list[Line] = []
            reader = threading.Thread(target=_read, args=(process, prints, lines), daemon=True)
            reader.start()
            time.sleep(seconds + program.start_s)
            end(process)
            reader.join(10)
            time.sleep(2.0)  # for what the collector sends last
            return _compare(server, prints, lines)
        finally:
            server.close()


def _read(process: subprocess.Popen[bytes], prints: Prints, lines: list[Line]) -> None:
    assert process.stdout is not None
    pattern = re.compile(prints.line)
    for raw in process.stdout:
        now_ms = time.time() * 1e3
        found = pattern.search(raw.decode(errors="replace").rstrip())
        if found is None:
            continue
        values = found.groupdict()
        step, loss, rate = (values.get(name) for name in ("count", "loss", "rate"))
        lines.append(
            Line(
                now_ms,
                int(step) * prints.each + prints.done if step is not None else None,
                float(loss) if loss is not None else None,
                float(rate) if rate is not None else None,
            )
        )


def _compare(server: Server, prints: Prints, lines: list[Line]) -> list[str]:
    if len(lines) < 3:
        return [f"only {len(lines)} lines: nothing to compare"]
    overview = server.get("runs/foreign")
    numbers = {one["key"]: one for one in overview["numbers"]}
    return [
        *_loss(numbers, lines),
        *_steps(server, lines, prints.delay_ms),
        *_throughput(server, numbers["throughput"], overview["run"]["step"]),
        *_samples(server, prints.samples),
        *_rates(server, prints.rated, lines),
    ]


def _loss(numbers: dict[str, Any], lines: list[Line]) -> list[str]:
    """Compare the headline with what was printed."""
    headline = numbers.get("loss")
    if headline is None:
        return ["no loss is shown"] if lines[-1].loss is not None else []
    printed = [line.loss for line in lines[-NEWEST_LOSSES:] if line.loss is not None]
    value, source = headline["value"], headline["reference_text"]
    print(f"  loss {value} ({source}); printed {printed}", flush=True)
    is_equal = any(abs(value - one) <= LOSS_SHARE * abs(one) for one in printed)
    is_other = "backward()" in source
    return [] if is_equal or is_other else [f"loss {value} ({source}) is not in {printed}"]


def _steps(server: Server, lines: list[Line], delay_ms: float) -> list[str]:
    """Compare number and time of the steps between the first line and the last but one."""
    known = [(line.time_ms, line.step) for line in lines if line.step]
    while known and _cell(server, known[0][1]).get("step_ms") is None:
        del known[0]  # where no optimizer steps, what is a step is known after a while
    if len(known) < 3:
        return []
    (first_ms, first), (last_ms, last) = known[0], known[-2]
    took = 0.0
    wrong = []
    for step in range(first + 1, last + 1):
        took += _step_ms(server, step)
    for time_ms, step in (known[0], known[-2]):
        began, follows = _cell(server, step), _cell(server, step + 1)
        until_ms = follows["time_ms"] + follows["step_ms"] + delay_ms
        if not began["time_ms"] <= time_ms <= until_ms:
            wrong.append(f"the line about step {step} came {time_ms - began['time_ms']:.0f} ms "
                         f"after it began, which took {began['step_ms']:.0f} ms")  # fmt: skip
    passed = last_ms - first_ms
    print(f"  steps {first + 1} to {last}: {took:,.0f} ms recorded, {passed:,.0f} ms by its lines "
          f"({took / passed - 1:+.2%})", flush=True)  # fmt: skip
    if abs(took - passed) > MAX_TIME_ERROR * passed + delay_ms:
        wrong.append(f"{took:.0f} ms are recorded where {passed:.0f} ms passed")
    return wrong


def _throughput(server: Server, headline: dict[str, Any], last: int) -> list[str]:
    """Compare the steps per second of the headline with the begins of the steps that it names."""
    named = re.match(r"last (\d+) steps", headline["reference_text"])
    if named is None or headline["value"] is None:
        return ["the headline names no throughput"]
    first = last - int(named[1]) + 1
    while _cell(server, last).get("time_ms") is None:
        last -= 1  # it had only begun
    seconds = (_cell(server, last)["time_ms"] - _cell(server, first)["time_ms"]) / 1e3
    value, truth = headline["value"], (last - first) / seconds
    print(f"  {value:.3f} steps/s in the headline, {truth:.3f} by its steps", flush=True)
    is_right = abs(value / truth - 1) <= MAX_TIME_ERROR
    return [] if is_right else [f"{value:.3f} steps/s where there were {truth:.3f}"]


def _samples(server: Server, samples: int) -> list[str]:
    """Compare recorded samples per second with what the script gives a rank in each step."""
    if not samples:
        return []
    found = server.get(f"runs/foreign/metrics?names=samples_per_second&rank=0&width={MOST_RATES}")
    series = found["series"]
    if not series:
        return [f"no samples per second; its script takes {samples} in a step"]
    counts = [
        rate * _step_ms(server, step) / 1e3
        for step, rate in zip(series[0]["step"], series[0]["value"], strict=True)
    ]
    print(f"  {min(counts):.2f} to {max(counts):.2f} samples in a step, by rate and time; "
          f"{samples} by its script", flush=True)  # fmt: skip
    wrong = [count for count in counts if abs(count / samples - 1) > MAX_TIME_ERROR]
    return [f"{wrong[0]:.2f} samples in a step, not {samples}"] if wrong else []


def _rates(server: Server, rated: int, lines: list[Line]) -> list[str]:
    """Compare the rate that each of the newest lines tells with its recorded steps."""
    wrong = []
    for before, line in zip(lines[-4:-2], lines[-3:-1], strict=True) if rated else ():
        assert line.rate
        steps = range((before.step or 0) + 1, (line.step or 0) + 1)
        took_ms = sum(_step_ms(server, step) for step in steps)
        recorded = rated * len(steps) / took_ms * 1e3
        print(f"  {line.rate} a second by its line, {recorded:.1f} by its steps", flush=True)
        if abs(recorded / line.rate - 1) > MAX_TIME_ERROR:
            wrong.append(f"{recorded:.1f} a second, and its line says {line.rate}")
    return wrong


def _cell(server: Server, step: int) -> dict[str, Any]:
    return server.get(f"runs/foreign/cell?rank=0&step={step}")


def _step_ms(server: Server, step: int) -> float:
    took_ms = _cell(server, step).get("step_ms")
    if took_ms is None:
        raise SystemExit(f"step {step} of rank 0 is not recorded")
    return float(took_ms)


def main() -> int:
    """Run the programs, print what differs, return the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--programs", default=",".join(PRINTS), help="with commas between")
    parser.add_argument("--seconds", type=float, default=45.0, help="of each run")
    chosen = parser.parse_args()
    num_wrong = 0
    for name in here(chosen.programs.split(",")):
        print(name, flush=True)
        wrong = run_one(name, chosen.seconds)
        num_wrong += bool(wrong)
        print(f"  {'; '.join(wrong) or 'right'}", flush=True)
    return 1 if num_wrong else 0


if __name__ == "__main__":
    sys.exit(main())

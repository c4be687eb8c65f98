"""How fast `rankscope explain` reads a large log, and in how much memory.

    python benchmarks/explain.py                         # 1 GB, as published in docs/explain.md
    python benchmarks/explain.py --megabytes 50 --json

The log is generated: ranks of 1 to 4 digits, progress lines of a training loop, NCCL's INFO lines,
tracebacks between the lines of other ranks, and one cause with its echoes. Beside the whole command
the sieve alone is timed with each library that is installed, on the same bytes: google-re2,
hyperscan, ahocorasick_rs, pyahocorasick, and the standard library.
"""

from __future__ import annotations

import argparse
import importlib
import json
import random
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from rankscope_server.known_errors.load import known_errors
from rankscope_server.known_errors.prefilter import _EachText, _OnePass
from rankscope_server.known_errors.reading import _SIGNS

RANKS = 4096
CULPRIT = 1234
SIEVE_BYTES = 32 << 20
_RUN = """
import resource, sys, time
from rankscope.cli import main
start = time.perf_counter()
code = main(["explain", "--json", sys.argv[1]])
seconds = time.perf_counter() - start
cpu = time.process_time()
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
sys.stderr.write(f"{code} {seconds} {cpu} {peak}\\n")
"""


def lines(chance: random.Random, count: int, dense: bool) -> Iterator[str]:
    """Return lines of a healthy run, with what a log of NCCL_DEBUG=INFO adds."""
    for number in range(count):
        rank = chance.randrange(RANKS)
        who = f"[rank{rank}]: "
        nccl = f"{who}node{rank // 8}:4242:4243 [{rank % 8}] NCCL INFO "
        step = number // RANKS
        kind = chance.random()
        if kind < 0.02:
            yield f"{nccl}Channel 00/0 : {rank}[{rank % 8}] -> {rank + 1}[0] via P2P/CUMEM"
        elif kind < (0.3 if dense else 0.0205):
            yield f"{nccl}NET/Plugin: No plugin found (libnccl-net.so)"
        else:
            yield (
                f"{who}2026-05-01 12:{step % 60:02d}:{number % 60:02d} INFO train: step {step} "
                f"loss {2 + chance.random():.4f} grad_norm {chance.random():.3f} lr 3.0e-04 "
                f"tokens/s {chance.randrange(9000, 9999)} mem {chance.randrange(60, 70)}.1GiB"
            )


def write_log(path: Path, num_bytes: int, dense: bool) -> int:
    """Write a log of about that size with one failure at nine tenths of it."""
    chance = random.Random(7)
    block = "\n".join(lines(chance, 40_000, dense)) + "\n"
    written = 0
    with path.open("w") as file:
        while written < num_bytes:
            written += file.write(block)
            if written >= 0.9 * num_bytes and CULPRIT:
                written += _write_failure(file, chance)
                while written < num_bytes:
                    written += file.write(block)
    return path.stat().st_size


def _write_failure(file: Any, chance: random.Random) -> int:
    """Write the culprit's traceback between lines of other ranks, then the echoes of all."""
    trace = [
        "Traceback (most recent call last):",
        '  File "/work/train.py", line 88, in <module>',
        "    main()",
        '  File "/work/train.py", line 61, in main',
        "    batch = next(loader)",
        "OSError: [Errno 28] No space left on device: '/scratch/cache/17.bin'",
    ]
    size = 0
    for line in trace:
        size += file.write(f"[rank{CULPRIT}]: {line}\n")
        size += file.write(f"[rank{chance.randrange(RANKS)}]: still training\n")
    for rank in range(RANKS):
        if rank != CULPRIT:
            size += file.write(
                f"[rank{rank}]: RuntimeError: [/pytorch/third_party/gloo/gloo/transport/tcp/"
                f"pair.cc:534] Connection closed by peer [10.0.0.{rank % 250}]:{20_000 + rank}\n"
            )
    return size


def run_command(path: Path) -> dict[str, Any]:
    """Run the whole command on a file in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-c", _RUN, str(path)], capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise SystemExit(done.stderr)
    code, seconds, cpu, peak = done.stderr.split()[-4:]
    answer = json.loads(done.stdout)
    size = path.stat().st_size
    echoes = [one for one in answer["findings"] if one["role"] == "cascade"]
    assert (code, answer["root"]["family"], answer["root"]["ranks"]) == (
        "1",
        "disk_full",
        [CULPRIT],
    )
    assert len(echoes) == 1, "one line of 4,095 ranks is one row"
    assert echoes[0]["count"] == RANKS - 1
    return {
        "bytes": size,
        "seconds": float(seconds),
        "cpu_seconds": float(cpu),  # with start and imports: what a busy machine does not change
        "megabytes_per_second": size / 1e6 / float(seconds),
        "peak_mebibytes": int(peak) / 1024,
    }


def time_sieves(block: bytes) -> dict[str, float]:
    """Return the MB/s of each library that is installed, on the same bytes and texts."""
    texts = sorted({*known_errors().literals, *_SIGNS})
    out = {}
    for name, make in (
        ("google-re2", _re2), ("hyperscan", _hyperscan), ("ahocorasick_rs", _ahocorasick_rs),
        ("pyahocorasick", _pyahocorasick), ("str.find of each", _each),
        ("re, one alternation", _re),
    ):  # fmt: skip
        try:
            search = make(texts)
        except ModuleNotFoundError:
            continue
        part = block[: (1 << 20)] if name.startswith("re,") else block
        start = time.perf_counter()
        search(part)
        out[name] = len(part) / 1e6 / (time.perf_counter() - start)
    return out


def _re2(texts: list[str]) -> Callable[[bytes], object]:
    importlib.import_module("re2")
    sieve = _OnePass(texts)
    return lambda block: sum(1 for _ in sieve.lines(block))


def _each(texts: list[str]) -> Callable[[bytes], object]:
    sieve = _EachText(texts)
    return lambda block: sum(1 for _ in sieve.lines(block))


def _re(texts: list[str]) -> Callable[[bytes], object]:
    pattern = re.compile("|".join(map(re.escape, texts)).encode())
    return lambda block: sum(1 for _ in pattern.finditer(block.lower()))


def _hyperscan(texts: list[str]) -> Callable[[bytes], object]:
    hyperscan: Any = importlib.import_module("hyperscan")
    database = hyperscan.Database(mode=hyperscan.HS_MODE_BLOCK)
    database.compile(
        expressions=[re.escape(text).encode() for text in texts],
        ids=list(range(len(texts))),
        flags=[hyperscan.HS_FLAG_CASELESS] * len(texts),
    )
    return lambda block: database.scan(block, match_event_handler=lambda *found: None)


def _ahocorasick_rs(texts: list[str]) -> Callable[[bytes], object]:
    library: Any = importlib.import_module("ahocorasick_rs")
    automaton = library.BytesAhoCorasick([text.encode() for text in texts])
    return lambda block: automaton.find_matches_as_indexes(block.lower())


def _pyahocorasick(texts: list[str]) -> Callable[[bytes], object]:
    library: Any = importlib.import_module("ahocorasick")
    automaton = library.Automaton()
    for number, text in enumerate(texts):
        automaton.add_word(text, number)
    automaton.make_automaton()
    return lambda block: sum(1 for _ in automaton.iter(block.lower().decode("latin-1")))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--megabytes", type=int, default=1000)
    parser.add_argument("--dense", action="store_true", help="every fourth line is a known one")
    parser.add_argument("--sieves", action="store_true", help="time the libraries too")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "train.log"
        write_log(path, arguments.megabytes * 1_000_000, arguments.dense)
        result: dict[str, Any] = run_command(path)
        if arguments.sieves:
            with path.open("rb") as file:
                result["sieves"] = time_sieves(file.read(SIEVE_BYTES))
    if arguments.json:
        print(json.dumps(result))
        return
    print(
        f"{result['bytes'] / 1e6:,.0f} MB in {result['seconds']:.1f} s "
        f"({result['cpu_seconds']:.1f} s of CPU): "
        f"{result['megabytes_per_second']:.0f} MB/s, peak {result['peak_mebibytes']:.0f} MiB"
    )
    for name, speed in result.get("sieves", {}).items():
        print(f"  {name:20s} {speed:8.1f} MB/s")


if __name__ == "__main__":
    main()

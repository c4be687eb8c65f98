"""The sources that ask NVML, against a shared library with known answers, and against a GPU."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rankscope.node.sources.gpu import GpuHealthSource, GpuSource
from rankscope.node.sources.machine import Machine
from rankscope.wire import schema
from rankscope.wire.nvidia_codes import THROTTLE_WORDS, throttle_words, xid_words
from rankscope.wire.sample_columns import SAMPLE_COLUMNS
from tests.agent.collector import processes
from tests.agent.collector.fake_nvml import build
from tests.agent.collector.processes import ensure, start_rank, stop, wait_for
from tests.agent.collector.receiver import Receiver

HERE = Path(__file__).parent
MIB = 1 << 20


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("nvml"))


def sampled(library: Path, **environment: str) -> dict[str, Any]:
    """Return what nvml_program.py prints, in a process that loads the library."""
    environ = os.environ | {"LD_LIBRARY_PATH": str(library), "FAKE_NVML_PID": "4711"} | environment
    done = subprocess.run(
        [sys.executable, "-W", "error", str(HERE / "nvml_program.py")],
        env=environ, capture_output=True, text=True, check=False, timeout=60,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.fixture(scope="session")
def found(library: Path) -> dict[str, Any]:
    return sampled(library)


def test_a_gpu_that_tells_everything(found: dict[str, Any]) -> None:
    row = found["gpu"][0]
    row.pop("pcie_sent_bytes_total", None)  # a pynvml before 12.555 has no name for them
    row.pop("pcie_received_bytes_total", None)
    assert row == {
        "gpu": 0, "utilization_ratio": 0.5, "memory_utilization_ratio": 0.25,
        "memory_used_bytes": 5, "memory_total_bytes": 80, "sm_clock_mhz": 1755,
        "memory_clock_mhz": 2619, "power_watts": 350.5, "energy_mj_total": 123456,
        "temperature_celsius": 61, "memory_temperature_celsius": 72, "throttle_reasons": 0x44,
        "performance_state": 0,
    }  # fmt: skip


def test_what_a_gpu_does_not_tell_is_left_out_and_never_zero(found: dict[str, Any]) -> None:
    row = found["gpu"][1]
    assert row["sm_clock_mhz"] == 1755
    assert not {"power_watts", "energy_mj_total", "memory_temperature_celsius"} & row.keys()
    health = found["gpu-health"][1]
    assert not {"ecc_uncorrected", "remap_pending", "power_limit_watts"} & health.keys()
    assert [one["gpu"] for one in found["gpu-activity"]] == [0]


def test_health(found: dict[str, Any]) -> None:
    new, old = found["gpu-health"]
    told = {name: value for name, value in new.items() if name in SAMPLE_COLUMNS["gpu_health"]}
    assert told == {
        "gpu": 0, "sm_clock_max_mhz": 1980, "memory_clock_max_mhz": 2700,
        "power_limit_watts": 700.0, "ecc_corrected": 1, "ecc_uncorrected": 2,
        "ecc_lifetime_corrected": 11, "ecc_lifetime_uncorrected": 12, "remapped_corrected": 3,
        "remapped_uncorrected": 1, "remap_pending": 1, "remap_failed": 0, "retire_pending": 0,
        "pcie_replays_total": 4, "pcie_generation": 4, "pcie_generation_max": 5,
        "pcie_width": 8, "pcie_width_max": 16,
    }  # fmt: skip
    assert (old["retired_single_bit"], old["retired_double_bit"]) == (2, 1)


def test_activity_is_of_the_time_between_two_samples(found: dict[str, Any]) -> None:
    (row,) = found["gpu-activity"]  # the library refuses samples in the wrong order
    assert row["tensor_ratio"] == pytest.approx(0.05)
    assert row["sm_ratio"] == pytest.approx(0.02)
    assert row["pcie_sent_bytes_per_second"] == 20 * MIB
    assert row["nvlink_received_bytes_per_second"] == 60 * MIB
    assert "fp16_ratio" not in row


def test_links(found: dict[str, Any]) -> None:
    assert found["nvlink"] == [
        {
            "gpu": 0, "link": link, "is_up": int(link == 0),
            "sent_bytes_total": (1000 + link) << 10,
            "received_bytes_total": (2000 + link) << 10, "speed_bytes_per_second": 26_562_000_000,
            "replay_errors_total": 7, "crc_errors_total": 102, "recovery_errors_total": 101,
        }
        for link in range(2)
    ]  # fmt: skip


def test_processes_are_mapped_to_ranks(found: dict[str, Any]) -> None:
    assert found["gpu-process"] == [
        {"gpu": 0, "pid": 4711, "rank": 5, "memory_bytes": 4096},
        {"gpu": 0, "pid": 1, "rank": -1, "memory_bytes": 8192},
    ]


def test_events_of_the_driver_are_told_once(found: dict[str, Any]) -> None:
    gpus, *others = found["news"]
    assert gpus[2]["driver"] == "570.86.15"
    assert gpus[2]["1.bus_id"] == "00000000:2B:00.0"
    meaning = "GPU has fallen off the bus"
    assert others == [
        ["xid", -1, {"seen_in": "NVML", "gpu": "1", "number": "79", "meaning": meaning}],
        ["gpu ecc error", -1, {"seen_in": "NVML", "gpu": "0", "kind": "uncorrectable"}],
    ]
    assert found["index"] == 1  # the kernel's address of a GPU finds it


def test_a_lost_gpu_is_told_and_the_other_goes_on(library: Path) -> None:
    found = sampled(library, FAKE_NVML_LOST="1")
    assert found["gpu"][0]["power_watts"] == 350.5
    assert found["gpu"][1] == {"gpu": 1}
    names = [name for name, _, _ in found["news"]]
    assert names.count("gpu does not answer") == 1


def test_no_driver_is_skipped_with_the_reason(library: Path) -> None:
    found = sampled(library, FAKE_NVML_NO_DRIVER="1")
    states = {name: state for name, state in found.items() if name not in ("news", "index")}
    assert set(states.values()) == {"skipped: NVML: Driver Not Loaded"}
    assert len(states) == 6


def test_every_row_holds_only_columns_of_its_kind(found: dict[str, Any]) -> None:
    for name, rows in found.items():
        kind = name.replace("-", "_")
        for row in rows if kind in SAMPLE_COLUMNS else ():
            assert row.keys() <= set(SAMPLE_COLUMNS[kind])


def test_samples_arrive_from_a_real_collector(
    run: Path, receiver: Receiver, library: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LD_LIBRARY_PATH", str(library))
    monkeypatch.setenv("FAKE_NVML_PID", "4711")
    rank = start_rank(run, 3, 800, 200)
    wait_for(lambda: len(list(run.glob("0/*/steps.ring"))) == 1)
    assert ensure(run, server=receiver.url)
    assert rank.wait(30) == 0
    stop(rank)
    wait_for(lambda: len(receiver.records(schema.RankEnded)) == 1)
    # an end sends at once what waited for more: nothing is lost with a node that goes away
    rows = receiver.rows("gpu", "gpu", "power_watts", "throttle_reasons")
    assert {row[1:] for row in rows} == {(0, 350.5, 0x44), (1, -1.0, 0x44)}
    assert {row[1:] for row in receiver.rows("process", "rank", "pid")} == {(3, rank.pid)}
    events = {event.name: event.fields for event in receiver.records(schema.Event)}
    assert events["machine sources"]["source.gpu"] == "works"
    assert events["gpus"]["0.name"] == "NVIDIA H100 80GB HBM3"
    assert events["xid"]["number"] == "79"
    assert events["xid"]["host"] == events["gpus"]["host"] != ""
    wait_for(lambda: not processes.is_alive(processes.collector_pid(run)))


def test_reasons_and_errors_in_words() -> None:
    assert throttle_words(0x44) == ["power cap (software)", "thermal slowdown (hardware)"]
    assert throttle_words(0x1) == ["idle"]
    assert throttle_words(0x1 << 20) == ["0x100000"]
    assert throttle_words(0) == []
    assert xid_words(79) == "GPU has fallen off the bus"
    assert xid_words(9999) == ""
    pynvml = pytest.importorskip("pynvml")
    known = {
        value
        for name, value in vars(pynvml).items()
        if name.startswith(("nvmlClocksEventReason", "nvmlClocksThrottleReason"))
        and isinstance(value, int)
        and value.bit_count() == 1
    }
    assert known == set(THROTTLE_WORDS)


@pytest.mark.gpu
def test_fields_agree_with_nvidia_smi() -> None:
    """Each field within what it can change between two questions."""
    names = (
        "memory.total", "memory.used", "clocks.max.sm", "clocks.max.memory", "power.limit",
        "temperature.gpu", "pcie.link.gen.max", "pcie.link.width.max", "uuid",
        "ecc.errors.uncorrected.volatile.total",
    )  # fmt: skip
    if shutil.which("nvidia-smi") is None:
        pytest.skip("no nvidia-smi: nothing to compare with")
    text = subprocess.run(
        ["nvidia-smi", f"--query-gpu={','.join(names)}", "--format=csv,noheader,nounits"],
        capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    machine = Machine()
    sources = GpuSource(machine), GpuHealthSource(machine)
    for source in sources:
        source.open()
    rows = [list(source.sample()) for source in sources]
    lines = [line.split(", ") for line in text.strip().splitlines()]
    assert len(lines) == len(rows[0])
    columns = {
        "memory.total": ("memory_total_bytes", MIB, MIB),
        "memory.used": ("memory_used_bytes", MIB, 2048 * MIB),  # less what the driver reserves
        "clocks.max.sm": ("sm_clock_max_mhz", 1, 0),
        "clocks.max.memory": ("memory_clock_max_mhz", 1, 0),
        "power.limit": ("power_limit_watts", 1, 1),
        "temperature.gpu": ("temperature_celsius", 1, 3),
        "pcie.link.gen.max": ("pcie_generation_max", 1, 0),
        "pcie.link.width.max": ("pcie_width_max", 1, 0),
        "ecc.errors.uncorrected.volatile.total": ("ecc_uncorrected", 1, 0),
    }
    for gpu, line, *told in zip(machine.nvml.gpus, lines, *rows, strict=True):
        smi = dict(zip(names, line, strict=True))
        assert gpu.uuid == smi["uuid"]
        ours = {**told[0], **told[1]}
        for name, (column, factor, margin) in columns.items():
            if smi[name].startswith("["):  # "[N/A]", "[Not Supported]"
                assert column not in ours, name
            else:
                expected = float(smi[name]) * factor
                assert float(ours[column]) == pytest.approx(expected, abs=margin), name

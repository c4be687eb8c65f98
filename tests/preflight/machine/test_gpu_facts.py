"""GPUs through the real child, NVML played from a recording; the real NVML where there is one."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import msgspec
import pynvml
import pytest

from rankscope.preflight.checks import FAMILIES
from rankscope.preflight.checks.base import Run
from rankscope.preflight.facts import child, gpu
from rankscope.preflight.facts.gpu import burn
from rankscope.preflight.facts.gpu_child import VARIABLE
from rankscope.preflight.facts.gpu_host import collect as collect_host
from rankscope.preflight.model import Facts, NodeReport
from rankscope.preflight.options import Options
from rankscope.preflight.system import Done, System
from tests.agent.collector.fake_nvml import build

DATA = Path(__file__).parents[1] / "data"
HEALTHY = DATA / "nvml_h100_x8.json"
UNCORRECTED = (
    f"nvmlDeviceGetTotalEccErrors({pynvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED},"
    f"{pynvml.NVML_VOLATILE_ECC})"
)
RECOVERY = str(pynvml.NVML_FI_DEV_GET_GPU_RECOVERY_ACTION)
SICK: list[tuple[str, dict[str, Any], str, str]] = [
    # id, answers of GPU 3, status, words of the title
    ("gpu.ecc", {UNCORRECTED: 2}, "fail", "GPU 3: 2 uncorrected"),
    ("gpu.ecc", {"nvmlDeviceGetRemappedRows": [0, 1, 1, 0]}, "fail", "waits for a reset"),
    ("gpu.ecc", {"nvmlDeviceGetRemappedRows": [0, 1, 0, 1]}, "fail", "remapping"),
    ("gpu.recovery", {"nvmlDeviceGetFieldValues": {RECOVERY: 2}}, "fail", "node reboot"),
    ("gpu.recovery", {"nvmlDeviceGetMemoryInfo": {"error": "GPU_IS_LOST"}}, "fail", "GPU is lost"),
    ("gpu.recovery", {"nvmlDeviceGetEccMode": {"error": "UNKNOWN"}}, "fail", "Unknown Error"),
    ("gpu.count", {"nvmlDeviceGetHandleByIndex": {"error": "GPU_IS_LOST"}}, "fail", "GPU 3"),
    ("gpu.clock", {"nvmlDeviceGetCurrentClocksEventReasons": 0x48}, "fail", "held down"),
    ("gpu.clock", {"nvmlDeviceGetPersistenceMode": 0}, "warn", "persistence mode is off"),
    ("gpu.clock", {"nvmlDeviceGetMigMode": [1, 1]}, "warn", "MIG is on"),
    ("gpu.clock", {"nvmlDeviceGetComputeMode": 3}, "warn", "exclusive process"),
    ("gpu.pcie", {"nvmlDeviceGetCurrPcieLinkWidth": 8}, "warn", "x8 of x16"),
    ("gpu.nvlink", {"nvmlDeviceGetNvLinkState(4)": 0}, "fail", "17 of 18"),
    (
        "gpu.nvlink",
        {f"nvmlDeviceGetNvLinkErrorCounter(4,{pynvml.NVML_NVLINK_ERROR_DL_RECOVERY})": 1},
        "warn",
        "NVLink 4",
    ),
    ("gpu.nvlink", {"nvmlDeviceGetGpuFabricInfoV": {"state": 2}}, "fail", "in progress"),
    (
        "gpu.nvlink",
        {"nvmlDeviceGetGpuFabricInfoV": {"state": 3, "status": 999}},
        "fail",
        "NVML error 999",
    ),
    ("gpu.p2p", {f"nvmlDeviceGetP2PStatus(5,{pynvml.NVML_P2P_CAPS_INDEX_NVLINK})": 0}, "", ""),
    ("gpu.p2p", {"nvmlDeviceGetP2PStatus": 3}, "warn", "topology"),
]
SILENT = ["NOT_SUPPORTED", "FUNCTION_NOT_FOUND", "NO_PERMISSION"]


class Quiet(System):
    """This machine without the log of its kernel: what stands there is of another."""

    def run(self, argv: Any, limit_s: float = 5.0) -> Done:
        is_log = argv[0] in ("journalctl", "dmesg")
        return Done(0) if is_log else super().run(argv, limit_s)


def played(path: Path, tmp_path: Path, **environ: str) -> gpu.GpuFacts:
    system = Quiet(root=tmp_path, environ={VARIABLE: str(path), **environ})
    return gpu.collect(system, Options())


def sick(tmp_path: Path, answers: dict[str, Any], system: dict[str, Any] | None = None) -> Path:
    told = json.loads(HEALTHY.read_text())
    told["gpus"][3] |= answers
    told["system"] |= system or {}
    path = tmp_path / "nvml.json"
    path.write_text(json.dumps(told))
    return path


def run_of(facts: gpu.GpuFacts) -> Run:
    report = NodeReport(node="node0", facts=Facts(gpu=facts))
    return Run("r", ("node0",), {"node0": report}, Options(backend="nccl"))


def loud(facts: gpu.GpuFacts) -> dict[str, tuple[str, str]]:
    found = [f for check in FAMILIES["gpu"] for f in check.evaluate(run_of(facts))]
    return {f.id: (f.status, f.title) for f in found if f.status in ("warn", "fail")}


def test_a_healthy_node_of_eight(tmp_path: Path) -> None:
    facts = played(HEALTHY, tmp_path)
    assert facts.num_gpus == facts.count == 8
    assert facts.recording == str(HEALTHY)
    assert (facts.driver, facts.cuda_driver) == ("570.86.15", "12.8")
    one = facts.gpus[3]
    assert (one.index, one.bus_id, one.name) == (3, "00000000:61:00.0", "NVIDIA H100 80GB HBM3")
    assert one.errors == {}
    assert len(one.links) == 18
    assert one.fabric_state == "completed"
    assert one.recovery_action == "none"
    assert one.numa_node is None  # not supported is left out
    assert len(facts.pairs) == 28
    assert loud(facts) == {}


@pytest.mark.parametrize(
    ("id", "answers", "status", "words"), SICK, ids=[f"{row[0]}-{row[3]}" for row in SICK]
)
def test_one_sick_gpu_is_one_finding(
    tmp_path: Path, id: str, answers: dict[str, Any], status: str, words: str
) -> None:
    found = loud(played(sick(tmp_path, answers), tmp_path))
    if not status:
        assert found == {}
        return
    assert list(found) == [id]
    assert found[id][0] == status
    assert words in found[id][1]


@pytest.mark.parametrize("error", SILENT)
def test_what_a_driver_does_not_support_is_no_failure(tmp_path: Path, error: str) -> None:
    names = [name for name in json.loads(HEALTHY.read_text())["gpus"][0] if "(" not in name]
    silent = {n: {"error": error} for n in names if n != "nvmlDeviceGetFieldValues"}
    facts = played(sick(tmp_path, silent | {"nvmlDeviceGetFieldValues": {}}), tmp_path)
    assert facts.gpus[3].errors == {}
    assert facts.gpus[3].memory_used_bytes is None
    assert loud(facts) == {}


def test_a_stale_process_is_told_with_its_pid(tmp_path: Path) -> None:
    found = loud(played(DATA / "nvml_stale_process.json", tmp_path))
    assert list(found) == ["gpu.busy"]
    assert found["gpu.busy"][1].startswith("node0: GPU 0: 60.5 GiB held by pid 4194303")


def test_two_healthy_gpus_of_the_laboratory(tmp_path: Path) -> None:
    facts = played(DATA / "nvml_two_healthy.json", tmp_path)
    assert facts.num_gpus == 2
    assert loud(facts) == {}


@pytest.mark.parametrize("error", ["LIB_RM_VERSION_MISMATCH", "UNKNOWN"])
def test_a_driver_that_cannot_start_is_a_problem(tmp_path: Path, error: str) -> None:
    facts = played(sick(tmp_path, {}, {"nvmlInit": {"error": error}}), tmp_path)
    assert facts.num_gpus == 0
    assert facts.problem.startswith("NVML: ")
    assert loud(facts)["gpu.count"][0] == "fail"


def test_no_driver_is_an_absence(tmp_path: Path) -> None:
    facts = played(sick(tmp_path, {}, {"nvmlInit": {"error": "DRIVER_NOT_LOADED"}}), tmp_path)
    assert facts.problem == ""
    assert "Driver Not Loaded" in facts.absence


@pytest.mark.parametrize(
    ("visible", "number", "invisible"),
    [
        ("0,1,2", 3, ""), ("", 0, ""), ("-1", 0, ""), ("0,9,1", 1, "9"), ("nine", 0, "nine"),
        ("GPU-00000003,0", 2, ""), ("GPU-deadbeef", 0, "GPU-deadbeef"), ("MIG-1/2,MIG-3", 2, ""),
        ("NoDevFiles", 0, ""), (" 1 , 2 ", 2, ""),
    ],
)  # fmt: skip
def test_visible_gpus_are_counted_as_cuda_does(
    tmp_path: Path, visible: str, number: int, invisible: str
) -> None:
    facts = played(HEALTHY, tmp_path, CUDA_VISIBLE_DEVICES=visible)
    assert (facts.num_gpus, facts.invisible) == (number, invisible)
    assert facts.count == 8


def test_a_driver_that_hangs_is_left_behind() -> None:
    class Hung(System):
        def run(self, argv: Any, limit_s: float = 5.0) -> Done:
            hangs = ["sh", "-c", "echo started; sleep 60"]
            return super().run(hangs if "gpu_child" in argv[-1] else argv, 1.0)

    facts = gpu.collect(Hung(), Options())
    assert facts.problem == "NVML: no answer in 5 s"


def test_a_machine_that_is_too_busy_to_ask_accuses_no_driver() -> None:
    class Busy(System):
        def run(self, argv: Any, limit_s: float = 5.0) -> Done:
            return super().run(["sleep", "60"], 0.2)

    with pytest.raises(child.NotKnown, match=r"no answer in 0\.2 s"):
        gpu.collect(Busy(), Options())


def test_the_kernel_side_is_read_from_a_recorded_tree(tmp_path: Path) -> None:
    def put(path: str, text: str | bytes) -> None:
        file = tmp_path / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(text.encode() if isinstance(text, str) else text)

    pci = "sys/bus/pci/devices"
    put(f"{pci}/0000:1b:00.0/vendor", "0x10de\n")
    put(f"{pci}/0000:1b:00.0/class", "0x030200\n")
    put(f"{pci}/0000:1b:00.0/iommu_group/type", "DMA-FQ\n")
    put(f"{pci}/0000:05:00.0/vendor", "0x10de\n")
    put(f"{pci}/0000:05:00.0/class", "0x068000\n")
    acs = bytearray(4096)
    acs[0x100:0x104] = (0x148 << 20 | 1 << 16 | 0x0001).to_bytes(4, "little")  # errors, then ACS
    acs[0x148:0x14C] = (1 << 16 | 0x000D).to_bytes(4, "little")
    acs[0x14E] = 0x1D
    for number, config in enumerate((bytes(acs), bytes(4096))):
        put(f"{pci}/0000:0{number}:01.0/class", "0x060400\n")
        put(f"{pci}/0000:0{number}:01.0/vendor", "0x8086\n")
        put(f"{pci}/0000:0{number}:01.0/config", config)
    put("proc/driver/nvidia/version", "NVRM version: NVIDIA UNIX Open Kernel Module 570.86.15\n")

    class Logged(System):
        def run(self, argv: Any, limit_s: float = 5.0) -> Done:
            line = "[  1.0] NVRM: Xid (PCI:0000:1b:00): 79, pid=1, GPU has fallen off the bus.\n"
            return Done(0, line * 2) if argv[0] == "dmesg" else Done(None, err="journalctl: absent")

    facts = collect_host(Logged(root=tmp_path), has_gpus=True)
    assert (facts.num_on_bus, facts.num_acs_bridges) == (1, 1)  # the NVSwitch is none
    assert facts.iommu_types == ("DMA-FQ",)
    assert facts.has_kernel_driver
    assert facts.is_open_driver
    assert not facts.has_peermem
    assert [(xid.number, xid.count) for xid in facts.xids] == [(79, 2)]


def test_a_log_that_may_not_be_read_says_so(tmp_path: Path) -> None:
    class Denied(System):
        def run(self, argv: Any, limit_s: float = 5.0) -> Done:
            return Done(1, err="dmesg: read kernel buffer failed: Operation not permitted")

    (tmp_path / "proc/driver/nvidia").mkdir(parents=True)
    (tmp_path / "proc/driver/nvidia/version").write_text("NVRM version: NVIDIA 570\n")
    facts = collect_host(Denied(root=tmp_path), has_gpus=True)
    assert "Operation not permitted" in facts.xid_problem
    assert facts.is_open_driver is False


def test_a_library_of_c_is_asked_as_c_wants_it(tmp_path: Path) -> None:
    environ = {"LD_LIBRARY_PATH": str(build(tmp_path)), "FAKE_NVML_PID": "1"}
    facts = gpu.collect(Quiet(environ=environ), Options())
    assert (facts.count, facts.cuda_driver) == (2, "12.8")
    assert [(one.fabric_state, one.fabric_health) for one in facts.gpus] == [
        ("completed", 5), ("", facts.gpus[1].fabric_health),
    ]  # fmt: skip


def test_a_library_that_crashes_is_told_with_its_place(tmp_path: Path) -> None:
    environ = {"LD_LIBRARY_PATH": str(build(tmp_path)), "FAKE_NVML_PID": "1"}
    environ["FAKE_NVML_CRASHES"] = "1"
    with pytest.raises(child.NotKnown, match=r"Aborted.*nvmlDeviceGetGpuFabricInfoV.*in ask"):
        gpu.collect(Quiet(environ=environ), Options())


@pytest.mark.gpu
def test_the_real_nvml() -> None:
    """On a machine with GPUs: the count is that of nvidia-smi, and no question fails."""
    if not Path("/proc/driver/nvidia/version").exists():
        pytest.skip("no NVIDIA driver on this machine")
    facts = gpu.collect(System(), Options(tier="deep"))
    smi = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=True)
    assert facts.count == len(smi.stdout.splitlines())
    assert facts.recording == ""
    assert all(one.uuid in smi.stdout and one.memory_total_bytes for one in facts.gpus)
    assert not any(one.errors for one in facts.gpus)
    if not facts.burn_problem:
        assert all(burn.is_correct and burn.bf16_tflops > 1 for burn in facts.burns)
    print(msgspec.json.format(msgspec.json.encode(facts), indent=1).decode())  # noqa: T201


def test_the_load_is_told_gpu_by_gpu_and_other_lines_are_left_out() -> None:
    class Loaded(System):
        def run(self, argv: Any, limit_s: float = 5.0) -> Done:
            assert argv[-2:] == [argv[-2], "2"]
            assert argv[-2].endswith("burn_child.py")
            row = '{"index": 0, "uuid": "GPU-0", "bf16_tflops": 788.5, "copy_gb_per_s": 55.1}'
            return Done(0, f'torch says hello\n{row}\n{{"index": 1, "error": "out of memory"}}\n')

    burns, problem = burn(Loaded(), 2)
    assert problem == ""
    assert [(one.index, one.bf16_tflops, one.error) for one in burns] == [
        (0, 788.5, ""), (1, 0.0, "out of memory"),
    ]  # fmt: skip


def test_a_load_that_hangs_keeps_what_was_told() -> None:
    class Hung(System):
        def run(self, argv: Any, limit_s: float = 5.0) -> Done:
            return Done(None, '{"index": 0, "bf16_tflops": 700.0}\n', "no answer")

    burns, problem = burn(Hung(), 8)
    assert len(burns) == 1
    assert "did not end" in problem

"""sw.driver: the driver runs what torch was built for."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

from rankscope.preflight.checks.base import Need, Run
from rankscope.preflight.checks.comparing import listed, not_measured
from rankscope.preflight.model import Finding, Fix, Scope, Status, Tier


class SwDriver:
    """The NVIDIA driver is new enough for the CUDA that torch was built for.

    Within one major version of CUDA an older driver runs newer programs, with exceptions (NVIDIA,
    "CUDA Compatibility"): that only warns.
    """

    id: ClassVar[str] = "sw.driver"
    scope: ClassVar[Scope] = "node"
    tier: ClassVar[Tier] = "quick"
    needs: ClassVar[frozenset[Need]] = frozenset({"torch", "gpu"})

    def judge(self, run: Run) -> Iterator[Finding]:
        """Fail where the driver is of an older major version, warn for an older minor one."""
        yield from not_measured(self.id, run, "software")
        yield from not_measured(self.id, run, "gpu")
        bad: dict[tuple[Status, str, str], list[str]] = {}
        for report in run.present:
            software, gpu = report.facts.software, report.facts.gpu
            if software is None or gpu is None or gpu.num_gpus == 0 or software.has_cuda_compat:
                continue
            if software.has_torch and not software.torch_cuda and not software.torch_hip:
                if run.backend == "nccl":
                    bad.setdefault(("fail", "", ""), []).append(report.node)
                continue
            wanted, has = _numbers(software.torch_cuda), _numbers(gpu.cuda_driver)
            if wanted and has and has < wanted:
                status: Status = "fail" if has[0] < wanted[0] else "warn"
                key = (status, gpu.cuda_driver, software.torch_cuda)
                bad.setdefault(key, []).append(report.node)
        for (status, has_text, wanted_text), nodes in bad.items():
            yield _finding(status, has_text, wanted_text, nodes)


def _finding(status: Status, has: str, wanted: str, nodes: list[str]) -> Finding:
    if not wanted:
        return Finding(
            id=SwDriver.id,
            status="fail",
            nodes=tuple(nodes),
            title=f"{listed(nodes)}: torch was built without CUDA, and there are GPUs",
            fix=tuple(
                Fix(node=node, command="python -m pip install --force-reinstall torch")
                for node in nodes
            ),
            would="'Distributed package doesn't have NCCL built in'",
            wrong_if="the job is meant to run on the processors: then add --backend gloo",
        )
    return Finding(
        id=SwDriver.id,
        status=status,
        nodes=tuple(nodes),
        title=f"{listed(nodes)}: the driver runs CUDA {has}, torch was built for {wanted}",
        evidence={"cuda_driver": has, "torch_cuda": wanted},
        told=tuple(f"{node}: driver CUDA {has}, torch CUDA {wanted}" for node in nodes),
        fix=(
            *(
                Fix(node=node, command="sudo apt-get install cuda-drivers", owner="admin")
                for node in nodes
            ),
        ),
        would=(
            "'The NVIDIA driver on your system is too old': no GPU is found"
            if status == "fail"
            else "mostly works; kernels that are compiled at run time (PTX) may fail"
        ),
        wrong_if="a cuda-compat package is loaded by other means than LD_LIBRARY_PATH",
    )


def _numbers(version: str) -> tuple[int, ...]:
    parts = version.split(".")[:2]
    return tuple(int(part) for part in parts) if all(map(str.isdigit, parts)) else ()

"""sw.drift: versions, compared over all nodes."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import ClassVar

from rankscope.preflight.checks.base import Need, Run
from rankscope.preflight.checks.comparing import by_value, compared, listed, not_measured, odd_ones
from rankscope.preflight.facts.software import SoftwareFacts
from rankscope.preflight.model import Finding, Fix, NodeReport, Scope, Status, Tier

# A difference in major.minor of these changes what goes over the wire, or what pickles mean.
_STRICT = ("torch", "torch built for CUDA", "NCCL", "Python")
_WOULD = {
    "torch": "collectives of two versions: a hang, wrong numbers, or a failure to unpickle",
    "torch built for CUDA": "kernels and NCCL of two builds: init fails, or results differ",
    "NCCL": "NCCL init fails: 'Mismatched NCCL version detected', or hangs",
    "Python": "objects sent between ranks cannot be unpickled",
    "torch is installed": "the ranks of this node die at 'import torch'; the others wait for them",
}
_OTHER_WOULD = "results, speed or messages of this node differ from the others"
_MANY = 3  # packages that differ: above, they are one finding


class SwDrift:
    """torch, CUDA, NCCL, driver, Python, kernel and packages are the same on all nodes.

    Another major.minor of torch, NCCL, CUDA or Python fails; any other difference warns.
    """

    id: ClassVar[str] = "sw.drift"
    scope: ClassVar[Scope] = "all"
    tier: ClassVar[Tier] = "quick"
    needs: ClassVar[frozenset[Need]] = frozenset({"peers"})

    def judge(self, run: Run) -> Iterator[Finding]:
        """Name the nodes whose versions are not those of the majority."""
        yield from not_measured(self.id, run, "software")
        versions = {
            report.node: _versions(report, report.facts.software)
            for report in run.present
            if report.facts.software is not None
        }
        names = dict.fromkeys(name for told in versions.values() for name in told)
        quiet: dict[tuple[str, ...], dict[str, dict[str, str]]] = {}
        for name in names:
            values = {node: told[name] for node, told in versions.items() if name in told}
            odd = odd_ones(values)
            if not odd:
                continue
            if name in _WOULD:
                yield _finding(name, values, odd)
            else:
                quiet.setdefault(odd, {})[name] = values
        for odd, differing in quiet.items():
            yield _packages(odd, differing)
        if not quiet:
            yield from _rest(run)


def _versions(report: NodeReport, software: SoftwareFacts) -> dict[str, str]:
    """Return what is compared, by name; what a node cannot say is left out."""
    if not software.has_torch:
        told = {"torch is installed": "no"}
    else:
        told = {
            "torch is installed": "yes",
            "torch": software.torch,
            "torch built for CUDA": software.torch_cuda or software.torch_hip or "CPU",
            "NCCL": software.nccl,
            "source of torch": software.torch_git,
        }
    gpu = report.facts.gpu
    told |= {
        "Python": software.python,
        "kernel": software.kernel,
        "libc": software.libc,
        "NIC driver": software.ofed,
        "NVIDIA driver": gpu.driver if gpu is not None else "",
    }
    known = {name: value for name, value in told.items() if value}
    skipped = {"torch"} | {n for n in software.packages if n.startswith("nvidia-nccl")}
    return known | {n: v for n, v in software.packages.items() if n not in skipped}


def _finding(name: str, values: Mapping[str, str], odd: tuple[str, ...]) -> Finding:
    coarse = {node: _coarse(name, value) for node, value in values.items()}
    is_strict = name in _STRICT or name == "torch is installed"
    status: Status = "fail" if is_strict and len(set(coarse.values())) > 1 else "warn"
    usual = next(iter(by_value(values)))
    has_majority = all(values[node] != usual for node in odd)
    theirs = ", ".join(dict.fromkeys(values[node] for node in odd))
    if name == "torch is installed":
        title = f"{listed([n for n in odd if values[n] == 'no'])}: torch is not installed there"
        odd = tuple(node for node in odd if values[node] == "no") or odd
    elif has_majority:
        title = f"{listed(odd)}: {name} {theirs}, the other nodes have {usual}"
    else:
        title = f"{name} differs between nodes: {theirs}"
    return Finding(
        id=SwDrift.id,
        status=status,
        nodes=odd,
        title=title,
        evidence={name: dict(values)},
        told=compared(values),
        fix=_fixes(name, values, odd, usual) if has_majority else (),
        would=_WOULD[name] if status == "fail" else _OTHER_WOULD,
        wrong_if="the job runs in another environment than this preflight",
    )


def _packages(odd: tuple[str, ...], differing: dict[str, dict[str, str]]) -> Finding:
    """Return one warning for all other differences of the same nodes."""
    texts = []
    for name, values in differing.items():
        usual = next(iter(by_value(values)))
        theirs = [v for n, v in values.items() if n in odd and v != usual] or [usual]
        texts.append(f"{name} {theirs[0]}, not {usual}" if theirs[0] != usual else name)
    shown = "; ".join(texts[:_MANY]) + (f" and {len(texts) - _MANY} more" if texts[_MANY:] else "")
    return Finding(
        id=SwDrift.id,
        status="warn",
        nodes=odd,
        title=f"{listed(odd)}: other versions than elsewhere: {shown}",
        evidence={name: values for name, values in differing.items()},
        told=tuple(
            f"{name}: {line}" for name, values in differing.items() for line in compared(values)
        )[:20],
        fix=tuple(Fix(node=node, command=_upgrade(differing, odd)) for node in odd),
        would=_OTHER_WOULD,
        wrong_if="the job runs in another environment than this preflight",
    )


def _rest(run: Run) -> Iterator[Finding]:
    """Warn where only packages differ that are not among those that are sent one by one."""
    digests = {
        report.node: report.facts.software.packages_digest
        for report in run.present
        if report.facts.software is not None and report.facts.software.packages_digest
    }
    odd = odd_ones(digests)
    if not odd or 2 * len(odd) >= len(digests):
        return  # without a majority it would accuse everybody for a text editor
    yield Finding(
        id=SwDrift.id,
        status="warn",
        nodes=odd,
        title=f"{listed(odd)}: other Python packages than elsewhere, none that matters by itself",
        evidence={"packages_digest": digests},
        told=compared(digests),
        fix=tuple(
            Fix(node=node, command="python -m pip freeze --all | sort   # compare with another")
            for node in odd
        ),
        would=_OTHER_WOULD,
        wrong_if="the packages that differ are no part of the job",
        confidence="likely",
    )


def _coarse(name: str, value: str) -> str:
    """Return what may not differ: major.minor, of torch also what it was built for."""
    match = re.match(r"\d+\.\d+", value)
    return match.group(0) if match and name != "torch is installed" else value


def _fixes(
    name: str, values: Mapping[str, str], odd: tuple[str, ...], usual: str
) -> tuple[Fix, ...]:
    if name == "Python":
        command = f"use Python {usual} for the environment of the job"
    elif name == "NCCL":
        command = f"python -m pip install 'nvidia-nccl-cu12=={usual}'   # or the same torch"
    elif name == "torch built for CUDA":
        tag = f"cu{usual.replace('.', '')}" if usual[:1].isdigit() else "cpu"
        command = f"python -m pip install torch --index-url https://download.pytorch.org/whl/{tag}"
    elif name == "torch is installed":
        command = "python -m pip install torch   # the version of the other nodes"
    else:
        command = f"python -m pip install 'torch=={usual.partition('+')[0]}'"
    return tuple(Fix(node=node, command=command) for node in odd if values[node] != usual)


def _upgrade(differing: dict[str, dict[str, str]], odd: tuple[str, ...]) -> str:
    system = {"kernel", "libc", "NIC driver", "NVIDIA driver", "source of torch"}
    wanted = [
        f"'{name}=={next(iter(by_value(values)))}'"
        for name, values in differing.items()
        if name not in system
    ]
    if wanted:
        return f"python -m pip install {' '.join(wanted[:8])}"
    return "start the node from the same image as the others"

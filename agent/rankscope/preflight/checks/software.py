"""Software: versions, the script, the data, what torch was built with."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from shlex import quote

from rankscope.preflight.checks.base import BuiltinCheck, Run, grouped, listed, on_each
from rankscope.preflight.checks.commands import word
from rankscope.preflight.checks.comparing import by_value, compared, odd_ones
from rankscope.preflight.facts.script import IMPORT_LIMIT_S, ScriptFacts
from rankscope.preflight.facts.software import (
    DATA_SECONDS,
    MAX_DATA_FILES,
    DataFacts,
    SoftwareFacts,
)
from rankscope.preflight.model import CheckFinding, Fix, NodeReport, Status

# A difference in major.minor of these changes what goes over the wire, or what pickles mean.
_STRICT = ("torch", "torch built for CUDA", "NCCL", "Python")
_VERSION_IMPACT = {
    "torch": "collectives of two versions: a hang, wrong numbers, or a failure to unpickle",
    "torch built for CUDA": "kernels and NCCL of two builds: init fails, or results differ",
    "NCCL": "NCCL init fails: 'Mismatched NCCL version detected', or hangs",
    "Python": "objects sent between ranks cannot be unpickled",
    "torch is installed": "the ranks of this node die at 'import torch'; the others wait for them",
}
_OTHER_IMPACT = "results, speed or messages of this node differ from the others"
_MANY = 3  # packages that differ: above, they are one finding


class SwDrift(BuiltinCheck, id="sw.drift", scope="all", needs=("peers",)):
    """torch, CUDA, NCCL, driver, Python, kernel and packages are the same on all nodes.

    Another major.minor of torch, NCCL, CUDA or Python fails; any other difference warns.
    """

    def evaluate(self, run: Run) -> Iterator[CheckFinding]:
        """Name the nodes whose versions are not those of the majority."""
        yield from self.not_measured(run, "software")
        versions = {
            node: _versions(run.reports[node], software)
            for node, software in run.each(lambda facts: facts.software).items()
        }
        names = dict.fromkeys(name for of_node in versions.values() for name in of_node)
        quiet: dict[tuple[str, ...], dict[str, dict[str, str]]] = {}
        for name in names:
            values = {node: some[name] for node, some in versions.items() if name in some}
            odd = odd_ones(values)
            if not odd:
                continue
            if name in _VERSION_IMPACT:
                yield _drift_finding(name, values, odd)
            else:
                quiet.setdefault(odd, {})[name] = values
        for odd, differing in quiet.items():
            yield _packages(odd, differing)
        if not quiet:
            yield from _rest(run)


def _versions(report: NodeReport, software: SoftwareFacts) -> dict[str, str]:
    """Return what is compared, by name; what a node cannot say is left out."""
    if not software.has_torch:
        versions = {"torch is installed": "no"}
    else:
        versions = {
            "torch is installed": "yes",
            "torch": software.torch,
            "torch built for CUDA": software.torch_cuda or software.torch_hip or "CPU",
            "NCCL": software.nccl,
            "source of torch": software.torch_git,
        }
    gpu = report.facts.gpu
    versions |= {
        "Python": software.python,
        "kernel": software.kernel,
        "libc": software.libc,
        "NIC driver": software.ofed,
        "NVIDIA driver": gpu.driver if gpu is not None else "",
    }
    known = {name: value for name, value in versions.items() if value}
    skipped = {"torch"} | {n for n in software.packages if n.startswith("nvidia-nccl")}
    return known | {n: v for n, v in software.packages.items() if n not in skipped}


def _drift_finding(name: str, values: Mapping[str, str], odd: tuple[str, ...]) -> CheckFinding:
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
    return SwDrift.finding(
        status,
        title,
        nodes=odd,
        evidence={name: dict(values)},
        lines=compared(values),
        fix=_fixes(name, values, odd, usual) if has_majority else (),
        impact=_VERSION_IMPACT[name] if status == "fail" else _OTHER_IMPACT,
        unless="the job runs in another environment than this preflight",
    )


def _packages(odd: tuple[str, ...], differing: dict[str, dict[str, str]]) -> CheckFinding:
    """Return one warning for all other differences of the same nodes."""
    texts = []
    for name, values in differing.items():
        usual = next(iter(by_value(values)))
        theirs = [v for n, v in values.items() if n in odd and v != usual] or [usual]
        texts.append(f"{name} {theirs[0]}, not {usual}" if theirs[0] != usual else name)
    shown = "; ".join(texts[:_MANY]) + (f" and {len(texts) - _MANY} more" if texts[_MANY:] else "")
    return SwDrift.warn(
        f"other versions than elsewhere: {shown}",
        at=odd,
        evidence={name: values for name, values in differing.items()},
        lines=tuple(
            f"{name}: {line}" for name, values in differing.items() for line in compared(values)
        )[:20],
        fix=on_each(odd, _upgrade(differing, odd)),
        impact=_OTHER_IMPACT,
        unless="the job runs in another environment than this preflight",
    )


def _rest(run: Run) -> Iterator[CheckFinding]:
    """Warn where only packages differ that are not among those that are sent one by one."""
    all_software = run.each(lambda facts: facts.software)
    digests = {n: one.packages_digest for n, one in all_software.items() if one.packages_digest}
    odd = odd_ones(digests)
    if not odd or 2 * len(odd) >= len(digests):
        return  # without a majority it would accuse all nodes for a text editor
    yield SwDrift.warn(
        "other Python packages than elsewhere, none that matters by itself",
        at=odd,
        evidence={"packages_digest": digests},
        lines=compared(digests),
        fix=on_each(odd, "python -m pip freeze --all | sort   # compare with another"),
        impact=_OTHER_IMPACT,
        unless="the packages that differ are no part of the job",
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


class SwScript(BuiltinCheck, id="sw.script", scope="all", needs=("script",)):
    """The script is the same on all nodes, and everything that it imports can be imported.

    The script itself is not run. An import within `try`, `if` or a function is left out.
    """

    def evaluate(self, run: Run) -> Iterator[CheckFinding]:
        """Fail on a missing, different or broken script, and on a missing module."""
        yield from self.not_measured(run, "software")
        scripts = run.each(lambda facts: facts.software.script if facts.software else None)
        for node, one in scripts.items():
            if one.not_known:
                yield self.unknown(one.not_known, at=(node,))
        yield from _broken(scripts)
        yield from _imports(scripts)
        good = {node: one for node, one in scripts.items() if one.digest}
        own = {node: one.digest[:12] for node, one in good.items()}
        if odd_ones(own):
            yield _differs("the script", own, good)
            return
        whole = {n: one.package_digest[:12] for n, one in good.items() if one.package_digest}
        if odd_ones(whole):
            yield _differs("a module beside the script", whole, good)


def _broken(scripts: dict[str, ScriptFacts]) -> Iterator[CheckFinding]:
    errors = {
        node: script.error or f"syntax error: {script.syntax_error}"
        for node, script in scripts.items()
        if script.error or script.syntax_error
    }
    for error, nodes in grouped((error, node) for node, error in errors.items()).items():
        path = scripts[nodes[0]].path
        yield SwScript.fail(
            f"{path}: {error}",
            at=nodes,
            evidence={"path": path, "error": error},
            lines=(f"{node}: {error}" for node in nodes),
            fix=on_each(nodes, f"ls -l {quote(path)}; python -m py_compile {quote(path)}"),
            impact="the ranks of this node die at once; the others wait for them until time-out",
            unless="the script comes to the node only when the job starts",
        )


def _imports(scripts: dict[str, ScriptFacts]) -> Iterator[CheckFinding]:
    missing = grouped((e, n) for n, one in scripts.items() for e in one.import_errors.items())
    for (module, error), nodes in missing.items():
        yield SwScript.fail(
            f"the script cannot import {module} ({error.partition(':')[0]})",
            at=nodes,
            evidence={"module": module, "error": error},
            lines=(f"{node}: import {module}: {error}" for node in nodes),
            fix=on_each(
                nodes,
                f"python -m pip install {word(module)}   # if the package is so named"
                if error.startswith("ModuleNotFoundError")
                else f"python -c {quote(f'import {module}')}",
            ),
            impact="the ranks of this node die at once; the others wait for them until time-out",
            unless="the launcher sets another environment (PYTHONPATH, conda, modules)",
        )
    slow = grouped((one.slow_import, n) for n, one in scripts.items() if one.slow_import)
    for module, nodes in slow.items():
        yield SwScript.unknown(f"import {module} did not end in {IMPORT_LIMIT_S:g} s", at=nodes)


def _differs(what: str, digests: dict[str, str], scripts: dict[str, ScriptFacts]) -> CheckFinding:
    odd = odd_ones(digests)
    path = scripts[odd[0]].path
    others = [node for node in digests if node not in odd]
    title = f"{listed(odd)}: {what} {path} is another one"
    if others:
        title += f" than on {listed(others)}"
    source, folder = others[0] if others else odd[0], quote(_folder(path))
    return SwScript.fail(
        title,
        nodes=odd,
        evidence={"sha256": digests},
        lines=compared(digests),
        fix=(
            Fix(node=node, command=f"rsync -a {source}:{folder}/ {folder}/")
            for node in odd
            if node != source
        ),
        impact="ranks call different collectives: a hang, or wrong results without a message",
        unless="the nodes are meant to run different scripts",
    )


def _folder(path: str) -> str:
    return path.rpartition("/")[0] or "."


class SwData(BuiltinCheck, id="sw.data", scope="all", needs=("peers",)):
    """The data directory holds the same files, by name and size, on all nodes.

    Looks at the first 20,000 files in sorted order; contents are not read.
    """

    def evaluate(self, run: Run) -> Iterator[CheckFinding]:
        """Warn where names or sizes differ."""
        if not run.options.data_dir:
            yield self.skipped("no data directory was named")
            return
        yield from self.not_measured(run, "software")
        data = run.each(lambda facts: facts.software.data if facts.software else None)
        late = [n for n, one in data.items() if one.cut == "time" or one.error]
        yield from self.note("unknown", late, f"not all read in {DATA_SECONDS:g} s: not compared")
        whole = {n: one for n, one in data.items() if n not in late}
        odd = odd_ones({node: one.digest for node, one in whole.items()})
        if odd:
            yield self._finding(run.options.data_dir, odd, whole)

    def _finding(self, path: str, odd: tuple[str, ...], data: dict[str, DataFacts]) -> CheckFinding:
        counts = {node: f"{one.count} files, {one.bytes} bytes" for node, one in data.items()}
        usual = next((counts[node] for node in data if node not in odd), "")
        title = f"{listed(odd)}: {path} holds {counts[odd[0]]}"
        return self.warn(
            f"{title}; elsewhere {usual}" if usual else f"{path} differs between nodes",
            nodes=odd,
            evidence={
                "count": {node: one.count for node, one in data.items()},
                "bytes": {node: one.bytes for node, one in data.items()},
            },
            lines=tuple(f"{node}: {counts[node]}, {data[node].digest[:12]}" for node in data)[:16],
            fix=on_each(odd, f"find {quote(path)} -type f | wc -l; du -sb {quote(path)}"),
            impact="ranks take different numbers of batches: one leaves, the others hang",
            unless=f"each node is meant to hold its own shard, or files beyond {MAX_DATA_FILES} "
            "matter",
        )


class SwNcclMulti(BuiltinCheck, id="sw.nccl.multi", needs=("torch", "gpu")):
    """There is one NCCL: LD_PRELOAD and LD_LIBRARY_PATH name no other than torch's own.

    Which of two a rank loads depends on the order of the loader.
    """

    def evaluate(self, run: Run) -> Iterator[CheckFinding]:
        """Warn where another version comes before the one that torch brings."""
        yield from self.not_measured(run, "software")
        all_software = run.each(lambda facts: facts.software)
        bad = grouped((others, n) for n, one in all_software.items() if (others := _others(one)))
        for others, nodes in bad.items():
            variable = others[0].rpartition(" by ")[2]
            yield self.warn(
                f"two versions of NCCL: torch brings {_own(run, nodes[0])}, and {others[0]}",
                at=nodes,
                evidence={"others": list(others)},
                lines=others,
                fix=on_each(nodes, f"unset {word(variable)}"),
                impact="ranks may load different versions of NCCL: init fails or hangs",
                unless="the other one is meant, and set on all nodes",
                confidence="likely",
            )


def _own(run: Run, node: str) -> str:
    software = run.reports[node].facts.software
    return software.nccl if software is not None else ""


def _others(software: SoftwareFacts) -> tuple[str, ...]:
    """Return libraries of another version that the environment puts before torch's own."""
    return tuple(
        f"{library.path} is {library.version} by {library.found_by}"
        for library in software.libraries
        if library.found_by != "ldconfig"
        and software.nccl
        and library.version
        and not software.nccl.startswith(library.version)
    )


class SwDriver(BuiltinCheck, id="sw.driver", needs=("torch", "gpu")):
    """The NVIDIA driver is new enough for the CUDA that torch was built for.

    Within one major version of CUDA an older driver runs newer programs, with exceptions (NVIDIA,
    "CUDA Compatibility"): that only warns.
    """

    def evaluate(self, run: Run) -> Iterator[CheckFinding]:
        """Fail where the driver is of an older major version, warn for an older minor one."""
        yield from self.not_measured(run, "software")
        yield from self.not_measured(run, "gpu")
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
            yield _driver_finding(status, has_text, wanted_text, nodes)


def _driver_finding(status: Status, has: str, wanted: str, nodes: list[str]) -> CheckFinding:
    if not wanted:
        return SwDriver.fail(
            "torch was built without CUDA, and there are GPUs",
            at=nodes,
            fix=on_each(nodes, "python -m pip install --force-reinstall torch"),
            impact="'Distributed package doesn't have NCCL built in'",
            unless="the job is meant to run on the processors: then add --backend gloo",
        )
    return SwDriver.finding(
        status,
        f"the driver runs CUDA {has}, torch was built for {wanted}",
        at=nodes,
        evidence={"cuda_driver": has, "torch_cuda": wanted},
        lines=(f"{node}: driver CUDA {has}, torch CUDA {wanted}" for node in nodes),
        fix=on_each(nodes, "sudo apt-get install cuda-drivers", "admin"),
        impact="'The NVIDIA driver on your system is too old': no GPU is found"
        if status == "fail"
        else "mostly works; kernels that are compiled at run time (PTX) may fail",
        unless="a cuda-compat package is loaded by other means than LD_LIBRARY_PATH",
    )


def _numbers(version: str) -> tuple[int, ...]:
    parts = version.split(".")[:2]
    return tuple(int(part) for part in parts) if all(map(str.isdigit, parts)) else ()


class SwContainer(BuiltinCheck, id="sw.container", scope="all", needs=("peers",)):
    """All nodes run in a container of the same kind, or none does."""

    def evaluate(self, run: Run) -> Iterator[CheckFinding]:
        """Warn where some are in and some out, or share the host's network and others do not."""
        yield from self.not_measured(run, "host")
        kinds: dict[str, str] = {}
        for node, host in run.each(lambda facts: facts.host).items():
            net = ", network of the host" if host.container and host.is_host_network else ""
            kinds[node] = f"{host.container or 'no container'}{net}"
        odd = odd_ones(kinds)
        if not odd:
            return
        others = [node for node in kinds if node not in odd]
        usual = f", the others: {kinds[others[0]]}" if others else ""
        yield self.warn(
            f"{kinds[odd[0]]}{usual}",
            at=odd,
            evidence={"containers": kinds},
            lines=compared(kinds),
            fix=on_each(odd, "start the preflight and the job in the same image as there"),
            impact="other libraries, limits and addresses on this node than on the others",
            unless="the preflight was started outside of the container that the job will use",
        )


class SwBackend(BuiltinCheck, id="sw.backend", tier="default", needs=("torch", "smoke")):
    """torch on every node has the backend that the job needs."""

    def evaluate(self, run: Run) -> Iterator[CheckFinding]:
        """Fail where the torch child says that it was built without."""
        bad: dict[str, tuple[str, ...]] = {}
        not_asked: list[str] = []
        for report in run.present:
            smoke = report.facts.smoke
            if smoke is None or smoke.skipped or not smoke.backends:
                not_asked.append(report.node)
            elif run.backend not in smoke.backends:
                bad[report.node] = smoke.backends
        yield from self.note("unknown", not_asked, "torch was not asked for its backends")
        if bad:
            yield self.fail(
                f"torch was built without {run.backend}",
                at=bad,
                evidence={"backends": {node: list(names) for node, names in bad.items()}},
                lines=(f"{node}: {', '.join(names)}" for node, names in bad.items()),
                fix=on_each(bad, "python -m pip install --force-reinstall torch"),
                impact=f"init_process_group fails: torch has no {run.backend.upper()} built in",
                unless="the job uses another backend: say --backend",
            )

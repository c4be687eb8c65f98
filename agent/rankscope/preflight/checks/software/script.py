"""sw.script: the same script everywhere, and it finds what it imports."""

from __future__ import annotations

from collections.abc import Iterator
from shlex import quote
from typing import ClassVar

from rankscope.preflight.checks.base import Need, Run
from rankscope.preflight.checks.comparing import compared, listed, not_measured, odd_ones
from rankscope.preflight.facts.script import IMPORT_LIMIT_S, ScriptFacts
from rankscope.preflight.model import Finding, Fix, Scope, Tier


class SwScript:
    """The script is the same on all nodes, and everything that it imports can be imported.

    The script itself is not run. An import within `try`, `if` or a function is left out.
    """

    id: ClassVar[str] = "sw.script"
    scope: ClassVar[Scope] = "all"
    tier: ClassVar[Tier] = "quick"
    needs: ClassVar[frozenset[Need]] = frozenset({"script"})

    def judge(self, run: Run) -> Iterator[Finding]:
        """Fail on a missing, different or broken script, and on a missing module."""
        yield from not_measured(self.id, run, "software")
        scripts = {
            report.node: report.facts.software.script
            for report in run.present
            if report.facts.software is not None and report.facts.software.script is not None
        }
        for node, one in scripts.items():
            if one.untold:
                title = f"{node}: {one.untold}"
                yield Finding(id=self.id, status="unknown", nodes=(node,), title=title)
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


def _broken(scripts: dict[str, ScriptFacts]) -> Iterator[Finding]:
    errors: dict[str, list[str]] = {}
    for node, one in scripts.items():
        error = one.error or (f"syntax error: {one.syntax_error}" if one.syntax_error else "")
        if error:
            errors.setdefault(error, []).append(node)
    for error, nodes in errors.items():
        path = scripts[nodes[0]].path
        yield Finding(
            id=SwScript.id,
            status="fail",
            nodes=tuple(nodes),
            title=f"{listed(nodes)}: {path}: {error}",
            evidence={"path": path, "error": error},
            told=tuple(f"{node}: {error}" for node in nodes),
            fix=tuple(
                Fix(node=node, command=f"ls -l {quote(path)}; python -m py_compile {quote(path)}")
                for node in nodes
            ),
            would="the ranks of this node die at once; the others wait for them until time-out",
            wrong_if="the script comes to the node only when the job starts",
        )


def _imports(scripts: dict[str, ScriptFacts]) -> Iterator[Finding]:
    missing: dict[tuple[str, str], list[str]] = {}
    slow: dict[str, list[str]] = {}
    for node, one in scripts.items():
        for module, error in one.import_errors.items():
            missing.setdefault((module, error), []).append(node)
        if one.slow_import:
            slow.setdefault(one.slow_import, []).append(node)
    for (module, error), nodes in missing.items():
        yield Finding(
            id=SwScript.id,
            status="fail",
            nodes=tuple(nodes),
            title=f"{listed(nodes)}: the script cannot import {module} ({error.partition(':')[0]})",
            evidence={"module": module, "error": error},
            told=tuple(f"{node}: import {module}: {error}" for node in nodes),
            fix=tuple(
                Fix(
                    node=node,
                    command=f"python -m pip install {module}   # if the package is so named"
                    if error.startswith("ModuleNotFoundError")
                    else f"python -c 'import {module}'",
                )
                for node in nodes
            ),
            would="the ranks of this node die at once; the others wait for them until time-out",
            wrong_if="the launcher sets another environment (PYTHONPATH, conda, modules)",
        )
    for module, nodes in slow.items():
        title = f"{listed(nodes)}: import {module} did not end in {IMPORT_LIMIT_S:g} s"
        yield Finding(id=SwScript.id, status="unknown", nodes=tuple(nodes), title=title)


def _differs(what: str, digests: dict[str, str], scripts: dict[str, ScriptFacts]) -> Finding:
    odd = odd_ones(digests)
    path = scripts[odd[0]].path
    others = [node for node in digests if node not in odd]
    title = f"{listed(odd)}: {what} {path} is another one"
    if others:
        title += f" than on {listed(others)}"
    source, folder = others[0] if others else odd[0], quote(_folder(path))
    return Finding(
        id=SwScript.id,
        status="fail",
        nodes=odd,
        title=title,
        evidence={"sha256": digests},
        told=compared(digests),
        fix=tuple(
            Fix(node=node, command=f"rsync -a {source}:{folder}/ {folder}/")
            for node in odd
            if node != source
        ),
        would="ranks call different collectives: a hang, or wrong results without a message",
        wrong_if="the nodes are meant to run different scripts",
    )


def _folder(path: str) -> str:
    return path.rpartition("/")[0] or "."

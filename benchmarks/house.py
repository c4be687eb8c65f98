#!/usr/bin/env python3
"""How large the product is and how tangled: files, lines, import arrows and cycles per package.

    python benchmarks/house.py                      of this checkout
    python benchmarks/house.py 8259791 HEAD         of commits, beside each other
    python benchmarks/house.py --cycles             and which modules are in each cycle

Lines are those of `.py` files, with comments and blank ones. A room is a folder that holds modules.
An arrow is one module that imports another of the same package, whether for types only or inside
a function; a cycle is a set of modules, or of siblings in one folder, that reach each other by
arrows.
"""

from __future__ import annotations

import argparse
import ast
import io
import subprocess
import tarfile
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = {
    "rankscope": "agent",
    "rankscope_server": "server",
    "rankscope_trainer": "reference_trainer",
}
Graph = Mapping[str, set[str]]


@dataclass(frozen=True)
class Size:
    """One package at one commit."""

    files: int
    lines: int
    rooms: int
    arrows: int
    room_arrows: int
    module_cycles: list[set[str]]
    sibling_cycles: list[set[str]]


def modules_of(folder: Path, package: str) -> dict[str, Path]:
    """Return every module of a package by its dotted name."""
    found = {}
    for path in sorted((folder / package).rglob("*.py")):
        name = ".".join(path.relative_to(folder).with_suffix("").parts)
        found[name.removesuffix(".__init__")] = path
    return found


def imports_of(path: Path, modules: Mapping[str, Path]) -> Iterator[str]:
    """Yield the modules of `modules` that one file imports, anywhere in it."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            for alias in node.names:
                whole = f"{node.module}.{alias.name}"
                yield from {whole if whole in modules else node.module} & modules.keys()
        elif isinstance(node, ast.Import):
            yield from {alias.name for alias in node.names} & modules.keys()


def cycles(graph: Graph) -> list[set[str]]:
    """Return the sets of nodes, of two or more, that reach each other."""
    reached = {node: _reach(graph, node) for node in graph}
    found: list[set[str]] = []
    for node in graph:
        together = {other for other in reached[node] if node in reached.get(other, set())}
        if len(together) > 1 and together not in found:
            found.append(together)
    return found


def _reach(graph: Graph, start: str) -> set[str]:
    seen: set[str] = set()
    waiting = [start]
    while waiting:
        for node in graph.get(waiting.pop(), set()) - seen:
            seen.add(node)
            waiting.append(node)
    return seen


def siblings(graph: Graph) -> list[set[str]]:
    """Return the cycles among what is in one folder: modules, and folders as a whole."""
    levels: dict[str, dict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
    for source, targets in graph.items():
        for target in targets:
            ours, theirs = source.split("."), target.split(".")
            depth = next(
                (i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), None
            )
            if depth is not None:  # else one of them is the folder of the other
                parent = ".".join(ours[:depth])
                levels[parent][f"{parent}.{ours[depth]}"].add(f"{parent}.{theirs[depth]}")
    return [cycle for level in levels.values() for cycle in cycles(level)]


def measure(root: Path, package: str) -> Size:
    """Measure one package of a checkout."""
    modules = modules_of(root / PACKAGES[package], package)
    graph = {name: set(imports_of(path, modules)) - {name} for name, path in modules.items()}
    rooms = {name: str(path.parent) for name, path in modules.items()}
    across = {(rooms[a], rooms[b]) for a, targets in graph.items() for b in targets}
    return Size(
        files=len(modules),
        lines=sum(len(path.read_text().splitlines()) for path in modules.values()),
        rooms=len(set(rooms.values())),
        arrows=sum(map(len, graph.values())),
        room_arrows=sum(a != b for a, b in across),
        module_cycles=cycles(graph),
        sibling_cycles=siblings(graph),
    )


def checkout(commit: str, folder: Path) -> Path:
    """Unpack a commit's product folders; return where."""
    command = ["git", "archive", commit, *PACKAGES.values()]
    packed = subprocess.run(command, cwd=ROOT, capture_output=True, check=True).stdout
    with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
        archive.extractall(folder, filter="data")
    return folder


def main() -> None:
    """Print a row for each package and commit."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("commits", nargs="*", help="as git names them; without any, this checkout")
    parser.add_argument("--cycles", action="store_true", help="name the members of each cycle")
    chosen = parser.parse_args()
    table = Table(
        "commit", "package", "files", "lines", "rooms", "arrows", "between rooms",
        "cycles: modules (members)", "siblings (members)",
    )  # fmt: skip
    console = Console()
    named: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        trees = {c: checkout(c, Path(folder, str(i))) for i, c in enumerate(chosen.commits)}
        for commit, root in (trees or {"checkout": ROOT}).items():
            sizes = {package: measure(root, package) for package in PACKAGES}
            for package, size in sizes.items():
                numbers = (size.files, size.lines, size.rooms, size.arrows, size.room_arrows)
                found = (size.module_cycles, size.sibling_cycles)
                named += [f"{commit}: {', '.join(sorted(c))}" for kind in found for c in kind]
                counts = (f"{len(kind)} ({sum(map(len, kind))})" for kind in found)
                table.add_row(commit, package, *map(str, numbers), *counts)
            lines = sum(size.lines for size in sizes.values())
            files = sum(size.files for size in sizes.values())
            table.add_row(commit, "all", str(files), str(lines), end_section=True)
    console.print(table)
    if chosen.cycles:
        console.print("\n".join(named), soft_wrap=True)


if __name__ == "__main__":
    main()

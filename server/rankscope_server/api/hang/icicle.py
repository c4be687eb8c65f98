"""Stacks of many ranks merged into one picture, its layout done here: a frame is a row of ranks.

The thread that trains is read of each dump, as its main thread. Frames are alike where function and
file are; lines may differ.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from rankscope_server.answers import capped
from rankscope_server.api.hang import words
from rankscope_server.api.hang.ranges import rank_set
from rankscope_server.api.hang.schema import EMPTY_ICICLE, Frame, Icicle, IcicleNode
from rankscope_server.diagnose.window import Window

MAX_DEPTH = 96
MAX_NODES = 600
_FAULTHANDLER = re.compile(r'^\s*File "(?P<file>[^"]+)", line (?P<line>\d+) in (?P<name>.+)$')
_PY_SPY = re.compile(r"^\s+(?P<name>\S+) \((?P<file>[^()]+?)(?::(?P<line>\d+))?\)")
_THREAD = re.compile(r"^(?=(?:Current )?[Tt]hread )", re.MULTILINE)
_OUTERMOST = ("_run_module_as_main", "<module>")


def frames_of(dump: str) -> list[Frame]:
    """Return the stack of the main thread of a dump, outermost frame first."""
    threads = [found for text in _THREAD.split(dump) if (found := _frames(text))]
    if not threads:
        return []
    for outermost in _OUTERMOST:
        for frames in threads:
            if frames[0].function == outermost:
                return frames
    current = [text for text in _THREAD.split(dump) if text.startswith("Current")]
    return _frames(current[0]) if current else threads[-1]


def _frames(text: str) -> list[Frame]:
    found = []
    for line in text.splitlines():
        match = _FAULTHANDLER.match(line) or _PY_SPY.match(line)
        if match:
            found.append(Frame(
                function=match["name"].strip(), file=match["file"], line=int(match["line"] or 0),
            ))  # fmt: skip
    return found[::-1][-MAX_DEPTH:]


def num_shared(stacks: Sequence[Sequence[Frame]]) -> int:
    """Return in how many frames, from the outermost on, all stacks are in the same function."""
    if len(stacks) < 2:
        return 0
    shared = 0
    for frames in zip(*stacks, strict=False):
        if len({(frame.function, frame.file) for frame in frames}) > 1:
            break
        shared += 1
    return shared


@dataclass
class _Branch:
    frame: Frame | None = None
    depth: int = -1
    ranks: list[int] = field(default_factory=list)
    lines: set[int] = field(default_factory=set)
    below: dict[tuple[str, str], _Branch] = field(default_factory=dict)


def merged(
    window: Window,
    stacks: Mapping[int, Sequence[Frame]],
    times_ms: Mapping[int, float],
    roots: frozenset[int],
    num_with_stacks: int,
) -> Icicle:
    """Return the stacks of all ranks as one tree, the ranks that others wait for at the left."""
    if not stacks:
        return EMPTY_ICICLE
    top = _Branch()
    for rank, frames in stacks.items():
        branch = top
        branch.ranks.append(rank)
        for depth, frame in enumerate(frames):
            key = frame.file, frame.function
            branch = branch.below.setdefault(key, _Branch(frame, depth))
            branch.ranks.append(rank)
            branch.lines.add(frame.line)
    laid: list[tuple[_Branch, int]] = []
    _lay(top, 0, roots, laid)
    laid.sort(key=lambda one: (-len(one[0].ranks), one[0].depth))
    shown = sorted(laid[:MAX_NODES], key=lambda one: (one[0].depth, one[1]))
    nodes = [_node(window, branch, start, roots) for branch, start in shown]
    last, text = _parting(top, roots)
    return Icicle(
        num_ranks=len(top.ranks),
        num_depths=max((node.depth for node in nodes), default=-1) + 1,
        nodes=nodes,
        parts_at=next((at for at, (one, _) in enumerate(shown) if one is last), -1),
        text=text,
        oldest_ms=min(times_ms[rank] for rank in stacks),
        newest_ms=max(times_ms[rank] for rank in stacks),
        capped=capped(len(stacks), num_with_stacks),
        nodes_capped=capped(len(nodes), len(laid)),
    )


def _lay(
    branch: _Branch, start: int, roots: frozenset[int], laid: list[tuple[_Branch, int]]
) -> None:
    """Give each branch its first place; those with ranks that others wait for come first."""
    below = sorted(
        branch.below.values(),
        key=lambda one: (roots.isdisjoint(one.ranks), -len(one.ranks), _name(one)),
    )
    for one in below:
        laid.append((one, start))
        _lay(one, start, roots, laid)
        start += len(one.ranks)


def _node(window: Window, branch: _Branch, start: int, roots: frozenset[int]) -> IcicleNode:
    frame = branch.frame
    assert frame is not None
    return IcicleNode(
        depth=branch.depth,
        start=start,
        count=len(branch.ranks),
        function=frame.function,
        file=frame.file,
        lines=sorted(branch.lines)[:4],
        ranks=rank_set(window, branch.ranks),
        num_roots=len(roots.intersection(branch.ranks)),
    )


def _parting(top: _Branch, roots: frozenset[int]) -> tuple[_Branch | None, str]:
    """Return the innermost frame that all share, and how they part below it."""
    mine, others = roots.intersection(top.ranks), set(top.ranks) - roots
    branch = top
    while len(branch.below) == 1:
        (below,) = branch.below.values()
        if len(below.ranks) < len(top.ranks):
            break
        branch = below
    if not mine or not others:
        return None, ""
    if branch.frame is None:
        return None, "Their stacks have no frame in common"
    of_roots = [_name(one) for one in branch.below.values() if not mine.isdisjoint(one.ranks)]
    of_others = [_name(one) for one in branch.below.values() if not others.isdisjoint(one.ranks)]
    here = f"{_name(branch)} itself"
    return branch, words.parts_text(
        _name(branch), of_roots or [here], of_others or [here], len(mine), len(others)
    )


def _name(branch: _Branch) -> str:
    frame = branch.frame
    if frame is None:
        return ""
    lines = ", ".join(map(str, sorted(branch.lines)[:2]))
    return f"{frame.function} ({frame.file.rpartition('/')[2]}:{lines})"

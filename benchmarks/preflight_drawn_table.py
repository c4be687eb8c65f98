"""The pages on drawn faults, from the result files of `preflight_drawn.py`."""

from __future__ import annotations

import json
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tests.preflight.drawn.catalogue import HEALTHY, KINDS, WRITTEN, draw
from tests.preflight.drawn.world import Kind

ROOT = Path(__file__).parents[1]
DOCUMENT = ROOT / "docs" / "preflight_drawn.md"
_SHOWN = 110
Row = dict[str, Any]

_HEAD = """# Faults that are drawn, and remedies that are executed

This page is written by `python benchmarks/preflight_drawn.py table` from what was measured.

Where [the first laboratory](preflight_faults.md) has faults that were written down, this one draws
them: a kind of fault, then by seed its place (node, pair, direction), its size, and the network
around it: three or four nodes whose addresses are in any order, one of four networks, one of four
MASTER_PORTs, a launch by torchrun or by variables alone. In each draw

1. `rankscope preflight` must report one finding: the right check, the right node or pair, the
   right status, the right exit code, the same on all nodes, and nothing else;
2. every printed command is executed as it is, by the named owner on the named node. Afterwards
   preflight must find nothing, and the job must run. Where no command can mend (a filter in the
   network, a provider's NAT), a sentence must say what a person must do;
3. nothing that belongs to others may have changed: their programs, firewall rules, routes, lines of
   /etc/hosts, and every node for which there was no command.

What must be reported follows from what a real job does in the same laboratory: torch over gloo, one
rank a node, with a broadcast, all-reduces and all-to-alls, its time limits cut to 25 s.

{summary}
"""


def table(truth: Row, drawn: list[Row], healthy: list[Row], written: list[Row]) -> str:
    """Return the whole document."""
    parts = [_HEAD.format(summary=_summary(truth, drawn, healthy, written))]
    by_kind = _by_kind(drawn)
    for family in dict.fromkeys(kind.family for kind in KINDS.values()):
        kinds = [kind for kind in KINDS.values() if kind.family == family]
        parts.append(_family(family, kinds, truth, by_kind))
    parts.append(_healthy(truth, _by_kind(healthy)))
    parts.append(_written(_by_kind(written)))
    return "\n".join(parts)


def _by_kind(rows: Iterable[Row]) -> dict[str, list[Row]]:
    found: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        found[row["kind"]].append(row)
    return found


def _summary(truth: Row, drawn: list[Row], healthy: list[Row], written: list[Row]) -> str:
    said = Counter(truth[name]["truth"] for name in KINDS if name in truth)
    lines = [
        f"- kinds: {len(KINDS)}. The job breaks under {said['breaks']}, by chance under"
        f" {said['sometimes']} more, is slow under {said['slow']}, works under {said['works']}.",
        _rate("draws", drawn),
        _remedies("remedies of the draws", drawn),
        _remedies("remedies of the first laboratory", written),
    ]
    if healthy:
        clean = sum(row["exact"] for row in healthy)
        kinds = len({row["kind"] for row in healthy})
        lines.append(
            f"- healthy draws: {clean} of {len(healthy)} without a finding and with exit 0, of"
            f" {kinds} kinds; the job works in each kind."
        )
    return "\n".join(filter(None, lines))


def _rate(what: str, rows: list[Row]) -> str:
    if not rows:
        return ""
    exact, missed = sum(row["exact"] for row in rows), sum(row["missed"] for row in rows)
    times = sorted(row["answer_s"] for row in rows)
    return (
        f"- {what}: {exact} of {len(rows)} exact ({exact / len(rows):.1%}), of"
        f" {len({row['kind'] for row in rows})} kinds; {missed} missed (exit 0 where the job"
        f" breaks). The answer took {statistics.median(times):.1f} s in the middle,"
        f" {times[-1]:.1f} s at most, at a load of {min(row['load'] for row in rows):.0f} to"
        f" {max(row['load'] for row in rows):.0f} on two processors."
    )


def _remedies(what: str, rows: list[Row]) -> str:
    rows = [row for row in rows if row["found"]]
    if not rows:
        return ""
    how = Counter(row["mended"] for row in rows)
    harmful = sum(bool(row["harm"]) for row in rows)
    commands = sum(fix["exit"] is not None for row in rows for fix in row["fixes"])
    return (
        f"- {what}: {commands} commands executed in {len(rows)} draws. Mended by a command:"
        f" {how['command']}; a sentence for a person: {how['person']}; neither: {how['no']}."
        f" Harm: {harmful}."
    )


def _family(family: str, kinds: list[Kind], truth: Row, rows: dict[str, list[Row]]) -> str:
    lines = [
        f"## {family}\n",
        "| kind | for example | the job | must be reported | exact | mended by |",
        "|---|---|---|---|---:|---|",
    ]
    for kind in kinds:
        case = draw(kind, 1).case
        want = case.wanted
        ids = " or ".join(f"`{id}`" for id in sorted(want.ids)) if want else "nothing"
        status = f" ({'/'.join(want.statuses)})" if want else ""
        nothing = ", or nothing" if want is not None and want.is_optional else ""
        own = rows.get(kind.name, [])
        lines.append(
            f"| {kind.name} | {_cell(case.says)} | {_job(truth.get(kind.name))} |"
            f" {ids}{status}{nothing} | {_share(own)} | {_mended(own)} |"
        )
    return "\n".join([*lines, ""])


def _job(row: Row | None) -> str:
    if row is None:
        return "-"
    if row["truth"] == "sometimes":
        return f"breaks by chance: launch {row['tries']} did"
    if row["truth"] == "slow":
        return f"slow: a step takes {row['median_ms']:.0f} ms, not {row['healthy_ms']:.0f}"
    return str(row["truth"])


def _share(rows: list[Row]) -> str:
    return f"{sum(row['exact'] for row in rows)}/{len(rows)}" if rows else "-"


def _mended(rows: list[Row]) -> str:
    names = {"command": "command", "person": "person", "no": "**nothing**", "-": "-"}
    how = Counter(names[row["mended"]] for row in rows)
    text = ", ".join(f"{name} {count}" if len(how) > 1 else name for name, count in how.items())
    return text + (", **harm**" if any(row["harm"] for row in rows) else "")


def _cell(text: str) -> str:
    return text.replace("|", "/")[:_SHOWN]


def _healthy(truth: Row, rows: dict[str, list[Row]]) -> str:
    lines = [
        "## Healthy\n",
        "| kind | what is there | the job | clean |",
        "|---|---|---|---:|",
    ]
    for kind in HEALTHY.values():
        says, job = draw(kind, 1).case.says, truth.get(kind.name, {}).get("truth", "-")
        lines.append(f"| {kind.name} | {_cell(says)} | {job} | {_share(rows.get(kind.name, []))} |")
    return "\n".join([*lines, ""])


def _written(rows: dict[str, list[Row]]) -> str:
    lines = [
        "## Remedies of the first laboratory, executed\n",
        "| fault | what is wrong | mended by | the first command |",
        "|---|---|---|---|",
    ]
    for name, kind in WRITTEN.items():
        own = rows.get(name, [])
        fixes = [fix["command"] for row in own for fix in row["fixes"]][:1]
        command = f"`{_cell(fixes[0])}`" if fixes else "-"
        says = _cell(draw(kind, 1).case.says)
        lines.append(f"| {name} | {says} | {_mended(own) or '-'} | {command} |")
    return "\n".join([*lines, ""])


def write(results: dict[str, Path]) -> None:
    """Write the page from the result files."""
    read = {
        name: json.loads(path.read_text()) if path.exists() else {}
        for name, path in results.items()
    }
    rows = {name: list(value.values()) for name, value in read.items()}
    DOCUMENT.write_text(table(read["truth"], rows["draws"], rows["healthy"], rows["written"]))

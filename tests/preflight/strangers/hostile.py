"""Reports of a node that wants to do harm: every text is an attempt, every number a surprise."""

from __future__ import annotations

import random
import unicodedata
from collections.abc import Sequence
from typing import Any

import msgspec

from rankscope.preflight.checks.base import Run
from rankscope.preflight.exchange.intake import Intake
from rankscope.preflight.model import NodeReport
from rankscope.preflight.options import Options
from tests.preflight.healthy import address, healthy

MARK = "touch /tmp/taken"
ATTEMPTS = (
    f"$({MARK})", f"`{MARK}`", f"a; {MARK}", f"a\n{MARK}\n", f"' ; {MARK} '", f'" ; {MARK} "',
    f"/tmp/x && {MARK}", f"x | {MARK}", f"\\'; {MARK}", f"\x1b[2J\x1b]0;{MARK}\x07",
    f"[bold red]{MARK}[/]", f"<script>{MARK}</script>", f"\u202e{MARK}\u2066", f"a\u2028{MARK}",
    f"%s {{0}} {{x}} {MARK}", f"--help {MARK}", f"# {MARK}", "\x00", "\ud800"[:0],
)  # fmt: skip
PLAIN = (
    "eth0", "eth1", "lo", "docker0", "10.77.0.1", "10.77.0.2", "10.77.0.2/24", "fd00::2",
    "127.0.1.1", "ufw", "firewalld", "nft", "iptables", "/tmp", "/mnt/data", "docker",
    "kubernetes", "python3", "29500", "2.13.0", "mlx5_0:1", "performance", "powersave",
)  # fmt: skip
_NUMBERS = (0, 1, 2, 3, 29500, 40000, 65535, 1 << 20, 1 << 40, -1)


class Forger:
    """Draws values of any type that a report is made of."""

    def __init__(self, seed: int, nodes: Sequence[str]) -> None:
        self._random = random.Random(seed)
        self._nodes = tuple(nodes)
        self._hostile = self._random.choice((0.15, 0.5, 0.9))

    def text(self) -> str:
        """Return an attempt, or a text that makes the checks look closer."""
        if self._random.random() < self._hostile:
            return self._random.choice(ATTEMPTS)
        return self._random.choice((*PLAIN, *self._nodes, ""))

    def value(self, kind: Any) -> Any:
        """Return a value of a type as `msgspec.inspect` describes it, in plain Python."""
        draw, inspect = self._random, msgspec.inspect
        if isinstance(kind, inspect.StructType):
            return self.struct(kind)
        if isinstance(kind, inspect.UnionType):
            kinds = [k for k in kind.types if not isinstance(k, inspect.NoneType)]
            return None if draw.random() < 0.1 else self.value(draw.choice(kinds))
        if isinstance(kind, inspect.LiteralType):
            return draw.choice(kind.values)
        if isinstance(kind, inspect.VarTupleType | inspect.ListType | inspect.SetType):
            return [self.value(kind.item_type) for _ in range(draw.choice((0, 1, 2, 3)))]
        if isinstance(kind, inspect.TupleType):
            return [self.value(item) for item in kind.item_types]
        if isinstance(kind, inspect.DictType):
            size = draw.choice((0, 1, 3))
            return {self.value(kind.key_type): self.value(kind.value_type) for _ in range(size)}
        simple = {
            inspect.StrType: self.text,
            inspect.BoolType: lambda: draw.random() < 0.5,
            inspect.IntType: lambda: draw.choice(_NUMBERS),
            inspect.FloatType: lambda: draw.choice((0.0, 0.5, 99.0, 1e12, -1.0)),
            inspect.AnyType: self.text,
            inspect.NoneType: lambda: None,
        }
        return simple[type(kind)]()

    def struct(self, kind: Any) -> dict[str, Any]:
        """Return the fields of a struct; some are left as they are without being said."""
        fields = [f for f in kind.fields if f.required or self._random.random() < 0.85]
        return {field.encode_name: self.value(field.type) for field in fields}

    def report(self, node: str) -> NodeReport:
        """Return a report under a name: half of its parts are healthy, so that others are read."""
        good = msgspec.to_builtins(healthy(node, self._nodes))
        drawn = self.struct(msgspec.inspect.type_info(NodeReport))
        keep = self._random.choice((0.0, 0.3, 0.7))
        for part in drawn.get("facts", {}):
            if self._random.random() < keep and part in good["facts"]:
                drawn["facts"][part] = good["facts"][part]
        drawn["edges"] = {
            peer: self.value(msgspec.inspect.type_info(NodeReport).fields[_EDGES].type.value_type)
            for peer in self._nodes
            if peer != node
        }
        drawn |= {"node": node, "addresses": [address(node)], "stage": "done"}
        drawn["listening"] = good["listening"]
        return msgspec.convert(drawn, NodeReport)

    def run(self) -> Run:
        """Return what honest nodes would evaluate if they believed such reports."""
        intake = Intake(len(self._nodes))
        reports = {node: intake.take(self.report(node)) for node in self._nodes}
        absent = self._random.choice((0, 0, 1))
        for node in self._nodes[len(self._nodes) - absent :]:
            del reports[node]
        options = Options(
            tier="deep", checkpoint_dir="/mnt/ckpt", script="train.py", num_loader_workers=2,
            data_dir="/data",
        )  # fmt: skip
        return Run(self.text(), self._nodes, reports, options)


_EDGES = [field.name for field in msgspec.inspect.type_info(NodeReport).fields].index("edges")


def active(command: str) -> str:
    """Return what of a command a shell would act on: all but quoted words and the comment."""
    left, at, size = [], 0, len(command)
    within = [""]  # of what we are within: nothing, double quotes, a command in parentheses
    while at < size:
        one, before = command[at], command[at - 1 : at]
        if within[-1] != '"' and one == "#" and before in ("", " ", "\t", ";"):
            break
        if one == "\\":
            at += 2
            continue
        if one == "'" and within[-1] != '"':
            at = _end_of_quotes(command, at + 1, is_escaped=before == "$")
        elif one == '"' and within[-1] == '"':
            within.pop()
        elif one == '"':
            within.append(one)
        elif one == "(" and before == "$":
            within.append(one)
        elif one == ")" and within[-1] == "(":
            within.pop()
        if one != "'":
            left.append(one)
        at += 1
    return "".join(left)


def _end_of_quotes(command: str, at: int, is_escaped: bool) -> int:
    while at < len(command) and command[at] != "'":
        at += 2 if is_escaped and command[at] == "\\" else 1
    return at


def is_acting(one: str) -> bool:
    """Whether a character moves a terminal's cursor, hides, or turns text round."""
    return unicodedata.category(one) in ("Cc", "Cf", "Cs", "Zl", "Zp")

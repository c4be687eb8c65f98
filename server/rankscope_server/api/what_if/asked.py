"""What is asked for: changes of a run, checked, and as query parameters."""

from __future__ import annotations

from dataclasses import dataclass
from urllib.parse import urlencode

from rankscope.planning.errors import PlanError
from rankscope.planning.units import link_bytes_per_second
from rankscope_server.api.parameters import items, ranks_of
from rankscope_server.problems import Problem
from rankscope_server.what_if.answers import Change
from rankscope_server.what_if.engine import SHARD

MIB = 1 << 20
MOST = 1 << 16
_LEAST = {"link_times": 1e-3, "add_nodes": -MOST}


@dataclass(frozen=True, slots=True)
class Asked:
    """What is to be otherwise; `layers` and `between` are no changes but what is not recorded."""

    change: Change
    without: tuple[int, ...] = ()
    equal: bool = False
    layers: int = 0

    @property
    def changes(self) -> bool:
        """Return whether anything is."""
        return bool(self.change.kinds or self.without or self.equal)

    @property
    def key(self) -> str:
        """Return it as query parameters."""
        change = self.change
        fields = {
            "strategy": change.strategy, "add_nodes": change.add_nodes,
            "ranks_per_node": change.ranks_per_node,
            "link_times": "" if change.link_times == 1.0 else f"{change.link_times:g}",
            "microbatches": change.microbatches,
            "bucket_mib": f"{change.bucket_bytes / MIB:g}" if change.bucket_bytes else "",
            "without": ",".join(map(str, self.without)), "equal": "true" if self.equal else "",
        }  # fmt: skip
        return urlencode({name: value for name, value in fields.items() if value}, safe=",")


def asked_of(
    *,
    strategy: str = "",
    add_nodes: int = 0,
    ranks_per_node: int = 0,
    link_times: float = 1.0,
    microbatches: int = 0,
    bucket_mib: float = 0.0,
    without: str = "",
    equal: bool = False,
    layers: int = 0,
    between: str = "",
) -> Asked:
    """Return what these parameters ask for. Raises Problem 422."""
    if strategy and strategy not in SHARD:
        remedy = f"give one of {', '.join(SHARD)}"
        raise Problem(422, f"strategy {strategy[:20]!r} is not known", "strategy", remedy)
    for field, value in (
        ("add_nodes", add_nodes), ("ranks_per_node", ranks_per_node), ("link_times", link_times),
        ("microbatches", microbatches), ("bucket_mib", bucket_mib), ("layers", layers),
    ):  # fmt: skip
        least = _LEAST.get(field, 0)
        if not least <= value <= MOST:
            raise Problem(422, f"{value:g} is out of range", field, f"give {least:g} to {MOST:,}")
    try:
        rate = link_bytes_per_second(between, "between") if between else 0.0
    except PlanError as error:
        raise Problem(422, error.problem, error.field, error.remedy) from error
    change = Change(
        strategy=strategy, add_nodes=add_nodes, ranks_per_node=ranks_per_node,
        link_times=link_times, microbatches=microbatches, bucket_bytes=bucket_mib * MIB,
        between_bytes_per_second=rate,
    )  # fmt: skip
    ranks = tuple(sorted(set(ranks_of(items(without), "without"))))
    return Asked(change, ranks, equal, layers)

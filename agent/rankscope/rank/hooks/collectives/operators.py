"""The operators of torch's c10d library: one row each, read by every source of collectives."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rankscope.wire import schema


@dataclass(frozen=True)
class Operator:
    """One operator of the c10d library and where its parts stand among the arguments."""

    operator: str
    operation: str
    group_at: int  # position of the process group; tensors stand before it
    peer_at: int = -1  # position of the root or peer, a rank of the group
    has_future: bool = True  # gloo has none for some; then the end is Work.wait's
    functional: bool = False  # functional collectives come this way: wait_tensor waits for them
    one_way: str = ""  # "in": only the root (or no rank) hands in; "out": the same for the result

    @property
    def is_p2p(self) -> bool:
        """Whether two ranks exchange something, and the others know nothing of it."""
        return self.operation in schema.P2P_OPERATIONS

    @property
    def is_barrier(self) -> bool:
        """Whether the tensor carries nothing of the user's."""
        return self.operation == "barrier"


OPERATORS: tuple[Operator, ...] = (
    Operator("allreduce_", "all_reduce", 1, functional=True),
    Operator("allreduce_coalesced_", "all_reduce_coalesced", 1, functional=True),
    Operator("broadcast_", "broadcast", 1, peer_at=2, one_way="in", functional=True),
    Operator("reduce_", "reduce", 1, peer_at=3, one_way="out"),
    Operator("barrier", "barrier", 1),
    Operator("send", "send", 1, peer_at=2, has_future=False, one_way="out"),
    Operator("recv_", "recv", 1, peer_at=2, has_future=False, one_way="in"),
    Operator("recv_any_source_", "recv_any_source", 1, has_future=False, one_way="in"),
    Operator("allgather_", "all_gather", 2),
    Operator("_allgather_base_", "all_gather_into_tensor", 2, functional=True),
    Operator("allgather_coalesced_", "all_gather_coalesced", 2),
    Operator(
        "allgather_into_tensor_coalesced_", "all_gather_into_tensor_coalesced", 2, functional=True
    ),
    Operator("reduce_scatter_", "reduce_scatter", 2, has_future=False),
    Operator(
        "_reduce_scatter_base_", "reduce_scatter_tensor", 2, has_future=False, functional=True
    ),
    Operator(
        "reduce_scatter_tensor_coalesced_",
        "reduce_scatter_tensor_coalesced",
        2,
        has_future=False,
        functional=True,
    ),
    Operator("alltoall_", "all_to_all", 2),
    Operator("alltoall_base_", "all_to_all_single", 2, functional=True),
    Operator("gather_", "gather", 2, peer_at=3),
    Operator("scatter_", "scatter", 2, peer_at=3),
    Operator("gather_into_tensor_", "gather_into_tensor", 2, peer_at=3),
)


@dataclass(frozen=True)
class Places:
    """Where a version of torch puts what its operators' schema names; -1: it has none."""

    async_at: int
    async_default: bool  # torch leaves out trailing arguments that have their default
    reduce_at: int
    work_in_tuple: bool


def places(types: Any) -> Places:
    """Read the schema of one operator (`overload._schema`)."""
    names = [argument.name for argument in types.arguments]
    async_at = names.index("async_op") if "async_op" in names else -1
    return Places(
        async_at=async_at,
        async_default=async_at >= 0 and bool(types.arguments[async_at].default_value),
        reduce_at=names.index("reduce_op") if "reduce_op" in names else -1,
        work_in_tuple=len(types.returns) == 2,
    )

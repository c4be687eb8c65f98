"""What a run would take if it were otherwise."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query, Request, Response

from rankscope_server.api.parameters import one_of
from rankscope_server.api.replies import documented, send
from rankscope_server.api.runs.queries import reading
from rankscope_server.api.what_if import queries
from rankscope_server.api.what_if.asked import MOST, asked_of
from rankscope_server.api.what_if.schema import WhatIf
from rankscope_server.what_if.engine import SHARD

router = APIRouter(prefix="/api/v1/runs/{run}", tags=["runs"])
_Count = Annotated[int, Query(ge=0, le=MOST)]
_Number = Annotated[float, Query(ge=0, le=MOST, allow_inf_nan=False)]


@router.get("/what-if", **documented(WhatIf))
def what_if(
    request: Request,
    run: str,
    strategy: Annotated[str, one_of(SHARD)] = "",
    add_nodes: Annotated[int, Query(ge=-MOST, le=MOST)] = 0,
    ranks_per_node: _Count = 0,
    link_times: _Number = 1.0,
    microbatches: _Count = 0,
    bucket_mib: _Number = 0.0,
    without: Annotated[str, Query(max_length=512)] = "",
    equal: bool = False,
    layers: _Count = 0,
    between: Annotated[str, Query(max_length=32)] = "",
) -> Response:
    """Return what these changes would give together; without any, each that makes sense.

    `without` are ranks as in 3,17; `layers` and `between` (as 25GB/s) say what is not recorded.
    """
    asked = asked_of(
        strategy=strategy, add_nodes=add_nodes, ranks_per_node=ranks_per_node,
        link_times=link_times, microbatches=microbatches, bucket_mib=bucket_mib, without=without,
        equal=equal, layers=layers, between=between,
    )  # fmt: skip
    with reading(request, run) as (connection, row):
        body = queries.what_if(connection, row, asked)
    return send(request, body, body.answers)

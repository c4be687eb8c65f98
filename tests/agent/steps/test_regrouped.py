"""A group that is not of all ranks is recorded by the ranks of the job, and by its own number."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

import rankscope
from rankscope.wire import schema
from tests.agent.watching import Watching


@pytest.mark.parametrize("watching", [{"hooks": "collectives"}], indirect=True)
def test_members_are_ranks_of_the_job_and_groups_have_the_number_of_all(
    watching: Watching,
) -> None:
    own = watching.agent.context.recorder.identity.rank
    for epoch in (5, 9):
        rankscope.regrouped(epoch, [own + 3], rank=own, world_size=8)
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        dist.all_reduce(torch.ones(2))
        dist.destroy_process_group()
    groups = [(made.group, made.ranks) for made in watching.of(schema.GroupDefined)]
    assert groups == [("0#5", [own + 3]), ("0#9", [own + 3])]
    events = [event for event in watching.of(schema.Event) if event.name == schema.REGROUPED]
    assert [event.fields for event in events] == [
        {"epoch": "5", "ranks": str(own + 3)},
        {"epoch": "9", "ranks": str(own + 3)},
    ]


def test_without_an_agent_it_does_nothing() -> None:
    rankscope.regrouped(1, [0, 1], rank=0, world_size=2)

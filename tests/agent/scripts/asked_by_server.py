"""A rank that is asked for levels of thinning as by a server that does not keep up, and by budget.

It writes the requests itself, as its collector would, some steps ahead.
"""

import time

import torch
import torch.distributed as dist

from rankscope.files.commands import REQUESTS, encode
from rankscope.files.run_directory import replace_file
from rankscope.rank.attach import start
from rankscope.wire.schema import SHEDDING, Command

STEPS, PAUSE_SECONDS = 200, 0.03
ASKED = {  # in which step: level, before which step, by whom
    5: (3, 60, SHEDDING + "behind by 23 s"),
    65: (2, 110, "budget"),
    115: (0, 160, SHEDDING + "in time again"),
}

dist.init_process_group("gloo")
agent = start._agent
model = torch.nn.Linear(10, 10)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
x = torch.ones(1000)
for step in range(1, STEPS + 1):
    if step in ASKED:
        level, at_step, by = ASKED[step]
        command = Command(
            id=step, kind="thin", attempt=0, ranks=[0], asked_by=by, expires_in_seconds=60,
            level=level, at_step=at_step, is_everyone=True,
        )  # fmt: skip
        replace_file(agent.context.recorder.directory / REQUESTS, encode([command]))
    optimizer.zero_grad()
    model(torch.ones(4, 10)).sum().backward()
    for _ in range(5):
        dist.all_reduce(x)
    optimizer.step()
    time.sleep(PAUSE_SECONDS)
dist.destroy_process_group()

"""A rank that leaves its groups to the end of the process, and ends as its argument says."""

import os
import sys

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
half = dist.new_group([0])
for group in (None, half):
    dist.all_reduce(torch.ones(3), group=group)
    dist.all_reduce(torch.ones(3), group=group, async_op=True).wait()
how = sys.argv[1]
if how == "fork":
    child = os.fork()
    if not child:
        sys.exit(4)
    sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
if how == "raise":
    raise ValueError("the end")
if how == "exit":
    sys.exit(3)

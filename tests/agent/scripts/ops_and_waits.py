"""Reduce ops of one line of code, and works that are waited for late; one rank of its own."""

import threading

import torch
import torch.distributed as dist

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
x = torch.ones(1000)
for name in ("SUM", "MAX", "SUM", "MIN", "MAX"):
    dist.all_reduce(x, op=getattr(dist.ReduceOp, name))


def by_the_method(op: dist.ReduceOp.RedOpType, really: dist.ReduceOp.RedOpType) -> None:
    """Reduce with another op than the one that this function calls `op`."""
    options = dist.AllreduceOptions()
    options.reduceOp = really
    dist.group.WORLD.allreduce([x], options).wait()


by_the_method(dist.ReduceOp.SUM, dist.ReduceOp.PRODUCT)
by_the_method(dist.ReduceOp.SUM, dist.ReduceOp.MIN)

works = [dist.all_reduce(x, async_op=True) for _ in range(3)]
for work in reversed(works):
    work.wait()
work = dist.all_reduce(x, async_op=True)
other = threading.Thread(target=work.wait)
other.start()
other.join()
dist.destroy_process_group()

"""Every path by which a script reaches a collective; the test counts what the agent saw."""

import sys

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import nn

dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
x = torch.ones(1000)

dist.all_reduce(x)  # 1 all_reduce, 4000 bytes
work = dist.all_reduce(x, async_op=True)  # 2
work.wait()
dist.group.WORLD.allreduce([x]).wait()  # 3, the method of the group
functional.all_reduce(x, "sum", dist.group.WORLD).sum().item()  # 4, functional
dist.broadcast(x, src=1)
dist.all_gather([torch.empty(1000) for _ in range(size)], x)
dist.all_gather_into_tensor(torch.empty(1000 * size), x)
dist.reduce_scatter_tensor(torch.empty(500), x)
dist.all_to_all_single(torch.empty(1000), x)
dist.reduce(x, dst=0)
dist.gather(x, [torch.empty(1000) for _ in range(size)] if rank == 0 else None, dst=0)
dist.scatter(torch.empty(10), [torch.ones(10)] * size if rank == 0 else None, src=0)
dist.barrier()
if rank == 0:
    dist.send(x, dst=1)
else:
    dist.recv(torch.empty(1000), src=0)
peer = 1 - rank
requests = dist.batch_isend_irecv(
    [
        dist.P2POp(dist.isend, x, peer),
        dist.P2POp(dist.irecv, torch.empty(1000), peer),
    ]
)
for request in requests:
    request.wait()
dist.all_gather_object([None] * size, {"rank": rank})  # two all_gathers
sub = dist.new_group([0, 1])
dist.all_reduce(x, group=sub)  # sequence 1 of another group
with torch.inference_mode():
    dist.all_reduce(torch.ones(10))  # 5

model = nn.parallel.DistributedDataParallel(nn.Linear(100, 100))
loss = model(torch.ones(4, 100)).sum()
loss.backward()  # 6: one bucket, 10,100 floats

try:
    dist.all_gather_into_tensor(torch.empty(3), x)  # the backend refuses: the error is the user's
except (RuntimeError, ValueError) as error:
    sys.stdout.write(f"USER SAW {type(error).__name__}\n")

dist.destroy_process_group()
# Names start over. A store of its own: over the old one, torch meets its own stale addresses.
store = dist.FileStore(sys.argv[1], size)
dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
dist.all_reduce(x)
dist.destroy_process_group()

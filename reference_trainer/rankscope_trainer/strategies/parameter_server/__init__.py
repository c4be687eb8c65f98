"""Parameter servers: some ranks keep the weights, the others compute gradients for them.

    worker 0   pull  forward  backward  push ─┐   ┌─ server 0   first part of the weights
    worker 1   pull  forward  backward  push ─┼───┤             and its optimizer
    worker 2   pull  forward  backward  push ─┘   └─ server 1   second part, and its optimizer

The weights are cut, as one long vector, into a piece for each server (`server_shares`, uneven
ones make a hot server). A worker sends each server that server's piece of its gradient and gets
the piece of the weights back. When it gets it is the `consistency`:

    sync      after all workers' gradients of the step; their mean is applied once
    async     at once; each gradient is applied by itself, to weights that moved on meanwhile
    bounded   like async, but a step may only begin at most `staleness` steps ahead of the slowest

`sync` computes what one process would, up to the order of sums. With `backup_workers` b it does
not wait for the last b gradients and drops them when they come. That, `async` and `bounded`
compute something else than a single process, and something else each time: the loss falls, but no
two runs are equal, and none goes on bit for bit from a checkpoint (which is whole all the same).
Settings for which all ranks meet before each step (`grace_seconds`, `check_batches`, `data_path`)
leave `async` and `bounded` little to be ahead by.

Who sends what to whom is the same in two ways (`exchange`): by `messages`, a header and a tensor
that both sides expect (`wire.py`), or by `calls` of `torch.distributed.rpc`, in which a worker
calls a method of an object that the server keeps (`calls.py`).

`worker.py` and `server.py` are the two kinds of ranks, `reassignment.py` moves microbatches from a
slow worker to a fast one, `wire.py` sends and receives, `layout.py` says which rank is what.
"""

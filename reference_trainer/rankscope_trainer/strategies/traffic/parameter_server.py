"""What parameter servers and their workers send.

In sync mode the numbers hold for each step. In async and bounded mode they do as well on workers;
a server may take a fast worker's gradient of the next step in this one, so there only the sums of
the run are exact. With `backup_workers` and `reassign` timing decides what is sent: the numbers
are those of a step in which no worker is late.
"""

from __future__ import annotations

from rankscope_trainer.settings import Settings
from rankscope_trainer.strategies.parameter_server.layout import Layout, shard_sizes
from rankscope_trainer.strategies.strategy import build_model
from rankscope_trainer.strategies.traffic.message import (
    FLOAT32_BYTES,
    INT64_BYTES,
    Message,
    Traffic,
    each_step,
)

HEADER = 4 * INT64_BYTES  # kind, step, version, when it was sent
REPLY = 2 * INT64_BYTES  # version and lead, or owner and index


def traffic(
    settings: Settings, rank: int, world_size: int, resumed_after: int
) -> dict[int, Traffic]:
    """Return what one rank sends, by step."""
    if settings.exchange == "calls":
        return _beside_calls(settings, rank, world_size, resumed_after)
    layout = Layout.of(settings, world_size)
    num_weights = sum(parameter.numel() for parameter in build_model(settings).parameters())
    pieces = [FLOAT32_BYTES * size for size in shard_sizes(settings, num_weights)]
    if rank in layout.workers:
        step = Traffic()
        for piece in pieces:
            step.update(worker_exchange(piece))
        if settings.reassign:
            step.update(worker_claims(settings, world_size))
    else:
        index = layout.servers.index(rank)
        step = server_step(settings, worker_exchange(pieces[index]), len(layout.workers))
        if settings.reassign and index == 0:
            claims = worker_claims(settings, world_size)
            step.update(_from_the_other_side(claims, len(layout.workers)))
    return each_step(settings, resumed_after, step)


def _beside_calls(
    settings: Settings, rank: int, world_size: int, resumed_after: int
) -> dict[int, Traffic]:
    """Return what calls leave to the process group: where to meet, and the norms of servers."""
    is_server = rank in Layout.of(settings, world_size).servers
    startup = Traffic([Message("broadcast", INT64_BYTES)])
    step = server_step(settings, Traffic(), 0) if is_server else Traffic()
    return each_step(settings, resumed_after, step, startup=startup)


def worker_exchange(piece: int) -> Traffic:
    """Return the exchange of one worker with one server."""
    sent = [Message("send", HEADER), Message("send", piece)]
    return Traffic([*sent, Message("recv", REPLY), Message("recv", piece)])


def worker_claims(settings: Settings, world_size: int) -> Traffic:
    """Return what a worker sends the first server to train exactly its own microbatches."""
    microbatches = settings.microbatches_for(world_size)
    offered = 2 * settings.batch_size * microbatches * settings.context  # a byte each
    claims = microbatches + 1  # the last one gets nothing
    return Traffic(
        {
            Message("send", HEADER): claims + 1,
            Message("send", offered): 1,
            Message("recv", REPLY): claims,
        }
    )


def server_step(settings: Settings, exchange: Traffic, num_workers: int) -> Traffic:
    """Return the exchanges of a server with all workers, and what servers need for clipping."""
    step = _from_the_other_side(exchange, num_workers)
    if settings.takes_norm and settings.consistency == "sync":
        step[Message("all_reduce", FLOAT32_BYTES)] += 1
    return step


def _from_the_other_side(traffic: Traffic, times: int) -> Traffic:
    """Turn sends into receives and back; headers are taken from whichever rank comes first."""
    other_side = Traffic()
    for message, count in traffic.items():
        name = "recv" if message.operation == "send" else "send"
        if message == Message("send", HEADER):
            name = "recv_any_source"
        other_side[Message(name, message.num_bytes)] += count * times
    return other_side

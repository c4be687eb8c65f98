"""Twelve planted causes on a random rank among echoes, late and with shifted clocks."""

from __future__ import annotations

import random

import pytest

from rankscope.wire import schema
from rankscope_server.known_errors.evaluation import evaluate
from rankscope_server.known_errors.load import known_errors
from rankscope_server.known_errors.reading import Reader
from tests.analysis.failures import at, ended, look_after, raised, run

RANKS, SEEDS = 8, 10
CAUSES = (
    ("ValueError", "cannot decode the batch of step 41", "user_exception_one_rank"),
    ("KeyError", "'optimizer'", "user_exception_one_rank"),
    ("torch.OutOfMemoryError", "CUDA out of memory. Tried to allocate 2.00 GiB", "oom_gpu"),
    ("RuntimeError", "CUDA error: an illegal memory access was encountered", "other"),
    ("RuntimeError", "CUDA error: uncorrectable ECC error encountered", "ecc"),
    ("OSError", "[Errno 28] No space left on device", "disk_full"),
    ("OSError", "[Errno 122] Disk quota exceeded", "disk_full"),
    ("PermissionError", "[Errno 13] Permission denied: '/data/x'", "permission"),
    ("RuntimeError", "DataLoader worker (pid 41) exited unexpectedly with exit code 1",
     "dataloader"),
    ("RuntimeError", "found NaN in local grad norm in backward pass", "numerics"),
    ("socket.gaierror", "[Errno -2] Name or service not known", "dns"),
    ("RuntimeError", "Expected to have finished reduction in the prior iteration before starting "
     "a new one.", "ddp_unused_params"),
)  # fmt: skip
ECHOES = (
    ("RuntimeError", "[/gloo/transport/tcp/pair.cc:534] Connection closed by peer [10.0.0.1]:482"),
    ("torch.distributed.DistBackendError", "NCCL error in: NCCLUtils.hpp:275, remote process "
     "exited or there was a network error, NCCL version 2.21.5"),
    ("RuntimeError", "Timed out waiting 1800000ms for recv operation to complete"),
    ("RuntimeError", "[Rank RANK] Watchdog caught collective operation timeout: WorkNCCL(Seq=4)"),
    ("torch.distributed.DistNetworkError", "failed to recv, got 0 bytes"),
    ("ConnectionResetError", "[Errno 104] Connection reset by peer"),
)  # fmt: skip


@pytest.mark.parametrize("cause", CAUSES, ids=lambda cause: cause[1][:30])
def test_the_planted_rank_is_named_from_records(cause: tuple[str, str, str]) -> None:
    right = 0
    for seed in range(SEEDS):
        chance = random.Random(seed)
        culprit = chance.randrange(RANKS)
        shift = {rank: 200.0 * chance.choice((-1, 1)) for rank in (0, 1)}  # of the two hosts
        records: list[schema.AnyRecord] = []
        for rank in set(range(RANKS)) - {culprit}:
            ms = shift[rank % 2] + chance.uniform(20, 900)
            records.append(raised(rank, ms, *_echo(chance, rank)))
            records.append(ended(rank, ms + 30, reason="exception", exit_code=1))
        state = run(RANKS, num_hosts=2)
        for record in records:
            state.apply_record(record)
        state.look(at(3000))  # before anything came from the culprit, 5 s late
        own = shift[culprit % 2]
        late: list[schema.AnyRecord] = [
            raised(culprit, own, *cause[:2]),
            ended(culprit, own + 40, reason="exception", exit_code=1),
        ]
        look = look_after(state, late, seed)
        right += look.verdict is not None and look.verdict.ranks == (culprit,)
    assert right == SEEDS


@pytest.mark.parametrize("cause", CAUSES, ids=lambda cause: cause[1][:30])
def test_the_planted_rank_is_named_from_logs(cause: tuple[str, str, str]) -> None:
    right = 0
    for seed in range(SEEDS):
        chance = random.Random(seed)
        culprit = chance.randrange(RANKS)
        reader = Reader(known_errors(), RANKS)
        names = list(range(RANKS))
        chance.shuffle(names)
        for rank in names:
            kind, message = cause[:2] if rank == culprit else _echo(chance, rank)
            head = 'Traceback (most recent call last):\n  File "train.py", line 7, in f\n    go()'
            text = f"step 41\n{head}\n{kind}: {message}\n"
            reader.read([text.encode()], f"rank_{rank}.log")
        root = evaluate(reader.tally).root
        right += root is not None and root.ranks == (culprit,) and root.group.family == cause[2]
    assert right == SEEDS


def test_a_remedy_of_the_book_stands_in_the_finding() -> None:
    look = look_after(run(), [raised(2, 0, "OSError", "[Errno 28] No space left on device")])
    assert look.verdict is not None
    assert "Free space" in look.verdict.next
    assert any("disk_full" in fact.text for fact in look.verdict.evidence)


def test_a_bind_that_fails_is_a_cause_although_c10d_raises_it() -> None:
    message = (
        "The server socket has failed to listen on any local network address. name: EADDRINUSE"
    )
    records: list[schema.AnyRecord] = [
        raised(0, 300, "torch.distributed.DistNetworkError", message),
        *(raised(rank, 0, *ECHOES[5]) for rank in (1, 2, 3)),
    ]
    look = look_after(run(), records)
    assert look.verdict is not None
    assert look.verdict.ranks == (0,)


def _echo(chance: random.Random, rank: int) -> tuple[str, str]:
    kind, message = chance.choice(ECHOES)
    return kind, message.replace("RANK", str(rank))

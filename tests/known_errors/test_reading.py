"""Logs of many ranks: who speaks, what is one row, and what comes first."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rankscope_server.known_errors.evaluation import Evaluation, evaluate
from rankscope_server.known_errors.line_owner import is_srun, owner_of, rank_of_path
from rankscope_server.known_errors.load import known_errors
from rankscope_server.known_errors.prefilter import _EachText, prefilter
from rankscope_server.known_errors.reading import Reader
from rankscope_server.known_errors.templates import template

CLOSED = (
    "RuntimeError: [/pytorch/gloo/transport/tcp/pair.cc:534] Connection closed by peer [10.0.0.{}]"
)
TRACE = (
    "Traceback (most recent call last):",
    '  File "/work/train.py", line 12, in <module>',
    "    main()",
    '  File "/usr/lib/python3.11/site-packages/torch/nn/module.py", line 40, in _call',
    "    return forward(*args)",
    '  File "/work/model.py", line 7, in forward',
    "    raise Odd(x)",
    "model.Odd: tensor 17 has no shape",
)


# Lines of healthy runs, jobs and kernels, of which each has a word that known errors may stumble
# over.
HARMLESS = """
signals_to_handle        : SIGTERM,SIGINT,SIGHUP,SIGQUIT
max locked memory           (kbytes, -l) unlimited
+ ulimit -l unlimited
docker run --gpus all --ulimit memlock=-1 --ipc=host
DMAR: IOMMU enabled
[    0.0] pcieport 0000:00:03.0: AER: Corrected error received: 0000:00:03.0
mlx5_core 0000:17:00.0: firmware version: 16.35
check_for_nan_in_loss_and_grad .................. True
skip_nonfinite: true
number of nan iterations:   0 |
available GPUs: [0, 1, 2, 3]
W tensorflow/dso_loader.cc:64] Could not load dynamic library 'x.so'; cannot open shared object
mbind: Operation not permitted
wandb: Network error (ConnectionError), entering retry loop.
INFO:c10d:Waiting in store based barrier to initialize process group for rank: 3, key: 1
'HTTPSConnectionPool(host='hf.co'): Max retries' thrown while requesting HEAD https://hf.co/x
Loss scaler: reducing loss scale to 65536
ECC mode enabled; Volatile Uncorr. ECC 0
|   0  Tesla V100-PCIE...  Off  | 00000000:1B:00.0 Off |                    0 |
nvidia-fabricmanager version 550.54.15 is running
[rank0]:[W1230 Utils.cpp] Warning: Environment variable TORCH_NCCL_ASYNC_ERROR_HANDLING is set
NCCL INFO NCCL_IB_TIMEOUT set by environment to 22.
NCCL INFO Channel 00 : 0[1000] -> 1[2000] via P2P/IPC
NCCL INFO NET/IB : Using [0]mlx5_0:1/RoCE [1]mlx5_1:1/RoCE ; OOB eth0:10.0.0.1<0>
error_file: /tmp/torchelastic_x/attempt_0/0/error.json
INFO: use_distributed_checkpoint_timeout=600, on_error=raise, max_errors=0
Epoch 1: val_error 0.12 mean squared error 0.33
0 errors, 3 warnings
[Gloo] Rank 0 is connected to 3 peer ranks. Expected number of connected peer ranks is : 3
resume from preempted checkpoint step 400
Running with preemption support: job will be requeued
srun: job 123 queued and waiting for resources
OSError handling: retry up to 3 times
""".strip().splitlines()


def read(logs: dict[str, str | Sequence[str]], chunk: int = 1 << 20) -> Evaluation:
    """Return what the logs amount to, read in chunks of that size."""
    reader = Reader(known_errors(), len(logs))
    for name, lines in logs.items():
        data = (lines if isinstance(lines, str) else "\n".join(lines)).encode()
        reader.read([data[at : at + chunk] for at in range(0, len(data), chunk)], name)
    return evaluate(reader.tally)


@pytest.mark.parametrize(
    ("line", "rank", "local_rank", "text"),
    [
        ("[rank3]: boom", 3, None, "boom"),
        ("[rank4095]:[E801 12:00:00.1 x.cpp:1] boom", 4095, None, "[E801 12:00:00.1 x.cpp:1] boom"),
        ("[default0]:boom", None, 0, "boom"),
        ("[default2]:[rank10]: boom", 10, 2, "boom"),
        ("[trainer0|1]:boom", None, 0, "boom"),
        ("[1,3]<stderr>:boom", 3, None, "boom"),
        ("[job-7,12]<stdout>: boom", 12, None, "boom"),
        ("[pod/train-worker-5/pytorch] boom", 5, None, "boom"),
        ("2026-05-01T12:00:00.123Z [rank7]: boom", 7, None, "boom"),
        ("(RayWorker pid=12, ip=10.0.0.1) [rank9]: boom", 9, None, "boom"),
        ("192.168.13.81: [rank19]: boom", 19, None, "boom"),
        ("trainer/0 [1]:boom", None, 1, "boom"),
        ("Thu Aug 29 16:41:02 2019[3]<stderr>:boom", 3, None, "boom"),
        ("\x1b[36m(RayWorker pid=12, ip=10.0.0.1)\x1b[0m [rank9]: boom", 9, None, "boom"),
        ("[36m(RayWorker pid=12, ip=10.0.0.1) [rank9]: boom", 9, None, "boom"),
        (
            "(EngineCore pid=7) ERROR 05-01 12:00:00 [core.py:7] Bad.Error: x",
            None,
            None,
            "Bad.Error: x",
        ),
        ("E0501 12:00:00.1 12 a/api.py:732]   File x", None, None, "  File x"),
        (
            "E0501 12:00:00.1 12 a/api.py:732] failed",
            None,
            None,
            "E0501 12:00:00.1 12 a/api.py:732] failed",
        ),
        ("plain text: boom", None, None, "plain text: boom"),
        ("RuntimeError: boom", None, None, "RuntimeError: boom"),
    ],
)
def test_whose_line_it_is(line: str, rank: int | None, local_rank: int | None, text: str) -> None:
    place, rest = owner_of(line)
    assert (place.rank, place.local_rank, rest) == (rank, local_rank, text)


@pytest.mark.parametrize(
    ("path", "rank", "local_rank"),
    [
        ("logs/rank_3.log", 3, None),
        ("logs/rank-0012.log.gz", 12, None),
        ("rank4095.out", 4095, None),
        ("worker-3/stderr.log", 3, None),
        ("run/worker_7.txt", 7, None),
        ("logs/train-job-worker-11.log", 11, None),
        ("torchelastic/none_x/attempt_0/5/stderr.log", None, 5),
        ("12.log", 12, None),
        ("stderr.6", 6, None),
        ("train.log", None, None),
        ("2026-05-01.log", None, None),
        ("slurm-991.out", None, None),
        ("resnet50.log", None, None),
    ],
)
def test_the_rank_in_a_files_name(path: str, rank: int | None, local_rank: int | None) -> None:
    place = rank_of_path(path)
    assert (place.rank, place.local_rank) == (rank, local_rank)


def test_a_bare_number_is_no_rank_of_a_log_alone() -> None:
    assert rank_of_path("12.log", is_alone=True).rank is None
    assert rank_of_path("rank_12.log", is_alone=True).rank == 12


def test_srun_numbers_its_lines_and_a_program_may_number_some_of_its_own() -> None:
    srun = "\n".join(f"{rank}: step {step}" for step in range(3) for rank in range(12))
    assert is_srun(srun.encode())
    assert not is_srun(b"epoch 1\n1: loss 2.3\nsaved\ndone\n")
    judged = read({"slurm-1.out": srun + "\n07: OSError: [Errno 28] No space left on device\n"})
    assert judged.root is not None
    assert judged.root.ranks == (7,)


@pytest.mark.parametrize("world", [9, 99, 999, 4096])
def test_one_line_of_all_ranks_is_one_row(world: int) -> None:
    culprit = world // 3
    lines = [
        f"[rank{rank}]: {CLOSED.format(rank % 250)}" for rank in range(world) if rank != culprit
    ]
    random.Random(1).shuffle(lines)
    lines.insert(world // 2, f"[rank{culprit}]: OSError: [Errno 28] No space left on device")
    judged = read({"train.log": lines})
    assert [(g.family, g.count) for g in judged.groups] == [
        ("disk_full", 1), ("connection_lost", world - 1),
    ]  # fmt: skip
    assert judged.root is not None
    assert judged.root.ranks == (culprit,)
    assert len(judged.root.echoes[0].ranks) == world - 1


@pytest.mark.parametrize("world", [4, 4096])
def test_an_unknown_line_of_all_ranks_is_one_row(world: int) -> None:
    lines = [
        f"[rank{rank}]: ERROR shard {rank * 7} of 0x{rank:08x} is odd" for rank in range(world)
    ]
    judged = read({"train.log": lines})
    (row,) = judged.groups
    assert (row.count, len(row.ranks), row.role) == (world, world, None)
    assert "numbers" in row.why_grouped
    assert judged.root is None, "a line that says ERROR is no fault that anybody knows"


def test_a_traceback_is_kept_together_between_the_lines_of_other_ranks() -> None:
    lines = []
    for line in TRACE:
        lines += [f"[rank2]: {line}", "[rank0]: step 3", f"[rank1]: {line}"]
    judged = read({"train.log": lines})
    assert judged.root is not None
    group = judged.root.group
    assert (group.count, judged.root.ranks) == (2, (1, 2))
    assert group.family == "user_exception_one_rank"
    assert group.signal == "[rank2]: model.Odd: tensor 17 has no shape"
    assert "model.py:forward" in group.why_grouped


def test_the_source_that_a_traceback_shows_reports_no_error() -> None:
    lines = [
        "    raise RuntimeError('NCCL communicator was aborted')",
        "│ ❱ 12 │   raise RuntimeError('CUDA out of memory')  │",
        "---> 12     raise RuntimeError('CUDA out of memory')",
        "ValueError: odd batch",
    ]
    judged = read({"train.log": lines})
    assert [group.signal for group in judged.groups] == ["ValueError: odd batch"]


@pytest.mark.parametrize(
    ("line", "what", "family"),
    [
        (
            "2026-05-01 12:00:00 | train.py:7 | ERROR | model.Odd3Error: no shape",
            "model.Odd3Error: no shape",
            "user_exception_one_rank",
        ),
        ("  what():  the odd thing happened", "the odd thing happened", "other"),
    ],
)
def test_an_exception_behind_other_words(line: str, what: str, family: str) -> None:
    root = read({"train.log": ["step 1", line]}).root
    assert root is not None
    assert (root.group.what, root.group.family) == (what, family)


def test_refused_connections_count_only_if_nccl_gives_up_or_tries_for_long() -> None:
    line = "n1:1:2 [0] NCCL INFO Call to connect returned Connection refused, retrying"
    assert read({"x.log": [line] * 20 + ["step 1"]}).root is None
    for lines in ([line] * 99, [line, "ncclInternalError: x"]):
        root = read({"x.log": lines}).root
        assert root is not None
        assert root.group.family == "connection_refused"


def test_the_same_error_from_another_place_is_another_group() -> None:
    other = [line.replace("model.py", "loss.py") for line in TRACE]
    judged = read({"rank_0.log": TRACE, "rank_1.log": other})
    assert len(judged.groups) == 2


@pytest.mark.parametrize("chunk", [7, 64, 1000, 100_000])
def test_chunks_of_any_size_give_the_same(chunk: int) -> None:
    lines = [f"[rank1]: step {n}" for n in range(3000)]
    lines[1500:1500] = [f"[rank1]: {line}" for line in TRACE]
    lines += [f"[rank0]: {CLOSED.format(1)}"]
    whole, parts = read({"x.log": lines}), read({"x.log": lines}, chunk)
    assert [(g.key, g.count, g.first) for g in parts.groups] == [
        (g.key, g.count, g.first) for g in whole.groups
    ]


@pytest.mark.parametrize("chunk", [1000, 1_000_000])
def test_a_progress_bar_hides_nothing_of_its_line(chunk: int) -> None:
    bar = "".join(
        f"\r {n / 20:5.1f} %|####      | {n}/2000 [00:10<01:40, 20.0it/s]" for n in range(2000)
    )
    judged = read({"x.log": [bar + TRACE[0], *TRACE[1:-1], "ValueError: odd\r"]}, chunk)
    assert judged.root is not None
    assert judged.root.group.signal == "ValueError: odd"


def test_both_ends_of_a_line_without_end_are_read() -> None:
    wide = "'a': 1, " * 5000
    judged = read(
        {"x.log": [f"{wide}RuntimeError: CUDA error: an illegal memory access was encountered"]}
    )
    assert judged.root is not None
    assert judged.root.group.signal.endswith("illegal memory access was encountered")


def test_the_first_cause_stands_before_its_echoes_in_any_order_of_files() -> None:
    logs: dict[str, str | Sequence[str]] = {
        f"rank_{rank}.log": ["ok", CLOSED.format(rank)] for rank in range(8)
    }
    logs["rank_5.log"] = ["ok", "RuntimeError: CUDA error: uncorrectable ECC error encountered"]
    for seed in range(5):
        names = list(logs)
        random.Random(seed).shuffle(names)
        judged = read({name: logs[name] for name in names})
        assert judged.root is not None
        assert (judged.root.group.family, judged.root.ranks) == ("ecc", (5,))


def test_an_initiating_line_beats_an_echo_that_stands_before_it_in_the_file() -> None:
    lines = [f"[rank0]: {CLOSED.format(1)}", "[rank1]: ValueError: cannot decode the batch"]
    judged = read({"train.log": lines})
    assert judged.root is not None
    assert judged.root.ranks == (1,)
    assert judged.root.confidence > 0.6


def test_only_echoes_point_to_the_rank_that_says_nothing() -> None:
    line = (
        "[rank{0}]:[E1 x.cpp:2] [Rank {0}] Watchdog caught collective operation timeout: WorkNCCL"
    )
    logs: dict[str, str | Sequence[str]] = {
        f"rank_{rank}.log": [line.format(rank)] for rank in (1, 2, 3)
    }
    judged = read(logs | {"rank_0.log": ["step 4"]})
    assert judged.root is not None
    assert judged.root.ranks == (0,)
    assert judged.root.confidence < 0.5
    alone = read(logs)
    assert alone.root is not None
    assert alone.root.ranks == (), "those that waited are not accused"


def test_two_causes_in_two_files_are_rivals() -> None:
    judged = read({
        "rank_0.log": "OSError: [Errno 28] No space left on device",
        "rank_1.log": "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB",
    })  # fmt: skip
    assert judged.root is not None
    assert [rival.family for rival in judged.root.rivals] == ["oom_gpu"]
    assert judged.root.confidence == 0.5


def test_local_ranks_of_several_logs_accuse_no_rank() -> None:
    line = "[default1]:RuntimeError: CUDA out of memory."
    one = read({"node-a.log": line})
    assert one.root is not None
    assert one.root.ranks == (1,)
    two = read({"node-a.log": line, "node-b.log": "[default1]:fine"})
    assert two.root is not None
    assert two.root.ranks == ()


def test_versions_that_differ_count_only_between_ranks() -> None:
    banner = "NCCL version {}+cuda12.3"
    ranks = read({"rank_0.log": banner.format("2.14.3"), "rank_1.log": banner.format("2.19.3")})
    assert ranks.root is not None
    assert ranks.root.group.family == "nccl_version_mismatch"
    runs = read({"both_runs.log": [banner.format("2.14.3"), banner.format("2.19.3")]})
    assert runs.root is None, "one log may hold two runs"
    same = read({"rank_0.log": banner.format("2.19.3"), "rank_1.log": banner.format("2.19.3")})
    assert same.root is None


@pytest.mark.parametrize("line", HARMLESS, ids=lambda line: line[:40])
def test_words_of_healthy_logs_are_no_faults(line: str) -> None:
    assert read({"train.log": ["step 1", line, "step 2"]}).root is None


def test_a_few_skipped_steps_are_normal() -> None:
    line = (
        "[deepspeed] OVERFLOW! Rank 0 Skipping step. Attempted loss scale: 65536, reducing to 32768"
    )
    assert read({"x.log": [line] * 2}).root is None
    assert read({"x.log": [line] * 9}).root is not None


def test_unknown_groups_are_bounded_and_counted() -> None:
    words = ["".join(random.Random(n).choices("ghijklmn", k=12)) for n in range(3000)]
    judged = read({"x.log": [f"ERROR {word} failed" for word in words]})
    assert len(judged.groups) == 2000
    assert judged.num_ungrouped == len(set(words)) - 2000


SENTENCES = [
    line.encode() for line in (*TRACE, CLOSED, "[rank99999999999]: No space left on device")
]


@given(st.lists(st.sampled_from(SENTENCES) | st.binary(max_size=200), max_size=60))
def test_any_bytes_can_be_read(lines: list[bytes]) -> None:
    reader = Reader(known_errors())
    reader.read([b"\r\n".join(lines)], "x.log")
    evaluate(reader.tally)


def test_both_sieves_find_the_same_lines() -> None:
    texts = known_errors().literals
    fast, slow = prefilter(texts), _EachText(texts)
    block = "\n".join([*TRACE, "step 3", CLOSED, "", "Fine", "CUDA OUT OF MEMORY"] * 3).encode()
    assert list(fast.lines(block)) == list(slow.lines(block))


@pytest.mark.parametrize(
    "line",
    [
        "step 1200 | loss: 2.3134 | grad norm: 0.51 | lr 3e-4 | params 7.2B | scale 65536.0",
        "INFO engine ready, status code 200, waiting; need not want more, expected at least one",
        "rank 3: weights loaded in 3.1 s, requested than has not was not output arguments is over",
        "node1:1:2 [0] NCCL INFO Channel 00/08 : 0[1b000] -> 1[1c000] via P2P/IPC/read",
    ],
)
def test_words_of_healthy_lines_pass_no_line_of_a_large_log(line: str) -> None:
    assert [text for text in known_errors().literals if text in line.lower()] == []


def test_templates_take_out_what_differs() -> None:
    one = "rank 12 at 10.0.0.7:4242 wrote '/data/a/b.bin' (0x7f00) in 3.5 s"
    other = "rank 7 at 10.0.11.9:99 wrote '/scratch/c.bin' (0xdead) in 12 s"
    assert template(one).replace("#.#", "#") == template(other)

"""Functions that only the slow rank is in, from stacks as faulthandler and py-spy write them."""

from __future__ import annotations

import pytest

from rankscope.wire.schema import Stacks
from rankscope_server.observe.stack_samples import StackSample, difference

WAITS = """Current thread 0x00007f0000000000 (most recent call first):
  File "/venv/lib/python3.11/site-packages/torch/autograd/graph.py", line 829 in _engine_run
  File "/job/train.py", line 40 in step
  File "/job/train.py", line 60 in main
  File "/job/train.py", line 70 in <module>"""
SLOW = """Thread 0x00007f0000000001 (most recent call first):
  File "/usr/lib/python3.11/threading.py", line 331 in wait

Current thread 0x00007f0000000000 (most recent call first):
  File "/venv/lib/python3.11/site-packages/PIL/Image.py", line 9 in decode
  File "/job/data.py", line {line} in augment
  File "/job/data.py", line 30 in __getitem__
  File "/venv/lib/python3.11/site-packages/torch/utils/data/fetch.py", line 54 in fetch
  File "/job/train.py", line 60 in main
  File "/job/train.py", line 70 in <module>"""
PY_SPY = """Process 12: python train.py
Thread 12 (active): "MainThread"
    augment (/job/data.py:41)
    __getitem__ (/job/data.py:30)
    main (/job/train.py:60)"""


def stacks(rank: int, texts: list[str], since: int = 0) -> list[StackSample]:
    return [
        StackSample.of(Stacks(attempt=0, rank=rank, time_ns=since + number, text=text))
        for number, text in enumerate(texts)
    ]


def test_the_innermost_function_of_the_script_that_only_the_slow_rank_is_in() -> None:
    mine = [SLOW.format(line=41)] * 4 + [SLOW.format(line=43), WAITS]
    samples = {2: stacks(2, mine), 0: stacks(0, [WAITS] * 5 + [SLOW.format(line=41)])}
    found = difference(samples, 2, [1, 0], 0.0)
    assert found is not None
    other, what = found
    assert other == 0
    assert what.text(2, other) == (
        "In 5 of 6 stacks rank 2 is in augment (data.py:41), rank 0 in 1 of 6"
    )


def test_stacks_of_py_spy_say_the_same() -> None:
    found = difference({2: stacks(2, [PY_SPY] * 4), 0: stacks(0, [WAITS] * 4)}, 2, [0], 0.0)
    assert found is not None
    assert (found[1].function, found[1].line, found[1].mine) == ("augment", 41, 4)


def test_nothing_is_said_without_a_difference_or_with_few_or_old_stacks() -> None:
    slow, calm = [SLOW.format(line=41)] * 6, [WAITS] * 6
    assert difference({2: stacks(2, calm), 0: stacks(0, calm)}, 2, [0], 0.0) is None
    assert difference({2: stacks(2, slow[:3]), 0: stacks(0, calm)}, 2, [0], 0.0) is None
    assert difference({2: stacks(2, slow)}, 2, [0], 0.0) is None
    assert difference({2: stacks(2, slow), 0: stacks(0, calm)}, 2, [0], 3.0) is None
    assert difference({2: stacks(2, slow, 3), 0: stacks(0, calm, 3)}, 2, [0], 3.0) is not None
    assert difference({2: stacks(2, ["rubbish\0"] * 6), 0: stacks(0, [""] * 6)}, 2, [0], 0) is None


@pytest.mark.parametrize(
    ("mine", "theirs", "is_said"),
    [((3, 8), (0, 8), False), ((6, 16), (0, 16), True), ((4, 4), (0, 4), True),
     ((2, 4), (0, 4), False), ((16, 16), (13, 16), False)],
)  # fmt: skip
def test_what_may_be_chance_is_not_said(
    mine: tuple[int, int], theirs: tuple[int, int], is_said: bool
) -> None:
    """What takes a third of a rank's time is in a third of its stacks."""

    def texts(hits: int, num: int) -> list[str]:
        return [SLOW.format(line=41)] * hits + [WAITS] * (num - hits)

    found = difference({2: stacks(2, texts(*mine)), 0: stacks(0, texts(*theirs))}, 2, [0], 0.0)
    assert (found is not None) == is_said


def test_lines_of_one_function_where_the_whole_script_is_one() -> None:
    """What prints or calls .item() in a main loop is in the function that all ranks are in."""
    loop = '  File "/usr/lib/python3.12/logging/__init__.py", line 1113 in emit\n' * 2
    loop += '  File "/job/train.py", line {line} in main'
    mine = [loop.format(line=64)] * 5 + [loop.format(line=60)]
    theirs = [loop.format(line=60)] * 6
    found = difference({2: stacks(2, mine), 0: stacks(0, theirs)}, 2, [0], 0.0)
    assert found is not None
    assert found[1].text(2, 0) == (
        "In 5 of 6 stacks rank 2 is at this line of main (train.py:64), rank 0 in 0 of 6"
    )
    assert found[1].is_outside


@pytest.mark.parametrize("folder", ["/home/me/torch", "/home/me/rankscope/tests", "/rankscope"])
def test_a_folder_of_the_script_may_be_called_like_a_library(folder: str) -> None:
    slow = [f'  File "{folder}/train.py", line 7 in be_late'] * 6
    calm = ['  File "/v/lib/python3.11/site-packages/torch/autograd/graph.py", line 8 in run'] * 6
    found = difference({2: stacks(2, slow), 0: stacks(0, calm)}, 2, [0], 0.0)
    assert found is not None
    assert found[1].function == "be_late"


@pytest.mark.parametrize(
    ("frame", "is_outside"),
    [
        ("torch/nn/modules/linear.py", False),
        ("torch/optim/adam.py", False),
        ("torch/distributed/distributed_c10d.py", False),
        ("torch/utils/data/dataloader.py", False),
        ("torch/_tensor_str.py", True),  # prints a tensor
        ("torch/utils/_contextlib.py", True),  # @torch.no_grad()
        ("torch/distributed/elastic/multiprocessing/errors/__init__.py", True),  # @record
        ("torch/multiprocessing/spawn.py", True),
    ],
)
def test_whether_torch_works_in_the_thread_that_is_apart(frame: str, is_outside: bool) -> None:
    site = "/v/lib/python3.11/site-packages"
    text = (
        f'Thread 0x1 (most recent call first):\n  File "{site}/torch/nn/x.py", line 1 in forward\n'
    )
    text += '\nCurrent thread 0x2 (most recent call first):\n  File "/job/a.py", line 3 in log'
    text += f'\n  File "{site}/{frame}", line 9 in inner'
    found = difference({2: stacks(2, [text] * 4), 0: stacks(0, [WAITS] * 4)}, 2, [0], 0.0)
    assert found is not None
    assert (found[1].function, found[1].is_outside) == ("log", is_outside)

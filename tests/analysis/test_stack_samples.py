"""Functions that only the slow rank is in, from stacks as faulthandler and py-spy write them."""

from __future__ import annotations

from rankscope.schema import Stacks
from rankscope_server.detectors.stack_samples import StackSample, difference

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

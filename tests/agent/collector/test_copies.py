"""Each line once: what a handler prints of a log record is no second line."""

from __future__ import annotations

import io
import logging
import tracemalloc
from typing import Literal

import pytest

from rankscope.node.ranks import copies
from rankscope.node.ranks.copies import WithoutCopies
from rankscope.wire import schema

Stream = Literal["logging", "warning", "stdout", "stderr"]


def line(rank: int, message: str, stream: Stream = "logging") -> bytes:
    return schema.encode(
        schema.LogLine(attempt=0, rank=rank, time_ns=1, level=20, message=message, stream=stream)
    )


class Passed:
    def __init__(self) -> None:
        self.raw: list[bytes] = []
        self.take = WithoutCopies(self.raw.append)

    def __call__(self, *lines: bytes) -> list[tuple[int, str]]:
        """Return rank and message of those of `lines` that are passed on."""
        self.raw.clear()
        for one in lines:
            self.take(one)
        found = [schema.decode_record(raw) for raw in self.raw]
        return [(one.rank, one.message) for one in found if isinstance(one, schema.LogLine)]


@pytest.mark.parametrize("form", [
    "%(message)s", logging.BASIC_FORMAT, "%(asctime)s rank 1 %(levelname)s %(message)s",
    "[%(levelname)s|%(filename)s:%(lineno)s] >> %(message)s", "(Worker pid=7)\x1b[0m: %(message)s",
])  # fmt: skip
@pytest.mark.parametrize("message", ["step 250 loss 2.6108", "done", "Saving to /data/x.pt"])
def test_what_a_handler_printed_of_a_record_is_left_out(form: str, message: str) -> None:
    text = logging.Formatter(form).format(
        logging.LogRecord("train", logging.INFO, "train.py", 3, message, (), None)
    )
    passed = Passed()
    assert passed(line(1, message)) == [(1, message)]
    assert passed(line(1, text, "stderr")) == []  # the rank's own file
    assert passed(line(schema.NODE_RANK, text, "stdout")) == []  # the launcher's
    assert passed(line(1, text, "stderr")) == [(1, text)]  # printed once more: the script's


def test_a_traceback_is_left_out_as_the_block_that_it_is_printed_as() -> None:
    buffer, logger = io.StringIO(), logging.Logger("x")
    logger.addHandler(logging.StreamHandler(buffer))
    try:
        raise ValueError("bad sample 17")
    except ValueError:
        logger.exception("Error in training function:")
    head, _, block = buffer.getvalue().rstrip().partition("\n")
    passed = Passed()
    passed(line(0, buffer.getvalue()))
    assert passed(line(0, head, "stderr"), line(0, block, "stderr")) == []


def test_each_handler_prints_a_record_once() -> None:
    passed = Passed()
    passed(line(0, "Saving model"), line(1, "Saving model"))
    forms = ("INFO:train:%s", "[train] %s", "11/26 13:31:28 INFO %s")
    for form in forms:
        one = line(schema.NODE_RANK, form % "Saving model", "stdout")
        assert passed(one, one, one) == [(schema.NODE_RANK, form % "Saving model")]  # the third
    other = line(schema.NODE_RANK, "so: Saving model", "stdout")
    assert len(passed(other)) == 1  # more forms than there are handlers: the script's


def test_a_line_of_rich_is_a_copy_though_the_file_stands_behind_it() -> None:
    passed = Passed()
    passed(line(0, "Saving model to /data"))
    text = "[11/26/26 13:31:28] INFO     Saving model to /data            train.py:18"
    assert passed(line(0, text, "stdout")) == []


def test_each_line_of_a_record_of_several_is_left_out() -> None:
    passed = Passed()
    passed(line(0, "configuration\n  lr: 0.1\n  steps: 100"))
    printed = ["INFO configuration", "  lr: 0.1", "  steps: 100"]
    assert passed(*(line(0, text, "stderr") for text in printed)) == []


def test_a_warning_is_left_out_with_the_line_of_the_script_below_it() -> None:
    passed = Passed()
    place = "/home/me/train.py:13: UserWarning: lr is high"
    source = "  warnings.warn('lr is high')"
    passed(*(line(rank, "UserWarning: lr is high", "warning") for rank in range(2)))
    node = schema.NODE_RANK
    both = [line(node, text, "stderr") for text in (place, place, source, source)]
    assert passed(*both) == []
    assert len(passed(*both)) == 4  # once more, and nobody warned
    passed(line(0, "UserWarning: lr is high", "warning"))
    assert passed(line(0, place, "stderr"), line(0, "step 1", "stderr")) == [(0, "step 1")]
    late = schema.encode(schema.LogLine(
        attempt=0, rank=0, time_ns=3 * 10**9, level=20, message="  indented", stream="stderr",
    ))  # fmt: skip
    assert passed(late) == [(0, "  indented")]


def test_the_traceback_of_an_exception_that_is_recorded_is_no_second_line() -> None:
    trace = "Traceback (most recent call last):\n  File 'a.py', line 3\nKeyError: 'rate'"
    passed = Passed()
    for where in ("main", "collective"):
        error = schema.ErrorRaised(
            attempt=0, rank=1, time_ns=1, type="KeyError", message="'rate'",
            traceback=f"{trace}\n", where=where,
        )  # fmt: skip
        passed(schema.encode(error))
    assert len(passed.raw) == 1  # the error itself goes on
    block = line(schema.NODE_RANK, trace, "stderr")
    assert passed(block, block) == [(schema.NODE_RANK, trace)]  # the second is another's


def test_lines_of_others_and_lines_that_only_look_alike_stay() -> None:
    passed = Passed()
    passed(line(1, "a long step 10 ended"), line(1, "ok"), line(1, "done"))
    stay = [
        line(2, "a long step 10 ended", "stdout"),  # another rank's print
        line(1, "a long step 10 ended in 3 s", "stdout"),
        line(1, "not-a long step 10 ended", "stdout"),
        line(1, "all is ok", "stdout"),  # too short to know
        line(1, "copying the data is done", "stdout"),  # a sentence of its own
        line(1, "ended", "stdout"),
    ]
    assert len(passed(*stay)) == len(stay)
    assert passed(line(1, "a long step 10 ended", "stdout")) == []


def test_a_message_of_many_ranks_is_left_out_as_often_as_it_was_logged() -> None:
    passed = Passed()
    passed(*(line(rank, "epoch 1 begins") for rank in range(4)))
    printed = [line(schema.NODE_RANK, "INFO:train:epoch 1 begins", "stdout")] * 5
    assert len(passed(*printed)) == 1


def test_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copies, "_MOST_KNOWN", 50)
    passed = Passed()
    passed(*(line(0, f"step {number} of a run") for number in range(500)))
    assert len(passed.take._newest) == 50
    assert sum(sum(lengths.values()) for lengths in passed.take._lengths.values()) == 50
    assert len(passed.take._logged) == len(passed.take._times) == 50
    assert passed(line(0, "step 10 of a run", "stdout")) == [(0, "step 10 of a run")]
    assert passed(line(0, "step 499 of a run", "stdout")) == []


def test_memory_is_bounded_in_bytes_too() -> None:
    passed = Passed()
    tracemalloc.start()
    for number in range(2000):
        passed.take(line(0, f"{number} " + "\u4e2d" * 30_000))
        passed.take(line(0, f"{number} " * 3000 + "x" * 16, "stdout"))  # a prefix as long
        passed.raw.clear()
    assert tracemalloc.get_traced_memory()[0] < 4 << 20
    tracemalloc.stop()
    text = "1999 " + "\u4e2d" * 30_000
    assert passed(line(0, f"INFO {text}", "stderr"), line(0, text[5:], "stderr")) == [(0, text[5:])]


def test_a_line_costs_the_same_however_many_messages_end_alike() -> None:
    """Of messages with one ending those of other lengths and texts are not looked at."""
    passed = Passed()
    texts = [f"step {number}: loss 2.{number % 997:03d}, lr 1.0000e-04 (cuda:0)"
             for number in range(copies._MOST_KNOWN)]  # fmt: skip
    for text in texts:
        passed.take(line(0, text))
    ends = passed.take._known_ends
    assert len(list(ends(f"INFO {texts[5]}"))) == 1
    (lengths,) = passed.take._lengths.values()
    assert len(lengths) == 4  # of as many digits as a step has
    assert passed(*(line(0, f"INFO {text}", "stderr") for text in texts)) == []


def test_what_is_damaged_or_no_line_passes() -> None:
    passed = Passed()
    broken = b"\x82\xa4kind\xa3log\xa5level"
    passed.take(broken)
    event = schema.encode(schema.Event(attempt=0, rank=0, time_ns=1, name="checkpoint"))
    passed.take(event)
    assert passed.raw == [broken, event]

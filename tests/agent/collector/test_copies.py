"""Each line once: what a handler prints of a log record is no second line."""

from __future__ import annotations

import io
import logging
from typing import Literal

import pytest

from rankscope import schema
from rankscope.collector import copies
from rankscope.collector.copies import WithoutCopies

Stream = Literal["logging", "stdout", "stderr"]


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
    assert sum(map(len, passed.take._by_tail.values())) == 50
    assert len(passed.take._left) == len(passed.take._times) == 50
    assert passed(line(0, "step 10 of a run", "stdout")) == [(0, "step 10 of a run")]
    assert passed(line(0, "step 499 of a run", "stdout")) == []


def test_what_is_damaged_or_no_line_passes() -> None:
    passed = Passed()
    broken = b"\x82\xa4kind\xa3log\xa5level"
    passed.take(broken)
    event = schema.encode(schema.Event(attempt=0, rank=0, time_ns=1, name="checkpoint"))
    passed.take(event)
    assert passed.raw == [broken, event]

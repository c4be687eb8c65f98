"""A loss that a script prints is the headline where no line leaves a doubt; else it is nothing."""

from __future__ import annotations

import math

import pytest

from rankscope.wire import schema
from rankscope_server.ingest.printed_loss import PrintedLoss, printed_loss
from tests.server.conftest import Sender, log_line

NOW = 1_700_000_000 * 10**9


def line(text: str, stream: str = "stdout") -> schema.LogLine:
    return schema.LogLine(attempt=0, rank=-1, time_ns=1, level=20, message=text, stream=stream)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "value", "step"),
    [
        ("iter 120: loss 4.1034, time 55.03ms, mfu -100.00%", 4.1034, 120),
        ("Train Epoch: 1 [640/60000 (1%)]\tLoss: 2.297470", 2.29747, 0),
        ("step 250: train loss 2.5, val loss 2.6", 2.5, 250),
        ("{'loss': 2.345, 'grad_norm': 1.2, 'epoch': 0.5}", 2.345, 0),
        ("{'loss': '2.345', 'learning_rate': '1e-5'}", 2.345, 0),
        ("train_loss=0.3 interval=5", 0.3, 0),
        ("train/loss: 0.3", 0.3, 0),
        ("Loss/train: 0.25", 0.25, 0),
        ("loss=tensor(2.3001, grad_fn=<MeanBackward0>)", 2.3001, 0),
        ("[GPU0] Epoch 3 | Iter 10 | Train Loss 4.53211 ", 4.53211, 10),
        ("Epoch 1 | loss 0.5 | aux loss 0.2", 0.5, 0),
        ("  12%|#  | 12/100 [00:01<00:08, loss=1.23]", 1.23, 0),
        ("step=12 total_loss: 1.2 loss: 0.9", 0.9, 12),
        ("global_step: 7, loss: -1.5e-03", -0.0015, 7),
        ("Step: 3 - Loss: 1.0000", 1.0, 3),
        ("step 1 loss 3.5\nstep 2 loss 3.25\ndone", 3.25, 2),
    ],
)
def test_lines_that_leave_no_doubt(text: str, value: float, step: int) -> None:
    assert printed_loss(line(text)) == PrintedLoss(value, step)


@pytest.mark.parametrize(
    "text",
    [
        "Test set: Average loss: 0.0512, Accuracy: 98%",
        "{'eval_loss': 2.345, 'epoch': 1.0}",
        "validation | loss 0.4",
        "kl loss 0.3",
        "avg_loss=0.2",
        "best loss: 0.1",
        "loss scale: 65536.0",
        "packet loss: 0.0%",
        "lossless 0.4",
        "The loss of 0.5 percent",
        "epoch 3 loss 0.5 loss 0.6",
        "logging step 7 loss 3",
        "gloss 0.5",
        "no number: loss",
        "x" * 100_000 + " loss 0.5",
        "a" * 1_999 + "loss",
    ],
)
def test_lines_that_may_mean_something_else(text: str) -> None:
    assert printed_loss(line(text)) is None


def test_a_loss_that_is_no_number_is_one() -> None:
    found = printed_loss(line("step 3: loss nan"))
    assert found is not None
    assert math.isnan(found.value)


@pytest.mark.parametrize("stream", ["agent", "warning"])
def test_what_the_agent_says_is_not_the_script_s(stream: str) -> None:
    assert printed_loss(line("loss 0.5", stream)) is None


def printed_at(second: int, text: str, rank: int = -1) -> schema.LogLine:
    return log_line(text, rank=rank, stream="stdout", time_ns=NOW + second * 10**9)


def test_the_newest_that_is_printed_is_the_headline(sender: Sender) -> None:
    counted = schema.Metrics(attempt=0, rank=0, time_ns=NOW, step=40, values={"loss": 0.7})
    sender.send(counted)
    assert headline(sender) == (0.7, "step 40, the value of backward()")
    sender.send(
        printed_at(1, "Epoch 1 iter 30: loss 2.9"), printed_at(2, "Epoch 2 iter 10: loss 2.8")
    )
    assert headline(sender) == (2.8, "step 10, as the script prints it")
    sender.send(printed_at(3, "epoch 3 | loss: 2.75"), printed_at(4, "val loss 3.5"))
    assert headline(sender) == (2.75, "as the script prints it")
    both_ranks = [printed_at(5, f"[RANK{rank}] step 9 | Train Loss 2.{rank}") for rank in (4, 3)]
    sender.send(*both_ranks)  # the launcher passes on both as its own
    assert headline(sender) == (2.3, "step 9, as the script prints it")
    sender.send(printed_at(6, "iter 20: loss nan"))
    assert headline(sender) == (None, "step 20, as the script prints it, not a finite number")
    logged = schema.Metrics(attempt=0, rank=0, time_ns=NOW, step=5, values={"logged_loss": 2.5})
    sender.send(logged)
    assert headline(sender) == (2.5, "step 5, as the framework logs it")


def headline(sender: Sender) -> tuple[float | None, str]:
    (loss,) = [number for number in sender.get("")["numbers"] if number["key"] == "loss"]
    return loss["value"], loss["reference_text"]

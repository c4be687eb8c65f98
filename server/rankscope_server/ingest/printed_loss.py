"""The training loss in what a script prints or logs, where there is no doubt which number it is.

`iter 120: loss 4.1034`, `Epoch: 1 [640/60000] Loss: 2.29`, `{'train_loss': 2.1}`: the word `loss`,
alone or of training, and one number with a fraction behind it. A line that speaks of validation,
a loss with another name before it (`kl loss`, `avg_loss`) and two numbers in a line give none.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from rankscope.wire.schema import LogLine

_STREAMS = ("stdout", "stderr", "logging")
_MAX_TEXT = 2_000
_MAX_STEP = 1 << 47
# After it may come what tensors, dictionaries and tables put around a number.
_LOSS = re.compile(
    r"""(?P<before>[A-Za-z]{0,20})(?P<glue>[^A-Za-z0-9]{0,3})(?<![A-Za-z])loss(?:/train)?"""
    r"""["']?\s{0,4}[:=|]?\s{0,4}"""
    r"""(?:tensor\(|["'])?(?P<value>[-+]?(?:\d+\.\d+(?:e[-+]?\d+)?|nan|inf)\b)""",
    re.IGNORECASE,
)
_STEP = re.compile(
    r"\b(?:global[ _]?)?(?:step|iter|iteration)s?\b[\s:=#\[(]{1,4}(?P<step>\d{1,15})\b",
    re.IGNORECASE,
)
_OF_TRAINING = ("train", "training")
_NOT_OF_TRAINING = re.compile(
    r"(?<![a-z])(?:val|valid|validation|eval|evaluation|test|testing|dev)(?![a-z])", re.IGNORECASE
)


@dataclass(frozen=True, slots=True)
class PrintedLoss:
    """A loss that a line shows, and the step that it names, 0 where it names none."""

    value: float
    step: int


def printed_loss(line: LogLine) -> PrintedLoss | None:
    """Return the last training loss that a line, or a block of lines, shows; None for none."""
    if line.stream not in _STREAMS or "loss" not in line.message[:_MAX_TEXT].lower():
        return None
    for text in reversed(line.message[:_MAX_TEXT].splitlines()):
        if "loss" not in text.lower():  # as most lines of a traceback
            continue
        values = set(_values(text))
        if len(values) == 1:
            step = _STEP.search(text)
            known = int(step["step"]) if step is not None else 0
            return PrintedLoss(values.pop(), known if known < _MAX_STEP else 0)
    return None


def _values(text: str) -> list[float]:
    """Return the numbers that may be the loss: those named as of training, else plain ones."""
    plain: list[float] = []
    of_training: list[float] = []
    for found in _LOSS.finditer(text):
        word, is_joined = found["before"].lower(), found["glue"] in ("_", "/", "-", " ", ".")
        if word in _OF_TRAINING and found["glue"]:
            of_training.append(float(found["value"]))
        elif not word or not is_joined:
            plain.append(float(found["value"]))
    if of_training:
        return of_training
    return [] if _NOT_OF_TRAINING.search(text) else plain

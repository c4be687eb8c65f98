"""Floods are counted, told, and cost no error."""

from __future__ import annotations

import logging

import pytest

from rankscope.output import log_limits
from rankscope.output.log_limits import Limiter, template_of


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def limiter(clock: Clock) -> Limiter:
    return Limiter(clock)


def kept(limiter: Limiter, count: int, logger: str, level: int, template: str) -> int:
    return sum(limiter.admit(logger, level, template) for _ in range(count))


def test_records_that_look_alike_share_a_budget(limiter: Limiter, clock: Clock) -> None:
    assert kept(limiter, 3000, "a", logging.INFO, "x %d") == log_limits.ALIKE_BURST
    assert kept(limiter, 10, "a", logging.INFO, "other") == 10
    assert kept(limiter, 10, "b", logging.INFO, "x %d") == 10
    (alike,) = limiter.take_suppressed()
    assert (alike.logger, alike.template, alike.suppressed) == ("a", "x %d", 2000)
    assert not limiter.take_suppressed()
    clock.now += 1
    assert kept(limiter, 3000, "a", logging.INFO, "x %d") == log_limits.ALIKE_PER_SECOND


@pytest.mark.parametrize("level", [logging.ERROR, logging.CRITICAL])
def test_no_flood_of_less_costs_an_error(limiter: Limiter, level: int) -> None:
    for number in range(100):
        kept(limiter, 500, "noise", logging.WARNING, f"template {number}")
    assert not limiter.admit("new", logging.WARNING, "y")
    assert kept(limiter, 500, "a", level, "it broke") == 500


def test_many_templates_take_no_memory(limiter: Limiter) -> None:
    for number in range(3 * log_limits.MAX_TEMPLATES):
        limiter.admit("a", logging.INFO, f"template {number}")
    assert len(limiter._alike) <= log_limits.MAX_TEMPLATES


def test_templates() -> None:
    assert template_of("step %d", has_arguments=True) == "step %d"
    assert template_of("step 12 loss 3.25", has_arguments=False) == "step # loss #"
    assert template_of({"a": 1}, has_arguments=False) == "dict"

"""What is wrong with what was asked for."""

from __future__ import annotations


class PlanError(Exception):
    """A value cannot be used: which one, what is wrong with it, and what would be right."""

    def __init__(self, field: str, problem: str, remedy: str) -> None:
        super().__init__(f"{field}: {problem}. {remedy}")
        self.field, self.problem, self.remedy = field, problem, remedy

"""Which rows of fresh systems stand for which."""

from __future__ import annotations

import pytest

from tests.fresh.__main__ import TEST, Result, table
from tests.fresh.rows import ROWS, harder

BY_NAME = {row.name: row for row in ROWS}


@pytest.mark.parametrize(
    ("name", "names"),
    [
        ("blanks", ["odd"]),
        ("ascii", ["odd"]),
        ("no-home", ["odd"]),
        ("no-ipv6", ["narrow"]),
        ("no-tun", ["narrow"]),
        ("root-no-tun", ["root-no-namespaces", "root-narrow"]),
        ("debian-13", []),
        ("debian-14", []),
        ("open-tun", []),
        ("compiler", []),
        ("newest-torch", []),
    ],
)
def test_only_less_of_the_same_system_is_harder(name: str, names: list[str]) -> None:
    assert [row.name for row in harder(BY_NAME[name])] == names


def test_an_open_tun_is_more_and_a_row_does_not_stand_for_itself() -> None:
    assert "open-tun" not in {row.name for row in harder(BY_NAME["bare"])}
    assert all(row not in harder(row) for row in ROWS)


def _result(row: str, code: int) -> Result:
    return Result(row, TEST, "tree", "", code, 1.0, "3 passed, 1 failed", {})


@pytest.mark.parametrize(
    ("kept", "cell"),
    [
        ([("no-tun", 0)], "| right |"),
        ([("no-tun", 0), ("narrow", 1)], "| right |"),
        ([("no-tun", 1), ("narrow", 0)], "| right in **narrow** |"),
        ([("narrow", 0), ("no-tun", 1)], "| **3 passed, 1 failed** |"),
        ([("no-tun", 1), ("narrow", 1)], "| **3 passed, 1 failed** in **narrow** |"),
    ],
)
def test_a_later_result_of_a_harder_row_stands_for_one_that_is_not_right(
    kept: list[tuple[str, int]], cell: str
) -> None:
    page = table([_result(row, code) for row, code in kept])
    (line,) = [line for line in page.splitlines() if line.startswith("| **no-tun**")]
    assert cell in line

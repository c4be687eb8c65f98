"""Which rows of fresh systems stand for which."""

from __future__ import annotations

import pytest

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

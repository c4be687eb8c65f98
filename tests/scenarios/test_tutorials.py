"""The tutorials run as they are written: each is typed in an empty folder."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest

from tests.scenarios import slurm
from tests.tutorials import PAGES, Session, is_shown

LINE = "Rank 1 on node-a is slower than its 3 peers since step 129: rank 12 waits 3.5 ms"


@pytest.mark.multiproc
@pytest.mark.parametrize(
    "page", [page.stem for page in sorted(PAGES.glob("*.md")) if page.stem != "slurm"]
)
def test_a_tutorial_runs_as_it_is_written(tmp_path: Path, page: str) -> None:
    _type(tmp_path, page)


@pytest.mark.multiproc
@pytest.mark.needs("root", "slurm")
def test_the_tutorial_of_slurm_runs_as_it_is_written(tmp_path: Path) -> None:
    with slurm.cluster(tmp_path / "slurm") as variables:
        _type(tmp_path, "slurm", SLURM_CONF=variables["SLURM_CONF"])


def _type(folder: Path, page: str, **variables: str) -> None:
    with contextlib.closing(Session(folder, variables)) as session:
        session.type_page(PAGES / f"{page}.md")


def test_what_is_shown_may_differ_in_numbers_and_where_it_says_so_alone() -> None:
    for line in ("Rank 1 on node-a is slower than its 4 peers since step 7", "Rank 1 … 1,250.0 ms"):
        assert is_shown(line, f"before\nrankscope: \x1b[1m{LINE}\x1b[0m\nafter"), line
    for line in ("Rank 2 on …", "Rank 11 on …", "… faster", "Rank 1 on node-b", "Rank 1 … rank 1"):
        assert not is_shown(line, f"before\n{LINE}\nafter"), line

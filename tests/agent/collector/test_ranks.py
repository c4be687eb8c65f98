"""What the header of a rank's ring says of its end."""

from __future__ import annotations

from pathlib import Path

from rankscope.files import ring
from rankscope.node.losses import Ledger
from rankscope.node.offsets import RankOffsets
from rankscope.node.ranks.rank import FollowedRank
from tests.agent.collector.fake_rank import FakeRank


def follow(run: Path, fake: FakeRank) -> FollowedRank:
    key = str(fake.directory.relative_to(run))
    rank = FollowedRank(run, key, RankOffsets(), Ledger(), "h", lambda *_: None)
    rank.collect(lambda raw: None, gone=True)
    return rank


def test_a_rank_that_left_at_once_with_code_0_ended_in_the_last_step_that_was_done(
    tmp_path: Path,
) -> None:
    fake = FakeRank(tmp_path, 0)
    for _ in range(3):
        fake.step()
    rank = follow(tmp_path, fake)
    assert (rank.last_step, rank.end_step("clean"), rank.end_step("exit_code")) == (4, 3, 4)
    fake.says_ended(ring.CLEAN)  # it knew in which step it was
    assert rank.end_step("clean") == 4


def test_a_rank_without_a_step_ended_in_the_one_that_it_was_in(tmp_path: Path) -> None:
    rank = follow(tmp_path, FakeRank(tmp_path, 0))
    assert rank.end_step("clean") == rank.last_step

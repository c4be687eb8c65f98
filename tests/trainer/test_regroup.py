"""Regrouping: what it refuses, what it makes of advice, and what a group does when it is cut."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch.distributed as dist

from rankscope_trainer.command_line import load_settings
from rankscope_trainer.errors import SettingError
from rankscope_trainer.regroup.advice import Exclusion, exclusion_of
from rankscope_trainer.regroup.group import Group, is_lost_peer
from rankscope_trainer.regroup.training import train_in_groups
from rankscope_trainer.settings import DEFAULT_MICROBATCHES
from rankscope_trainer.stopping import Stopping

REFUSED = sorted(DEFAULT_MICROBATCHES.keys() - {"ddp", "ring"})


@pytest.mark.parametrize("strategy", REFUSED)
def test_a_strategy_that_loses_with_a_rank_what_it_holds_is_refused(strategy: str) -> None:
    wanted = ["--regroup", "--strategy", strategy, "--layers", "8"]
    with pytest.raises(SettingError, match=rf"`regroup`: {strategy} loses with a rank") as raised:
        load_settings(wanted, {}, 8 if strategy == "hybrid" else 4)
    assert raised.value.name == "regroup"


@pytest.mark.parametrize(
    ("flags", "name"),
    [
        ("--comm-hook powersgd", "comm_hook"),
        ("--comm-hook fp8", "comm_hook"),
        ("--uneven-ratio 0.1", "uneven_ratio"),
        ("--static-graph", "static_graph"),
        ("--patience 2 --validate-every 5", "patience"),
        ("--keep-best --checkpoint-dir x", "keep_best"),
        ("--check-batches", "check_batches"),
        ("--data-path x", "data_path"),
        ("--grace-seconds 5", "grace_seconds"),
        ("--least-seconds 5", "least_seconds"),
        ("--loader-workers 1", "loader_workers"),
        ("--obey-advice", "obey_advice"),
    ],
)
def test_what_does_not_go_with_it_is_named(flags: str, name: str) -> None:
    with pytest.raises(SettingError) as raised:
        load_settings(["--regroup", *flags.split()], {}, 2)
    assert raised.value.name == name


@pytest.mark.parametrize("flags", ["--samples x", "--ask-advice"])
def test_what_belongs_to_it_is_refused_without(flags: str) -> None:
    with pytest.raises(SettingError, match="only regroup has it"):
        load_settings(flags.split(), {}, 2)


def test_a_launcher_that_ends_all_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANKSCOPE_TRAINER_STORE", raising=False)
    with pytest.raises(SettingError, match=r"python -m rankscope_trainer\.regroup"):
        train_in_groups(load_settings(["--regroup"], {}, 1), Stopping())


ADVICE: dict[str, Any] = {
    "action": "exclude_host", "ranks": [3, 5], "epoch": 4, "valid_until_ms": 2000.0, "why": "slow",
}  # fmt: skip


def test_advice_leaves_ranks_out_only_where_it_says_so_now() -> None:
    assert exclusion_of(ADVICE, 1999.0) == Exclusion(4, (3, 5), "slow")
    assert exclusion_of(ADVICE, 2000.0) is None
    assert exclusion_of({}, 0.0) is None
    for other in ("wait", "nothing", "unknown", "restart_from_checkpoint"):
        assert exclusion_of(ADVICE | {"action": other}, 0.0) is None
    assert exclusion_of(ADVICE | {"ranks": []}, 0.0) is None


def test_errors_of_the_program_are_no_lost_peers() -> None:
    assert is_lost_peer(dist.DistStoreError("wait timeout after 1000ms"))  # type: ignore[attr-defined]
    assert is_lost_peer(RuntimeError("[gloo/transport/tcp/pair.cc:553] Connection closed by peer"))
    assert not is_lost_peer(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))


def test_a_group_is_made_again_after_one_that_was_cut() -> None:
    store = dist.HashStore()  # type: ignore[attr-defined]
    group, asked = Group(store, backend="gloo", timeout_seconds=30.0), threading.Event()

    def is_broken(number: int) -> bool:
        asked.set()
        return True

    for number in (1, 2):
        asked.clear()
        group.make(number, 0, 1, is_broken)
        assert asked.wait(20)
        group.leave(is_broken=True)
        assert not dist.is_initialized()

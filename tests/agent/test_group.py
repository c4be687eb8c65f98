"""What a process group says of itself."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch.distributed as dist

from rankscope.rank.group import backend_of


@pytest.fixture
def store() -> Iterator[dist.Store]:
    yield dist.HashStore()
    dist.destroy_process_group()


@pytest.mark.parametrize("named", [{}, {"backend": "gloo"}, {"backend": "cpu:gloo"}])
def test_a_group_has_the_backend_that_does_its_work(
    store: dist.Store, named: dict[str, str]
) -> None:
    dist.init_process_group(store=store, rank=0, world_size=1, **named)
    assert backend_of(dist.group.WORLD) == "gloo"
    assert backend_of(dist.new_group([0])) == "gloo"


@pytest.mark.parametrize(
    ("told", "config", "backend"),
    [
        ("nccl", "cuda:nccl", "nccl"),
        ("undefined", "cpu:gloo,cuda:nccl", "nccl"),
        ("cpu:gloo,cuda:nccl", "cpu:gloo,cuda:nccl", "nccl"),
        ("undefined", "xpu:xccl,cpu:gloo", "xccl"),
        ("undefined", "cpu:gloo", "gloo"),
        ("undefined", "", "undefined"),
    ],
)
def test_of_several_it_is_that_of_the_device(
    monkeypatch: pytest.MonkeyPatch, told: str, config: str, backend: str
) -> None:
    monkeypatch.setattr(dist, "get_backend", lambda _: told)
    monkeypatch.setattr(dist, "get_backend_config", lambda _: config or "undefined")
    assert backend_of(None) == backend

"""Searches that are kept under a name."""

from __future__ import annotations

from typing import Any

from rankscope_server.store.saved import MAX_SAVED
from tests.server.conftest import TestClient

PATH = "/api/v1/searches"


def kept(client: TestClient) -> dict[str, str]:
    return {one["name"]: one["q"] for one in client.get(PATH).json()["searches"]}


def keep(client: TestClient, name: str, q: str) -> Any:
    return client.post(PATH, json={"name": name, "q": q})


def test_a_search_is_kept_replaced_and_dropped(client: TestClient) -> None:
    assert kept(client) == {}
    assert keep(client, "oom", "memory level:error").status_code == 200
    assert keep(client, " nccl ", "nccl*").status_code == 200
    assert kept(client) == {"nccl": "nccl*", "oom": "memory level:error"}
    keep(client, "oom", '"out of memory"')
    assert kept(client)["oom"] == '"out of memory"'
    first = client.get(PATH).json()["searches"][0]
    left = client.delete(f"{PATH}/{first['id']}").json()["searches"]
    assert [one["name"] for one in left] == ["oom"]
    gone = client.delete(f"{PATH}/{first['id']}")
    assert (gone.status_code, gone.json()["error"]["field"]) == (404, "id")


def test_a_search_that_cannot_be_read_is_not_kept(client: TestClient) -> None:
    refused = keep(client, "bad", "levle:error")
    assert refused.status_code == 422
    assert refused.json()["error"]["at"] == [0, 6]
    for name, q, field in (("", "x", "name"), ("x", " ", "q"), ("\x00", "x", "name")):
        answer = keep(client, name, q)
        assert (answer.status_code, answer.json()["error"]["field"]) == (422, field)
    assert client.post(PATH, content=b"{").status_code == 422
    assert kept(client) == {}


def test_there_is_a_bound(client: TestClient) -> None:
    for number in range(MAX_SAVED):
        assert keep(client, str(number), "x").status_code == 200
    assert keep(client, "one more", "x").status_code == 409
    assert keep(client, "7", "y").status_code == 200

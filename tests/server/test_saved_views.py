"""Views of the dashboard that are kept under a name."""

from __future__ import annotations

from typing import Any

import pytest

from rankscope_server.store.saved import MAX_SAVED
from tests.server.conftest import TestClient

PATH = "/api/v1/views"


def kept(client: TestClient) -> dict[str, str]:
    return {one["name"]: one["address"] for one in client.get(PATH).json()["views"]}


def keep(client: TestClient, name: str, address: str) -> Any:
    return client.post(PATH, json={"name": name, "address": address})


def test_a_view_is_kept_replaced_and_dropped_beside_a_search_of_its_name(
    client: TestClient,
) -> None:
    client.post("/api/v1/searches", json={"name": "warnings", "q": "level:warning"})
    assert keep(client, "warnings", "runs/*/logs?level=warning").status_code == 200
    assert keep(client, " map ", "runs/slow/ranks?steps=1-200&sel=5@121").status_code == 200
    assert kept(client) == {
        "map": "runs/slow/ranks?steps=1-200&sel=5@121",
        "warnings": "runs/*/logs?level=warning",
    }
    keep(client, "map", "runs?status=failed")
    assert kept(client)["map"] == "runs?status=failed"
    first = client.get(PATH).json()["views"][0]
    left = client.delete(f"{PATH}/{first['id']}").json()["views"]
    assert [one["name"] for one in left] == ["warnings"]
    assert client.delete(f"{PATH}/{first['id']}").status_code == 404
    assert len(client.get("/api/v1/searches").json()["searches"]) == 1
    assert client.get(f"{PATH}?format=csv").text.splitlines()[0] == "id,name,address,created_ms"


@pytest.mark.parametrize(
    "address",
    ["", "https://elsewhere.example/", "//elsewhere.example", "/runs", "javascript:alert(1)",
     "runs/a b", "runs\\..\\x", "runs//x", "runs#x", "a" * 4_001],
)  # fmt: skip
def test_only_a_place_of_the_dashboard_is_kept(client: TestClient, address: str) -> None:
    refused = keep(client, "away", address)
    assert refused.status_code == 422
    assert refused.json()["error"]["field"] == "address"
    assert kept(client) == {}


def test_there_is_a_bound(client: TestClient) -> None:
    for number in range(MAX_SAVED):
        assert keep(client, str(number), "runs").status_code == 200
    assert keep(client, "one more", "runs").status_code == 409
    assert keep(client, "7", "fleet").status_code == 200

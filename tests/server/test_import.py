"""`rankscope import` against a server: dumps become a run with a verdict."""

from __future__ import annotations

import json
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path

import pytest

from rankscope import cli
from rankscope.imports.flight_dumps import read_dumps
from tests.agent.test_flight_dumps import dump, entry
from tests.server.conftest import ServerProcess

DATA = Path("/work/shared/data/flight_recorder/gpu_error_2nd")


@pytest.mark.skipif(not DATA.is_dir(), reason="recorded dumps are not on this machine")
def test_imported_dumps_get_a_verdict_and_pages(
    start_server: Callable[..., ServerProcess], capsys: pytest.CaptureFixture[str]
) -> None:
    server = start_server("--look-seconds", "0.2")
    code = cli.main(["import", str(DATA), "--run", "second", "--server", server.url, "--json"])
    said = json.loads(capsys.readouterr().out)
    assert code == 0, said
    assert (said["ranks"], said["world_size"]) == (16, 16)
    deadline = time.monotonic() + 20
    while True:
        address = f"{server.url}/api/v1/runs/second/findings"
        with urllib.request.urlopen(address, timeout=10) as reply:
            found = json.load(reply)["open"]
        if found:
            break
        assert time.monotonic() < deadline, "no finding"
        time.sleep(0.2)
    assert [finding["ranks"] for finding in found] == [[9, 14]]
    with urllib.request.urlopen(f"{server.url}/api/v1/runs/second/ranks", timeout=10) as reply:
        assert reply.status == 200


def test_what_cannot_be_imported_says_why(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "dump_0").write_bytes(b"torn")
    assert cli.main(["import", str(tmp_path)]) == 1
    assert "dump_0" in capsys.readouterr().err
    (tmp_path / "dump_1.json").write_text(json.dumps(dump([entry(0)])))
    assert sorted(read_dumps([tmp_path])[0]) == [1]
    nobody = "http://127.0.0.1:9"
    assert cli.main(["import", str(tmp_path), "--server", nobody]) == 2
    assert cli.main(["import", str(tmp_path), "--server", "ftp://x"]) == 64

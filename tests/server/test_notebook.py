"""What a notebook shows of a run: whole, harmless, and the same as the API says."""

from __future__ import annotations

import base64
import os
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import nbclient
import nbformat
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import rankscope
from rankscope.data.pictures import Map, Verdict
from tests.api import get
from tests.server.conftest import ServerProcess
from tests.server.seed import seed_run, wait_until_judged

BOOK = Path(__file__).resolve().parents[2] / "docs" / "notebooks" / "slow_rank.ipynb"
SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    server = ServerProcess(tmp_path_factory.mktemp("noted")).start()
    seed_run(server.url, run_id="my-run", ranks=4, steps=300, slow_rank=2)
    seed_run(server.url, run_id="well", ranks=2, steps=60, fault="none")
    wait_until_judged(server.url)
    yield server
    server.close()


class Page(HTMLParser):
    """The elements, attributes and texts of some HTML."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.attributes: set[str] = set()
        self.text = ""
        self.feed(html)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.attributes |= {name for name, _ in attrs}

    def handle_data(self, data: str) -> None:
        self.text += data


def test_a_run_is_shown_with_its_verdict_and_its_map(server: ServerProcess) -> None:
    page = get(f"{server.url}/api/v1/runs/my-run")
    with rankscope.open("my-run", server=server.url) as run:
        assert run.verdict == page["answer"]["text"]
        assert isinstance(run.verdict, str)
        shown = run._repr_mimebundle_()
        drawn = run.map()
    html = Page(shown["text/html"])
    for text in (page["verdict"]["what"], page["verdict"]["why"], page["verdict"]["next"],
                 page["verdict"]["would_be_wrong_if"], page["coverage"]["text"]):  # fmt: skip
        assert text in html.text
    assert html.tags == {"div", "span", "svg", "title", "rect", "text", "path"}
    assert page["answer"]["text"] in shown["text/plain"]
    assert drawn.labels[0] == "Rank 2"
    assert np.nanmedian(drawn.values[0, drawn.steps >= 120]) > 1.3
    assert np.nanmedian(drawn.values[0, drawn.steps < 100]) == pytest.approx(1.0, abs=0.05)
    assert np.nanmedian(drawn.values[1:]) == pytest.approx(1.0, abs=0.05)
    lines = repr(drawn).splitlines()
    assert lines[0] == drawn.text
    assert set(lines[1]) & set("▒▓█")
    assert not set("".join(lines[2:])) & set("▒▓█")


def test_milliseconds_and_ranges_are_those_of_the_api(server: ServerProcess) -> None:
    with rankscope.open("my-run", server=server.url) as run:
        drawn = run.map("step", steps=(201, 300), order="rank")
        with pytest.raises(rankscope.data.kinds.DataError, match="metric"):
            run.map("no-such")
    assert (drawn.unit, drawn.labels) == ("ms", ["Rank 0", "Rank 1", "Rank 2", "Rank 3"])
    assert (drawn.steps[0], drawn.fields["step_hi"]) == (201, 300)
    exact = get(f"{server.url}/api/v1/runs/my-run/cell?rank=1&step=250")["step_ms"]
    step = float(drawn.fields["value_hi"] - drawn.fields["value_lo"]) / 254
    assert drawn.values[1, list(drawn.steps).index(250)] == pytest.approx(exact, abs=step)
    ET.fromstring(drawn._repr_svg_())


def test_a_run_without_a_culprit_says_what_is_known(server: ServerProcess) -> None:
    with rankscope.open("well", server=server.url) as run:
        html = Page(run.verdict._repr_html_())
        assert run.verdict in html.text
        assert run.verdict.fields["verdict"] is None


_HOSTILE = st.text(
    alphabet=st.characters(codec="utf-8") | st.sampled_from("<>&\"'\x1b\x00\u202e\ufffe")
)


@given(
    text=_HOSTILE, cells=st.binary(min_size=6, max_size=6), unit=st.sampled_from(["ratio", "ms"])
)
def test_no_text_becomes_markup(text: str, cells: bytes, unit: str) -> None:
    fields: dict[str, Any] = {
        "unit": unit, "rows": [{"label": text}, {"label": text}], "columns": 3, "bin": 4,
        "step_lo": 1, "step_hi": 12, "cells": base64.b64encode(cells).decode(), "text": text,
        "usual": None, "value_lo": 1.0, "value_hi": 9.0,
    }  # fmt: skip
    drawn = Map(fields)
    assert np.isnan(drawn.values).tolist() == [
        [cell == 255 for cell in row] for row in (cells[:3], cells[3:])
    ]
    tree = ET.fromstring(drawn._repr_svg_())
    assert {node.tag for node in tree.iter()} <= {
        SVG + tag for tag in ("svg", "title", "rect", "text", "path")
    }
    verdict = {"what": text, "why": text, "next": text, "severity": text, "confidence": 0.5,
               "confidence_text": text, "would_be_wrong_if": text,
               "evidence": [{"text": text}]}  # fmt: skip
    overview = {"answer": {"text": text, "detail": text, "state": text}, "verdict": verdict,
                "coverage": {"text": text}}  # fmt: skip
    html = Page(Verdict(overview)._repr_html_())
    assert html.tags <= {"div", "span"}
    assert html.attributes == {"style"}


@pytest.mark.multiproc
def test_the_worked_notebook_does_what_it_says(
    server: ServerProcess, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    book = nbformat.read(BOOK, as_version=4)
    assert not any(cell.get("outputs") for cell in book.cells)
    for name in [name for name in os.environ if name.startswith("RANKSCOPE")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("RANKSCOPE_SERVER", server.url)
    done = nbclient.NotebookClient(
        book, timeout=120, resources={"metadata": {"path": str(tmp_path)}}
    ).execute()
    outputs = [one for cell in done.cells for one in cell.get("outputs", [])]
    data = [one["data"] for one in outputs if "data" in one]
    verdict = get(f"{server.url}/api/v1/runs/my-run")["verdict"]
    assert sum(verdict["what"] in part.get("text/html", "") for part in data) == 2
    assert any(part.get("image/svg+xml", "").startswith("<svg") for part in data)
    printed = "".join(one["text"] for one in outputs if one["output_type"] == "stream")
    cost = f"{verdict['cost_throughput_ratio']:.0%} of the throughput"
    assert f"[2] {verdict['onset_step']} {cost}" in printed
    assert "Rank 2 1.4" in printed

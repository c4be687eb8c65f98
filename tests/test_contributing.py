"""The worked examples of CONTRIBUTING.md work as they are written, on a copy of the repository."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
COPIED = (
    "agent", "server", "reference_trainer", "tests", "web", "docs", ".ci", "benchmarks",
    "README.md", "CONTRIBUTING.md", "ARCHITECTURE.md", "pyproject.toml",
)  # fmt: skip
MOST_PLACES = 4  # and a test
BLOCK = re.compile(r"(?P<before>.*?)^```(?P<language>\w+)\n(?P<body>.*?)^```$", re.M | re.S)
PATH = re.compile(r"`((?:agent|server|reference_trainer|tests|docs)/[\w./-]+\.\w+)`")
AFTER = re.compile(r"after\s+(?:``(.+)``|`([^`]+)`):\s*\Z")


@dataclass(frozen=True)
class Example:
    """One worked example: its title and its text."""

    title: str
    text: str

    def carry_out(self, root: Path) -> Iterator[Path]:
        """Change the copy in `root` as the text says; yield each file that was changed."""
        path: Path | None = None
        for block in BLOCK.finditer(self.text):
            before, body = block["before"], block["body"]
            if block["language"] == "sh":
                continue
            if named := PATH.findall(before):
                path = root / named[-1]
            assert path is not None, f"{self.title}: no file is named before\n{body}"
            if "new file" in before:
                assert not path.exists()
                path.write_text(body)
            elif after := AFTER.search(before):
                insert(path, after[1] or after[2], body)
            else:
                assert "t the end" in before
                path.write_text(path.read_text().rstrip("\n") + "\n" + body)
            yield path

    @property
    def commands(self) -> list[str]:
        """The shell commands that show that it works."""
        blocks = [b["body"] for b in BLOCK.finditer(self.text) if b["language"] == "sh"]
        return [line for body in blocks for line in body.splitlines()]


def insert(path: Path, line: str, body: str) -> None:
    lines = path.read_text().splitlines(keepends=True)
    assert f"{line}\n" in lines, f"{path.name} has no line {line!r}"
    at = lines.index(f"{line}\n") + 1
    path.write_text("".join([*lines[:at], body, *lines[at:]]))


def examples() -> list[Example]:
    text = (ROOT / "CONTRIBUTING.md").read_text()
    section = text.partition("\n## Worked examples\n")[2].partition("\n## ")[0]
    parts = [part.partition("\n") for part in section.split("\n### ")[1:]]
    return [Example(title, rest) for title, _, rest in parts]


def test_there_is_an_example_of_everything_that_is_added_often() -> None:
    titles = " ".join(example.title for example in examples())
    assert len(examples()) == 6
    for word in ("check", "hook", "detector", "fault", "fault and the detector", "known error"):
        assert word in titles


@pytest.mark.multiproc
@pytest.mark.parametrize("example", examples(), ids=lambda example: example.title)
def test_it_works_as_it_is_written(example: Example, tmp_path: Path) -> None:
    for name in COPIED:
        if (ROOT / name).is_dir():
            ignored = shutil.ignore_patterns("__pycache__", "node_modules")
            shutil.copytree(ROOT / name, tmp_path / name, ignore=ignored)
        else:
            shutil.copy(ROOT / name, tmp_path / name)
    changed = set(example.carry_out(tmp_path))
    assert len([path for path in changed if not path.name.startswith("test_")]) <= MOST_PLACES
    paths = [str(tmp_path / name) for name in ("agent", "server", "reference_trainer")]
    environ = os.environ | {
        "PYTHONPATH": os.pathsep.join(paths),
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "COLUMNS": "200",
    }
    assert example.commands
    for command in example.commands:
        done = subprocess.run(
            ["bash", "-o", "pipefail", "-c", command], cwd=tmp_path, env=environ,
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"

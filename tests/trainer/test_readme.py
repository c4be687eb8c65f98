from __future__ import annotations

import re
from pathlib import Path

import pytest

from rankscope_trainer.strategies import STRATEGIES

REPOSITORY = Path(__file__).parents[2]
TRAINER = REPOSITORY / "reference_trainer"
README = (TRAINER / "README.md").read_text()


@pytest.mark.parametrize("path", sorted(set(re.findall(r"`([\w/]+/[\w/]+\.\w+)`", README))))
def test_every_file_that_the_readme_names_exists(path: str) -> None:
    assert (TRAINER / path).is_file() or (REPOSITORY / path).is_file()


@pytest.mark.parametrize("name", STRATEGIES)
def test_every_strategy_is_in_the_readme(name: str) -> None:
    assert f"| `{name}` |" in README


def test_every_name_of_code_that_the_readme_points_at_exists() -> None:
    for owner, member in re.findall(r"`([A-Z]\w+)\.(\w+)`", README):
        sources = [path.read_text() for path in TRAINER.rglob("*.py")]
        assert any(f"class {owner}" in text and f"def {member}" in text for text in sources)

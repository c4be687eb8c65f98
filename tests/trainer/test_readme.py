from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from rankscope_trainer.command_line import load_settings
from rankscope_trainer.errors import SettingError
from rankscope_trainer.strategies import STRATEGIES
from tests.fork_server import server
from tests.trainer.launch import COUNTED_TRAINER

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


# "rank 0 INFO step 10 loss 4.30" of each run that the README shows, without time and tokens.
RUN = re.compile(
    r"^\$ rankscope run -- torchrun --standalone --nproc-per-node (\d) -m rankscope_trainer \\\n"
    r" +--config (\S+) --steps 20\n((?:rank .+\n)+)",
    re.M,
)
LINE = re.compile(r"(rank \d) INFO step (\d+) loss (\d+\.\d+)")


def test_every_strategy_has_a_configuration_and_a_run() -> None:
    configs = [Path(config) for _, config, _ in RUN.findall(README)]
    assert {config.stem for config in configs} == set(STRATEGIES)
    assert set(configs) == {path.relative_to(REPOSITORY) for path in TRAINER.glob("configs/*")}
    for ranks, config, _ in RUN.findall(README):
        settings = load_settings(["--config", str(REPOSITORY / config)], {}, int(ranks))
        assert settings.strategy == Path(config).stem
        text = (REPOSITORY / config).read_text()
        assert f"--nproc-per-node {ranks}" in text
        assert config in text


MISTAKE = re.compile(
    r"^rankscope run -- torchrun --standalone --nproc-per-node (\d)(?: --max-restarts \d)?"
    r" -m rankscope_trainer"
    r"((?: \\\n|.)+)$",
    re.M,
)


def test_the_commands_of_mistakes_are_taken_by_the_trainer_but_for_the_one_that_it_refuses() -> (
    None
):
    lessons = MISTAKE.findall((REPOSITORY / "docs/mistakes.md").read_text())
    assert len(lessons) >= 10
    refused = []
    for ranks, flags in lessons:
        words = shlex.split(flags.replace("\\\n", " "))
        try:
            load_settings(words, {}, int(ranks))
        except SettingError:
            refused.append(words)
    assert refused == [["--strategy", "tensor"]]


def test_the_memory_that_the_readme_shows_is_the_planners() -> None:
    (command,) = re.findall(r"^(rankscope plan .+\\\n.+)$", README, re.M)
    words = shlex.split(command.replace("\\\n", " "))[1:]
    finished = subprocess.run(
        [sys.executable, "-m", "rankscope", *words, "--json"],
        capture_output=True, text=True, check=True, timeout=120,
    )  # fmt: skip
    planned = {}
    for one in json.loads(finished.stdout)["strategies"]:
        parts = [one["memory_bytes"][part] for part in ("weights", "gradients", "optimizer")]
        planned[one["strategy"]] = round(sum(parts) / 1e6)
    planned["hybrid"] = planned.pop("tensor+pipeline")
    table = README.partition("## When to take which")[2].partition("\n## ")[0]
    shown = re.findall(r"^\| `(\w+)` \| [^|]+ \| ?(\d*) \|", table, re.M)
    assert {name for name, _ in shown} == set(STRATEGIES)
    assert {name: int(megabytes) for name, megabytes in shown if megabytes} == planned


@pytest.mark.multiproc
@pytest.mark.parametrize(
    ("ranks", "config", "shown"), RUN.findall(README), ids=[c for _, c, _ in RUN.findall(README)]
)
def test_runs_print_what_the_readme_shows(
    tmp_path: Path, ranks: str, config: str, shown: str
) -> None:
    """To a tenth: each version of Python has other sources, and Hogwild never repeats itself."""
    words = [str(tmp_path), "--config", str(REPOSITORY / config), "--steps", "20"]
    output = tmp_path / "output.txt"
    code = server().run(COUNTED_TRAINER, int(ranks), words, output)
    assert code == 0, output.read_text()
    expected, found = ({line[:2]: float(line[2]) for line in LINE.findall(text)}
                       for text in (shown, output.read_text()))  # fmt: skip
    assert len(expected) == len(shown.splitlines())
    for line, loss in expected.items():
        assert found[line] == pytest.approx(loss, rel=0.1), line

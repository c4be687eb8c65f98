from __future__ import annotations

import dataclasses
import subprocess
import sys
from pathlib import Path

import pytest

from rankscope_trainer.command_line import help_text, load_settings
from rankscope_trainer.errors import EXIT_USAGE, SettingError
from rankscope_trainer.faults import FAULTS
from rankscope_trainer.settings import DEFAULT_MICROBATCHES, Settings
from rankscope_trainer.strategies import STRATEGIES
from rankscope_trainer.strategies.traffic import TRAFFIC

REPOSITORY = Path(__file__).parents[2]
FIELDS = dataclasses.fields(Settings)


def test_every_setting_is_in_the_help_and_in_the_readme() -> None:
    readme = (REPOSITORY / "reference_trainer/README.md").read_text()
    text = help_text()
    for field in FIELDS:
        assert f"--{field.name.replace('_', '-')}" in text
        assert field.metadata["sentence"].endswith(".")
        assert f"`{field.name}`" in readme


@pytest.mark.parametrize("path", sorted((REPOSITORY / "reference_trainer/configs").glob("*.toml")))
def test_the_configurations_that_we_ship_are_valid(path: Path) -> None:
    assert load_settings(["--config", str(path)], {}, world_size=4).strategy == path.stem


def test_flags_win_over_environment_over_file_over_defaults(tmp_path: Path) -> None:
    config = tmp_path / "config.toml"
    config.write_text('steps = 7\nwidth = 32\nfault = ["hang:rank=0,start=1"]\nresume = false\n')
    environment = {"RANKSCOPE_FAULTS": "crash:rank=0,start=2; slow_data:rank=0,start=1;"}
    settings = load_settings(["--config", str(config), "--width", "48"], environment)
    assert (settings.steps, settings.width, settings.resume) == (7, 48, False)
    assert settings.fault == ("crash:rank=0,start=2", "slow_data:rank=0,start=1")
    assert settings.layers == Settings().layers
    flags = ["--fault", "crash:rank=0,start=3", "--fault", "hang:rank=0,start=4"]
    assert len(load_settings(flags, environment).fault) == 2


@pytest.mark.parametrize(
    ("arguments", "name", "words"),
    [
        (["--steps", "many"], "steps", "'many' is not a whole number"),
        (["--steps", "0"], "steps", "Give at least 1"),
        (["--steps"], "steps", "expected one argument"),
        (["--dropout", "1"], "dropout", "Give less than 1"),
        (["--dropout", "nan"], "dropout", "nan"),
        (["--learning-rate", "inf"], "learning_rate", "inf"),
        (["--strategy", "magic"], "strategy", "Choose one of: ddp, pipeline"),
        (["--width", "50"], "heads", "multiple of heads"),
        (["--stepz", "3"], "command line", "--stepz"),
        (["--config", "absent.toml"], "config", "Name a TOML file that exists"),
        (["--strategy", "pipeline", "--layers", "3"], "layers", "at least 4 layers"),
        (["--strategy", "pipeline", "--microbatches", "3"], "microbatches", "gpipe"),
        (["--validate-every", "5", "--validation-ratio", "0"], "validation_ratio", "above 0"),
        (["--fault", "crash:rank=4,start=1"], "fault", "Ranks are 0 to 3"),
        (["--checkpoint-every", "-1"], "checkpoint_every", "Give at least 1"),
    ],
)
def test_a_wrong_flag_names_the_setting_and_the_remedy(
    arguments: list[str], name: str, words: str
) -> None:
    with pytest.raises(SettingError) as raised:
        load_settings(arguments, {}, world_size=4)
    assert raised.value.name == name
    assert words in str(raised.value)


@pytest.mark.parametrize(
    ("text", "name", "words"),
    [
        ("stepz = 3", "stepz", "Known settings: ask_advice, average_every"),
        ("steps = 3.5", "steps", "wrong type"),
        ("steps = true", "steps", "wrong type"),
        ("resume = 1", "resume", "wrong type"),
        ("fault = [1]", "fault", "list of texts"),
        ("steps = ", "config", "Correct the file"),
        ("strategy = 3", "strategy", "wrong type"),
    ],
)
def test_a_wrong_file_names_the_setting_and_the_remedy(
    text: str, name: str, words: str, tmp_path: Path
) -> None:
    (tmp_path / "config.toml").write_text(text)
    with pytest.raises(SettingError) as raised:
        load_settings(["--config", str(tmp_path / "config.toml")], {})
    assert raised.value.name == name
    assert words in str(raised.value)


def test_a_whole_number_may_stand_for_a_fraction(tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text("clip = 1")
    assert load_settings(["--config", str(tmp_path / "config.toml")], {}).clip == 1.0


def test_every_strategy_has_an_entry_a_number_of_microbatches_and_its_traffic() -> None:
    assert tuple(DEFAULT_MICROBATCHES) == tuple(STRATEGIES)
    assert TRAFFIC.keys() == STRATEGIES.keys()


def test_microbatches_follow_the_strategy_unless_they_are_given() -> None:
    assert load_settings([], {}, 4).microbatches_for(4) == 2
    assert load_settings(["--strategy", "pipeline"], {}, 4).microbatches_for(4) == 8
    assert load_settings(["--microbatches", "5"], {}, 4).microbatches_for(4) == 5


def test_the_command_ends_with_the_code_for_wrong_use() -> None:
    command = [sys.executable, "-m", "rankscope_trainer", "--fault", "magic:rank=0,start=1"]
    finished = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert finished.returncode == EXIT_USAGE
    known = ", ".join(fault.name for fault in FAULTS)
    assert finished.stderr == (
        f"rankscope_trainer: setting `fault`: 'magic' is no fault. Known faults: {known}.\n"
    )


@pytest.mark.parametrize("flag", ["--help", "--list-faults"])
def test_help_does_not_wait_for_torch(flag: str) -> None:
    code = (
        "import sys; from rankscope_trainer.__main__ import main; main([sys.argv[1]]);"
        " raise SystemExit('torch' in sys.modules)"
    )
    finished = subprocess.run(
        [sys.executable, "-c", code, flag], capture_output=True, text=True, check=False, timeout=60
    )
    assert finished.returncode == 0, finished.stderr
    assert "slow_compute" in finished.stdout if flag == "--list-faults" else finished.stdout

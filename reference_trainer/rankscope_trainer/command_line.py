"""Reads the settings from file, environment and command line, and checks them together.

Later sources win: defaults, then the TOML file named by `--config`, then `RANKSCOPE_FAULTS` and
`RANKSCOPE_FAULT_MANIFEST`, then the flags.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from rankscope_trainer.errors import SettingError
from rankscope_trainer.faults.plan import parse_fault
from rankscope_trainer.settings import Settings
from rankscope_trainer.strategies import STRATEGIES, checks

# Environment variables that give a setting, so that a launcher need not edit a command line.
ENVIRONMENT = {"RANKSCOPE_FAULTS": "fault", "RANKSCOPE_FAULT_MANIFEST": "fault_manifest"}

_FIELDS = {field.name: field for field in dataclasses.fields(Settings)}


def load_settings(
    arguments: Sequence[str], environment: Mapping[str, str], world_size: int = 1
) -> Settings:
    """Merge defaults, file, environment and flags, and check the result against the world size."""
    flags = vars(_parser().parse_args(arguments))
    flags.pop("help", None)
    flags.pop("list_faults", None)
    values: dict[str, Any] = {}
    config = flags.pop("config", None)
    if config is not None:
        values |= _read_toml(Path(config))
    for variable, name in ENVIRONMENT.items():
        if environment.get(variable):
            text = environment[variable]
            values[name] = text.split(";") if name == "fault" else text
    values |= flags
    checked = {name: _check_value(_FIELDS[name], value) for name, value in values.items()}
    settings = Settings(**checked)
    _check_together(settings, world_size)
    return settings


def help_text() -> str:
    """Return the text of `--help`."""
    return _parser().format_help()


class _Parser(argparse.ArgumentParser):
    """An argument parser that fails the way the rest of the settings fail."""

    def error(self, message: str) -> NoReturn:
        """Raise instead of leaving: the caller decides how a wrong setting ends."""
        remedy = "`python -m rankscope_trainer --help` lists every setting"
        flag, colon, problem = message.removeprefix("argument ").partition(": ")
        if colon and message.startswith("argument "):
            raise SettingError(flag.split("/")[0].lstrip("-").replace("-", "_"), problem, remedy)
        raise SettingError("command line", message, remedy)


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="torchrun --standalone --nproc-per-node N -m rankscope_trainer",
        description="Train a small byte-level GPT on the Python standard library's own sources.",
        epilog="Without torchrun, `python -m rankscope_trainer` trains with a single rank.",
        argument_default=argparse.SUPPRESS,
        allow_abbrev=False,
        add_help=False,
    )
    parser.add_argument("--help", "-h", action="store_true", help="Show this text and leave.")
    parser.add_argument(
        "--list-faults", action="store_true", help="Show each fault and the finding it leads to."
    )
    parser.add_argument(
        "--config", metavar="FILE", help="Read settings from this TOML file; flags win over it."
    )
    for field in _FIELDS.values():
        flag = "--" + field.name.replace("_", "-")
        text = field.metadata["sentence"].replace("%", "%%")
        if field.name == "fault":
            parser.add_argument(flag, action="append", metavar="FAULT", help=text)
        elif isinstance(field.default, bool):
            parser.add_argument(flag, action=argparse.BooleanOptionalAction, help=text)
        else:
            metavar = "|".join(field.metadata["choices"]) or type(field.default).__name__.upper()
            if field.default != "":
                text += f" Default: {field.default}."
            parser.add_argument(flag, metavar=metavar, help=text)
    return parser


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        remedy = "Name a TOML file that exists"
        raise SettingError("config", f"cannot read {path}: {error.strerror}", remedy) from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise SettingError("config", f"{path} is not TOML: {error}", "Correct the file") from error
    for name in values:
        if name not in _FIELDS:
            known = ", ".join(sorted(_FIELDS))
            raise SettingError(name, f"unknown in {path}", f"Known settings: {known}")
    return values


def _check_value(field: dataclasses.Field[Any], value: Any) -> Any:
    """Turn a flag's text or a TOML value into the field's type, or say what is wrong with it."""
    name, metadata = field.name, field.metadata
    if name == "fault":
        return _check_faults(value)
    kind = type(field.default)
    if isinstance(value, str) and kind in (int, float):
        try:
            value = kind(value)
        except ValueError as error:
            word = "a whole number" if kind is int else "a number"
            raise SettingError(name, f"{value!r} is not {word}", f"Give {word}") from error
    if kind is float and type(value) is int:
        value = float(value)
    if type(value) is not kind:
        raise SettingError(
            name, f"{value!r} has the wrong type", f"Give a value like {field.default!r}"
        )
    if isinstance(value, float) and not math.isfinite(value):
        raise SettingError(name, f"{value} is not finite", "Give a finite number")
    choices = metadata["choices"]
    if choices and value not in choices:
        raise SettingError(name, f"{value!r} is unknown", f"Choose one of: {', '.join(choices)}")
    minimum, below = metadata["minimum"], metadata["below"]
    if minimum is not None and not value >= minimum:
        raise SettingError(name, f"{value} is too small", f"Give at least {minimum}")
    if below is not None and not value < below:
        raise SettingError(name, f"{value} is too large", f"Give less than {below}")
    return value


def _check_faults(value: Any) -> tuple[str, ...]:
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise SettingError("fault", f"{value!r} is not a list of texts", 'Write fault = ["..."]')
    return tuple(text.strip() for text in texts if text.strip())


def _check_together(settings: Settings, world_size: int) -> None:
    """Refuse what only the combination of several settings, or the world size, makes impossible."""
    if settings.width % settings.heads:
        problem = f"{settings.heads} heads do not divide width {settings.width} evenly"
        raise SettingError("heads", problem, "Choose a width that is a multiple of heads")
    STRATEGIES[settings.strategy].check(settings, world_size)
    if settings.layer_seconds:
        checks.layer_seconds(settings)
    checks.regroup(settings)
    if settings.global_batch:
        checks.global_batch(settings, world_size)
    if settings.uneven_ratio and settings.strategy != "ddp":
        raise SettingError("uneven_ratio", "only ddp can join", "Choose ddp, or leave it out")
    if settings.loader_workers and settings.data_path:
        problem = "processes of their own cannot report to the rank that the data went away"
        raise SettingError("loader_workers", problem, "Leave it out, or data_path")
    for text in settings.fault:
        parse_fault(text, world_size, settings.steps)
    if settings.patience and not settings.validate_every:
        raise SettingError("patience", "nothing is validated", "Give validate_every as well")
    _check_checkpoints(settings)
    if settings.validate_every and not settings.validation_ratio:
        raise SettingError(
            "validation_ratio", "there is nothing to validate on", "Give a ratio above 0"
        )


def _check_checkpoints(settings: Settings) -> None:
    """The best checkpoint is known where each has a loss of its own. Raises SettingError."""
    if settings.keep_best and not settings.checkpoint_dir:
        problem = "no checkpoint is written"
        raise SettingError("keep_best", problem, "Give a checkpoint_dir as well")
    if (
        settings.keep_best
        and settings.validate_every
        and settings.checkpoint_every % settings.validate_every
    ):
        raise SettingError(
            "keep_best",
            f"checkpoints of every {settings.checkpoint_every} steps are not all validated, every"
            f" {settings.validate_every}",
            "Let checkpoint_every be a multiple of validate_every",
        )
    if settings.resume_from == "best" and not (settings.resume and settings.checkpoint_dir):
        problem = "the run continues from no checkpoint"
        raise SettingError("resume_from", problem, "Give a checkpoint_dir, and leave out no-resume")

"""Every setting of the agent, written once: the environment variables, the help and the docs.

A setting comes from the environment (`RANKSCOPE_...`), so that one `export` reaches every rank,
the collector and the launcher alike; `rankscope run` and `rankscope.init` set the same names.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, TypeVar

PREFIX = "RANKSCOPE_"
_SWITCH = dict.fromkeys(("1", "true", "yes", "on"), True) | dict.fromkeys(
    ("0", "false", "no", "off"), False
)
Value = TypeVar("Value", str, int, float, bool)


@dataclass(frozen=True)
class Setting:
    """One row of the table: its name, default value, one sentence, and the range of a number."""

    name: str
    default: str | int | float | bool
    help: str
    bounds: tuple[float, float] | None = None

    @property
    def variable(self) -> str:
        """The environment variable that sets it."""
        return PREFIX + self.name.upper()


def _row(default: Value, help: str, *bounds: float) -> Value:
    """Return a field of Settings: `help` is one sentence, `bounds` the range of a number."""
    declared: Value = field(default=default, metadata={"help": help, "bounds": bounds or None})
    return declared


_PAUSE_S = (0.05, 86_400.0)  # without a pause a loop would keep a processor busy
_SLOTS = (1024, 1 << 24)  # below, a ring is not made
_BYTES = (1, 1 << 50)


@dataclass(frozen=True)
class Settings:
    """The values in force."""

    server: str = _row("", "Address of the server; empty: record to the run directory only.")
    token: str = _row("", "Token sent to the server with every batch.")
    ca_file: str = _row(
        "", "Certificates (PEM) to trust beside the system's, of a server with its own authority."
    )
    run_id: str = _row("", "Name that all nodes of the run share; empty: taken from the launcher.")
    name: str = _row("", "Title of the run on the dashboard; empty: the script's name.")
    tags: str = _row("", "Labels of the run, comma separated: team=vision,ticket=https://host/7.")
    track: str = _row(
        "", "Trackers that `rankscope run` writes verdict and steps to: mlflow, wandb, ..."
    )
    dir: str = _row("", "Base of the run directories; empty: the user's runtime directory.")
    hooks: str = _row("all", "Hooks to install, by name, comma separated; 'all' or 'none'.")
    collectives: str = _row("auto", "Source of collectives: auto, or one that `doctor` lists.")
    flight_recorder: str = _row("auto", "Times of NCCL from Flight Recorder: auto, on, off.")
    probe_build: bool = _row(True, "Compile the native probe at first use, if none is ready-made.")
    overhead_percent: float = _row(
        0.5, "Most of the training thread's time for collectives.", 1e-6, 100.0
    )
    log_level: str = _row("INFO", "Lowest level of logging records that are kept.")
    collective_slots: int = _row(16384, "Slots of the ring of collectives, 96 bytes each.", *_SLOTS)
    step_slots: int = _row(4096, "Slots of the ring of steps, 176 bytes each.", *_SLOTS)
    sample_seconds: float = _row(1.0, "Seconds between two samples of host and GPUs.", *_PAUSE_S)
    flush_seconds: float = _row(1.0, "Seconds between two batches to the server.", *_PAUSE_S)
    spool_bytes: int = _row(256 << 20, "Most bytes kept on disk while the server is away.", *_BYTES)
    keep_hours: float = _row(
        24.0, "Hours a run directory stays once the server has all of it.", 1e-3, 1e6
    )
    keep_bytes: int = _row(
        1 << 30,
        "Most bytes of such directories and those without a server; the oldest go first.",
        *_BYTES,
    )
    hang_stack_seconds: float = _row(
        2.5, "Take stacks of a rank silent for so long in a hang.", *_PAUSE_S
    )
    collector: bool = _row(True, "Start a node collector if none runs.")
    commands: bool = _row(True, "Do what the server asks: stacks, profiles, recording off and on.")
    advice_execute: bool = _row(False, "Let `rankscope advice --execute` run commands.")
    numbers_seconds: float = _row(
        0.2, "Least seconds between two records of loss, rate and such.", 1e-9, 86_400.0
    )
    numbers_budget_ratio: float = _row(
        0.004, "Most of a step that sampled numbers may take.", 1e-9, 1e9
    )
    replica_check_steps: int = _row(
        128, "Steps between two checksums of replicas under DDP.", 1, 1 << 30
    )
    peak_flops: float = _row(0.0, "Peak FLOP/s of one device, for MFU; 0.0: not known.", 0.0, 1e21)


SETTINGS: tuple[Setting, ...] = tuple(
    Setting(each.name, getattr(Settings, each.name), **each.metadata) for each in fields(Settings)
)


class SettingError(ValueError):
    """A value that a setting cannot take; the message names the variable and the remedy."""


def from_environment(environ: Mapping[str, str]) -> Settings:
    """Read all settings. Raises SettingError for the first value that does not parse."""
    values: dict[str, Any] = {}
    for setting in SETTINGS:
        text = environ.get(setting.variable)
        if text is not None and text != "":
            values[setting.name] = _parse(setting, text)
    return Settings(**values)


def to_environment(settings: Settings) -> dict[str, str]:
    """Return the variables that reproduce the values that differ from their defaults."""
    variables = {}
    for setting in SETTINGS:
        value = getattr(settings, setting.name)
        if value != setting.default:
            variables[setting.variable] = as_text(value)
    return variables


def tags_of(settings: Settings) -> dict[str, str]:
    """Return the labels of the run; one without a value has an empty one."""
    pairs = (part.strip().partition("=") for part in settings.tags.split(","))
    return {name.strip(): value.strip() for name, _, value in pairs if name.strip()}


def as_text(value: str | int | float | bool) -> str:
    """Return a value as the environment holds it."""
    return str(int(value)) if isinstance(value, bool) else str(value)


def _parse(setting: Setting, text: str) -> str | int | float | bool:
    kind, where = type(setting.default), f"{setting.variable}={text!r}"
    if kind is str:
        return text.strip() if setting.name == "token" else text  # of a file it has a line end
    if kind is bool:
        if text.strip().lower() not in _SWITCH:
            raise SettingError(f"{where}: set 1 or 0. {setting.help}")
        return _SWITCH[text.strip().lower()]
    try:
        value = int(text) if kind is int else float(text)
    except ValueError:
        raise SettingError(
            f"{where}: expected {kind.__name__}, for example {setting.default}. {setting.help}"
        ) from None
    if setting.bounds is not None and not setting.bounds[0] <= value <= setting.bounds[1]:
        least, greatest = setting.bounds  # "not a number" is between no two
        raise SettingError(f"{where}: set {least:.12g} to {greatest:.12g}. {setting.help}")
    return value

"""Every setting of the agent, written once: the environment variables, the help and the docs.

A setting comes from the environment (`RANKSCOPE_...`), so that one `export` reaches every rank,
the collector and the launcher alike; `rankscope run` and `rankscope.init` set the same names.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

PREFIX = "RANKSCOPE_"


@dataclass(frozen=True)
class Setting:
    """One row of the table: its name, default value and one sentence."""

    name: str
    default: str | int | float | bool
    help: str

    @property
    def variable(self) -> str:
        """The environment variable that sets it."""
        return PREFIX + self.name.upper()


SETTINGS: tuple[Setting, ...] = (
    Setting("server", "", "Address of the server; empty: record to the run directory only."),
    Setting("token", "", "Token sent to the server with every batch."),
    Setting("run_id", "", "Name that all nodes of the run share; empty: taken from the launcher."),
    Setting("name", "", "Title of the run on the dashboard; empty: the script's name."),
    Setting("dir", "", "Base of the run directories; empty: the user's runtime directory."),
    Setting("hooks", "all", "Hooks to install, by name, comma separated; 'all' or 'none'."),
    Setting("collectives", "auto", "Source of collectives: auto, or one that `doctor` lists."),
    Setting("flight_recorder", "auto", "Times of NCCL from Flight Recorder: auto, on, off."),
    Setting("probe_build", True, "Compile the native probe at first use, if none is ready-made."),
    Setting("overhead_percent", 0.5, "Most of the training thread's time for collectives."),
    Setting("log_level", "INFO", "Lowest level of logging records that are kept."),
    Setting("collective_slots", 16384, "Slots of the ring of collectives, 96 bytes each."),
    Setting("step_slots", 4096, "Slots of the ring of steps, 176 bytes each."),
    Setting("sample_seconds", 1.0, "Seconds between two samples of host and GPUs."),
    Setting("flush_seconds", 1.0, "Seconds between two batches to the server."),
    Setting("spool_bytes", 256 << 20, "Most bytes kept on disk while the server is away."),
    Setting("keep_hours", 24.0, "Hours a run directory stays once the server has all of it."),
    Setting("keep_bytes", 1 << 30, "Most bytes of such directories; the oldest go first."),
    Setting("hang_stack_seconds", 2.5, "Take stacks of a rank silent for so long in a hang."),
    Setting("collector", True, "Start a node collector if none runs."),
    Setting("commands", True, "Do what the server asks: stacks, profiles, recording off and on."),
    Setting("numbers_seconds", 0.2, "Least seconds between two records of loss, rate and such."),
    Setting("numbers_budget_ratio", 0.004, "Most of a step that sampled numbers may take."),
    Setting("replica_check_steps", 128, "Steps between two checksums of replicas under DDP."),
    Setting("peak_flops", 0.0, "Peak FLOP/s of one device, for MFU; 0.0: not known."),
)


@dataclass(frozen=True)
class Settings:
    """The values in force, one attribute per row of SETTINGS."""

    server: str = ""
    token: str = ""
    run_id: str = ""
    name: str = ""
    dir: str = ""
    hooks: str = "all"
    collectives: str = "auto"
    flight_recorder: str = "auto"
    probe_build: bool = True
    overhead_percent: float = 0.5
    log_level: str = "INFO"
    collective_slots: int = 16384
    step_slots: int = 4096
    sample_seconds: float = 1.0
    flush_seconds: float = 1.0
    spool_bytes: int = 256 << 20
    keep_hours: float = 24.0
    keep_bytes: int = 1 << 30
    hang_stack_seconds: float = 2.5
    collector: bool = True
    commands: bool = True
    numbers_seconds: float = 0.2
    numbers_budget_ratio: float = 0.004
    replica_check_steps: int = 128
    peak_flops: float = 0.0


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
            variables[setting.variable] = str(int(value)) if value in (True, False) else str(value)
    return variables


def _parse(setting: Setting, text: str) -> str | int | float | bool:
    kind = type(setting.default)
    if kind is bool:
        if text.lower() in ("1", "true", "yes", "on"):
            return True
        if text.lower() in ("0", "false", "no", "off"):
            return False
        raise SettingError(f"{setting.variable}={text!r}: say 1 or 0. {setting.help}")
    if kind is str:
        return text
    try:
        value = int(text) if kind is int else float(text)
    except ValueError:
        raise SettingError(
            f"{setting.variable}={text!r}: expected {kind.__name__}, for example "
            f"{setting.default}. {setting.help}"
        ) from None
    if not 0 < value < float("inf"):
        raise SettingError(f"{setting.variable}={text!r}: must be above zero. {setting.help}")
    return value


assert [field.name for field in fields(Settings)] == [setting.name for setting in SETTINGS]

"""Programs of others that tests run beside Rankscope, and the versions with which those passed.

    python -m tests.integrations remember OUTCOMES      of `pytest -p tests.outcomes --outcomes ...`

`make test-all` remembers by itself. docs/integrations.md is made of both: a program whose test did
not pass with the newest code keeps the version with which it did, and one that never did has none.
"""

from __future__ import annotations

import datetime
import json
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tests import outcomes
from tests.others import PYTHON
from tests.outcomes import Outcome

VERSIONS = Path(__file__).with_name("integrations.json")
_NUMBER = re.compile(r"\d+(?:\.\d+)+\S*")
_ASK = "import importlib.metadata, sys; print(importlib.metadata.version(sys.argv[1]))"
_HERE = sys.executable


@dataclass(frozen=True)
class Integration:
    """One program: how its version is asked for, what is seen of it, and the test that runs it."""

    topic: str
    program: str
    sees: str  # as the cell of a table
    test: str  # path::function; all of its parameters
    package: str = ""  # of Python
    python: str = _HERE  # where it is installed
    command: tuple[str, ...] = ()  # or what says its version

    def version(self) -> str:
        """Return the version that is installed. Raises OSError, CalledProcessError."""
        command = self.command or (self.python, "-c", _ASK, self.package)
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
        found = _NUMBER.search(done.stdout + done.stderr)
        assert found is not None, done.stdout + done.stderr
        return found[0].rstrip(",")


_LAUNCHERS = "tests/scenarios/test_launchers.py::"
_PROGRAMS = "tests/scenarios/third_party/test_programs.py::test_a_complete_run_page"
_CALLBACKS = "tests/agent/test_integrations.py::"
_TRACKERS = "tests/scenarios/test_trackers.py::"
ALL: tuple[Integration, ...] = (
    Integration(
        "Launchers", "torchrun", "two nodes, each with its own: one run, ranks by number and node",
        f"{_LAUNCHERS}test_two_nodes_on_one_machine", "torch",
    ),
    Integration(
        "Launchers", "multiprocessing", "spawn, fork and forkserver: ranks once they join a group",
        f"{_LAUNCHERS}test_multiprocessing", "torch",
    ),
    Integration(
        "Launchers", "Slurm", "`srun` behind `rankscope run`, and in front of it in each task",
        f"{_LAUNCHERS}test_srun", command=("slurmctld", "-V"),
    ),
    Integration(
        "Launchers", "Slurm, batch scripts", "the two scripts of docs/attach.md, by `sbatch`",
        f"{_LAUNCHERS}test_sbatch", command=("slurmctld", "-V"),
    ),
    Integration(
        "Launchers", "accelerate launch", "its launcher of several processes on a machine",
        f"{_LAUNCHERS}test_accelerate_launch", "accelerate",
    ),
    Integration(
        "Launchers", "Open MPI", "`mpirun`: ranks by its own variables",
        f"{_LAUNCHERS}test_mpirun", command=("mpirun", "--version"),
    ),
    Integration(
        "Launchers", "MPICH", "`mpiexec` of Hydra: ranks by its own variables",
        f"{_LAUNCHERS}test_mpich", command=("mpiexec.hydra", "--version"),
    ),
    Integration(
        "Launchers", "DeepSpeed", "its launcher and its engine with ZeRO 0, 1 and 3: a step for "
        "each update, phases, collectives",
        "tests/scenarios/test_deepspeed.py::test_deepspeed", "deepspeed", PYTHON,
    ),
    Integration(
        "Launchers", "Ray Train", "its workers by Ray's environment; a run that ends, an exception "
        "that Ray catches, a worker that is killed, a restart",
        "tests/scenarios/test_ray.py::test_a_worker_that_is_killed_is_named", "ray", PYTHON,
    ),
    Integration(
        "Platforms", "Kubeflow Trainer", "manifests of a TrainJob and of a JobSet, as its models "
        "take them",
        "tests/agent/test_manifests.py::test_kubeflows_own_models_take_the_trainjob_and_the_jobset",
        "kubeflow-trainer-api", PYTHON,
    ),
    Integration(
        "Platforms", "kubectl", "the command that annotates an object, without a cluster",
        "tests/server/test_advice.py::"
        "test_advice_is_written_onto_an_object_as_kubectl_itself_takes_it",
        command=(str(Path(_HERE).with_name("kubectl")), "version", "--client"),
    ),
    Integration(
        "Frameworks", "Hugging Face Trainer", "steps, phases, evaluations, checkpoints and its "
        "loss, without a change", _PROGRAMS, "transformers",
    ),
    Integration(
        "Frameworks", "Lightning", "the same, with its own launcher", _PROGRAMS, "lightning",
    ),
    Integration(
        "Frameworks", "Accelerate", "the same, of a loop with accumulation", _PROGRAMS,
        "accelerate",
    ),
    Integration(
        "Frameworks", "TRL", "its SFTTrainer: steps, phases and the loss that it logs",
        "tests/scenarios/test_trl.py::test_supervised_fine_tuning", "trl", PYTHON,
    ),
    Integration(
        "Frameworks", "Megatron-core", "its groups as a mesh, tensor and data; the collectives of "
        "its layers", "tests/scenarios/test_megatron.py::test_megatron", "megatron-core", PYTHON,
    ),
    Integration(
        "Callbacks", "Hugging Face Trainer", "its step numbers, after a resume too; what it logs",
        f"{_CALLBACKS}test_huggingface", "transformers",
    ),
    Integration(
        "Callbacks", "Lightning", "its step numbers, validations, what modules log",
        f"{_CALLBACKS}test_lightning", "lightning",
    ),
    Integration(
        "Callbacks", "Accelerate", "what `accelerator.log` gets; saving of states",
        f"{_CALLBACKS}test_accelerate", "accelerate",
    ),
    Integration(
        "Trackers", "MLflow", "numbers, verdict and link in the script's run; a link to it",
        f"{_TRACKERS}test_mlflow", "mlflow-skinny", PYTHON,
    ),
    Integration(
        "Trackers", "Weights & Biases", "a run beside the script's, which has the link, without a "
        "connection", f"{_TRACKERS}test_wandb", "wandb", PYTHON,
    ),
    Integration(
        "Trackers", "TensorBoard", "a folder in that of the script's writer",
        f"{_TRACKERS}test_tensorboard", "tensorboard", PYTHON,
    ),
    Integration(
        "Trackers", "trackio", "a run in the same project", f"{_TRACKERS}test_trackio", "trackio",
        PYTHON,
    ),
    Integration(
        "Trackers", "SwanLab", "an experiment in the same project, without a connection",
        f"{_TRACKERS}test_swanlab", "swanlab", PYTHON,
    ),
    Integration(
        "Trackers", "Comet", "the same", f"{_TRACKERS}test_comet", "comet-ml", PYTHON,
    ),
    Integration(
        "Metrics", "Prometheus", "series of live runs, scraped, and each alert rule",
        "tests/server/test_prometheus.py::test_a_slow_rank_is_a_series_with_its_host",
        command=("prometheus", "--version"),
    ),
    Integration(
        "Telemetry", "OpenTelemetry SDK", "spans, logs and metrics of four processes: the slow "
        "rank is named", "tests/server/test_otlp_ranks.py::test_the_slow_rank_is_named",
        "opentelemetry-sdk",
    ),
    Integration(
        "Telemetry", "NVIDIA One Logger", "steps and phases of each rank, by its own exporter",
        "tests/server/test_otlp_ranks.py::test_the_logger_of_nvidia", "nv-one-logger-otel",
    ),
    Integration(
        "Telemetry", "Perfetto", "downloaded steps: slices, arrows and tracks as the API says",
        "tests/server/test_timeline_perfetto.py::test_lanes_are_those_of_the_page", "perfetto",
    ),
    Integration(
        "Assistants", "Model Context Protocol", "its own client asks, over stdio and HTTP",
        "tests/server/test_mcp.py::test_an_assistant_answers_the_questions_of_a_person", "mcp",
    ),
    Integration(
        "Notebooks", "Jupyter", "a worked notebook, executed cell by cell",
        "tests/server/test_notebook.py::test_the_worked_notebook_does_what_it_says", "ipykernel",
    ),
    Integration(
        "Tables", "pandas", "a run as data frames",
        "tests/server/test_data.py::test_a_run_opens_as_arrow_pandas_polars_and_sql", "pandas",
    ),
    Integration(
        "Tables", "polars", "the same",
        "tests/server/test_data.py::test_a_run_opens_as_arrow_pandas_polars_and_sql", "polars",
    ),
    Integration(
        "Tables", "DuckDB", "SQL over a run, and exported files",
        "tests/server/test_data.py::test_exported_files_hold_the_same_in_every_engine", "duckdb",
    ),
)  # fmt: skip


def versions() -> dict[str, dict[str, str]]:
    """Return by topic and program the version with which its test passed, and the day."""
    found: dict[str, dict[str, str]] = json.loads(VERSIONS.read_text())
    return found


def key_of(one: Integration) -> str:
    """Return what an integration is called in the file of versions."""
    return f"{one.topic}/{one.program}"


def remember(found: Sequence[Outcome]) -> None:
    """Write the versions of those of which all tests that ran passed, and one at least."""
    known = versions()
    for one in ALL:
        states = {o.state for o in found if o.name.partition("[")[0] == one.test}
        if states == {"passed"}:
            day = datetime.date.today().isoformat()
            known[key_of(one)] = {"version": one.version(), "day": day}
    names = [key_of(one) for one in ALL]
    kept = {name: known[name] for name in names if name in known}
    VERSIONS.write_text(json.dumps(kept, indent=1) + "\n")


def main(arguments: Sequence[str]) -> int:
    """Remember what a file of outcomes says; return the exit code."""
    if len(arguments) != 2 or arguments[0] != "remember":
        sys.stderr.write(f"{__doc__}\n")
        return 64
    remember(outcomes.read(Path(arguments[1]))[0])
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

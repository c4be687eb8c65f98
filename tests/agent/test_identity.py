"""Who a process is, by the variables that launchers and platforms document for it."""

from __future__ import annotations

from pathlib import Path

import pytest

from rankscope.files import identity
from rankscope.node.launch import naming
from rankscope.process import family, kubernetes
from tests.platforms import (
    AZURE_MPI,
    AZURE_PYTORCH,
    HOROVOD,
    INDEXED_JOB,
    JOBSET,
    JOBSET_LABELS,
    PYTORCHJOB,
    PYTORCHJOB_ELASTIC,
    SAGEMAKER,
    SKYPILOT,
    TORCHRUN,
    TRAINJOB,
    VOLCANO,
)


@pytest.mark.parametrize(
    ("environ", "launcher", "run"),
    [
        (SAGEMAKER | TORCHRUN, "torchrun", "sagemaker-pytorch-training-2020-07-13-20-42-24-519"),
        (SKYPILOT | TORCHRUN, "torchrun", "skypilot-sky-2023-07-06-21-18-31-563597_myclus_1"),
        (TRAINJOB | TORCHRUN, "torchrun", "kubernetes-llama"),
        (AZURE_PYTORCH, "torchrun", "azureml-loving_arm_9m3v5z1k"),
        (AZURE_MPI, "mpirun", "azureml-loving_arm_9m3v5z1k"),
        (HOROVOD | {"RANKSCOPE_RUN_ID": "mine"}, "horovodrun", "mine"),
    ],
    ids=["sagemaker", "skypilot", "trainjob", "azure-pytorch", "azure-mpi", "horovod"],
)
def test_rank_place_and_run(environ: dict[str, str], launcher: str, run: str) -> None:
    who = identity.likely(environ)
    assert who is not None
    assert (who.rank, who.world_size, who.local_rank, who.node_rank) == (5, 8, 1, 1)
    assert who.run_id == run
    assert who.local_world_size == (8 if environ is AZURE_PYTORCH else 4)  # it does not say
    if environ is AZURE_PYTORCH:
        counted = identity.likely(environ | {"AZUREML_NODE_COUNT": "2"})
        assert counted is not None
        assert counted.local_world_size == 4
    assert family.launcher(environ) == launcher


@pytest.mark.parametrize("environ", [SAGEMAKER, AZURE_PYTORCH, SKYPILOT, TRAINJOB])
def test_all_nodes_of_a_job_give_it_one_name(environ: dict[str, str]) -> None:
    names = {naming.shared_run_id(["torchrun", "train.py"], environ), identity.run_id(environ)}
    assert names == {family.job_name(environ)}


def test_a_script_that_names_its_ranks_itself_has_the_platforms_node() -> None:
    """The process group says which rank it is; SageMaker on which of its hosts."""
    who = identity.build(SAGEMAKER, 1, 2)
    assert (who.rank, who.world_size, who.node_rank) == (1, 2, 1)


@pytest.mark.parametrize(
    ("environ", "node"),
    [
        ({}, None),
        ({"NODE_RANK": "3"}, 3),
        ({"SM_HOSTS": '["algo-1"]', "SM_CURRENT_HOST": "algo-1"}, 0),
        ({"SM_HOSTS": '["algo-1", "algo-10", "algo-2"]', "SM_CURRENT_HOST": "algo-2"}, 2),
        ({"SM_HOSTS": '["algo-1"]', "SM_CURRENT_HOST": "algo-9"}, None),
        ({"SM_HOSTS": "[]", "SM_CURRENT_HOST": ""}, None),
        ({"SM_CURRENT_HOST": "algo-1"}, None),
    ],
)
def test_the_node_is_known_where_the_platform_says_it(
    environ: dict[str, str], node: int | None
) -> None:
    assert family.node_of_job(environ) == node


def test_without_a_platform_a_job_has_no_name() -> None:
    assert family.job_name(TORCHRUN) == ""
    assert naming.shared_run_id(["torchrun", "train.py"], TORCHRUN) == ""
    assert family.job_name({"SLURM_JOB_ID": "77"}) == "slurm-77"
    assert family.job_tags(TORCHRUN) == {}
    assert family.job_tags({"SLURM_JOB_ID": "77"}) == {"slurm": "77"}


# --- Kubernetes ----------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def _no_service_account(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tests may run in a pod themselves, whose namespace is none of the jobs'."""
    monkeypatch.setattr(kubernetes, "_NAMESPACE", "/nowhere")


@pytest.mark.parametrize(
    ("environ", "job"),
    [
        (INDEXED_JOB, "example-job"),
        (INDEXED_JOB | {"MASTER_ADDR": "example-job-0.example"}, "example-job"),
        (INDEXED_JOB | {"JOB_UID": "4c6bdcfd-0000"}, "example-job-4c6bdcfd"),
        (JOBSET, "pytorch"),
        (JOBSET | {"HOSTNAME": "pytorch-workers-3-1"}, "pytorch"),  # of several Jobs
        (JOBSET | {"MASTER_ADDR": "pytorch-workers-0-0.pytorch.a.svc.cluster.local"}, "pytorch"),
        (JOBSET | {"JOB_UID": "4c6bdcfd-0000"}, "pytorch"),  # another one after each restart
        (JOBSET | JOBSET_LABELS, "team-a-pytorch-8d3f5a0e"),
        (TRAINJOB, "llama"),
        (PYTORCHJOB, "mnist"),
        (PYTORCHJOB | {"HOSTNAME": "mnist-master-0", "RANK": "0"}, "mnist"),
        (PYTORCHJOB_ELASTIC, "echo"),
        (VOLCANO, "pytorch-job"),
        (VOLCANO | {"HOSTNAME": "pytorch-job-master-0"}, "pytorch-job"),
    ],
)
def test_a_job_of_kubernetes_has_one_name_on_all_of_its_pods(
    environ: dict[str, str], job: str
) -> None:
    assert family.job_name(environ) == f"kubernetes-{job}"
    assert naming.shared_run_id(["torchrun", "train.py"], environ) == f"kubernetes-{job}"


@pytest.mark.parametrize(
    "environ",
    [
        {k: v for k, v in INDEXED_JOB.items() if k != "KUBERNETES_SERVICE_HOST"},
        INDEXED_JOB | {"HOSTNAME": "gpu-7"},  # with its node's network
        # an indexed Job whose pods train alone, each with other parameters
        {k: v for k, v in INDEXED_JOB.items() if k != "MASTER_ADDR"},
        INDEXED_JOB | {"MASTER_ADDR": "localhost"},
        INDEXED_JOB | {"MASTER_ADDR": "example-job-1"},
        {k: v for k, v in VOLCANO.items() if k != "MASTER_ADDR"},
        VOLCANO | {"HOSTNAME": "gpu-7"},
        PYTORCHJOB | {"HOSTNAME": "mnist2-worker-0"},
        {"KUBERNETES_SERVICE_HOST": "10.96.0.1", "HOSTNAME": "shell-0"},
        {"KUBERNETES_SERVICE_HOST": "10.96.0.1", "MASTER_ADDR": "10.0.0.4", "HOSTNAME": "a-1"},
    ],
)
def test_a_pod_whose_job_does_not_show_names_no_run(environ: dict[str, str]) -> None:
    assert family.job_name(environ) == ""


def test_the_namespace_is_that_of_the_service_account(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "namespace").write_text("team-b")
    monkeypatch.setattr(kubernetes, "_NAMESPACE", str(tmp_path / "namespace"))
    assert family.job_name(JOBSET) == "kubernetes-team-b-pytorch"
    assert family.job_tags(JOBSET) == {"kubernetes": "team-b/pytorch"}
    assert family.job_name(JOBSET | JOBSET_LABELS) == "kubernetes-team-a-pytorch-8d3f5a0e"


@pytest.mark.parametrize(
    ("environ", "attempt"),
    [
        ({}, 0),
        ({"TORCHELASTIC_RESTART_COUNT": "2", "TORCHELASTIC_MAX_RESTARTS": "3"}, 2),
        ({"SLURM_RESTART_COUNT": "1"}, 1),
        (JOBSET_LABELS, 2),
        (JOBSET_LABELS | {"TORCHELASTIC_RESTART_COUNT": "0", "TORCHELASTIC_MAX_RESTARTS": "3"}, 8),
        (JOBSET_LABELS | {"TORCHELASTIC_RESTART_COUNT": "3", "TORCHELASTIC_MAX_RESTARTS": "3"}, 11),
        ({"VC_JOB_RETRY_COUNT": "4"}, 4),
        ({"JOBSET_RESTART_ATTEMPT": ""}, 0),  # a label that is not there
        ({"JOBSET_RESTART_ATTEMPT": "9" * 30}, identity.MOST_ATTEMPTS),
    ],
)
def test_a_job_that_is_begun_again_is_another_attempt(
    environ: dict[str, str], attempt: int
) -> None:
    assert identity.build(environ, 0, 1).attempt == attempt

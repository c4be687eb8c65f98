"""Who a process is, by the variables that launchers and platforms document for it."""

from __future__ import annotations

import pytest

from rankscope.files import identity
from rankscope.node.launch import naming
from rankscope.process import family
from tests.platforms import AZURE_MPI, AZURE_PYTORCH, HOROVOD, SAGEMAKER, TORCHRUN


@pytest.mark.parametrize(
    ("environ", "launcher", "run"),
    [
        (SAGEMAKER | TORCHRUN, "torchrun", "sagemaker-pytorch-training-2020-07-13-20-42-24-519"),
        (AZURE_PYTORCH, "torchrun", "azureml-loving_arm_9m3v5z1k"),
        (AZURE_MPI, "mpirun", "azureml-loving_arm_9m3v5z1k"),
        (HOROVOD | {"RANKSCOPE_RUN_ID": "mine"}, "horovodrun", "mine"),
    ],
    ids=["sagemaker", "azure-pytorch", "azure-mpi", "horovod"],
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


@pytest.mark.parametrize("environ", [SAGEMAKER, AZURE_PYTORCH], ids=["sagemaker", "azure"])
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

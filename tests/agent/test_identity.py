"""Who a process is, by the variables that launchers and platforms document for it."""

from __future__ import annotations

import pytest

from rankscope.files import identity
from rankscope.node.launch import naming
from rankscope.process import family

# docs.aws.amazon.com/sagemaker/latest/dg/your-algorithms-training-algo-running-container.html
# gives TRAINING_JOB_NAME, github.com/aws/sagemaker-training-toolkit ("Environment variables") the
# others; the job's own torchrun gives the ranks.
SAGEMAKER = {
    "TRAINING_JOB_NAME": "pytorch-training-2020-07-13-20-42-24-519",
    "SM_CURRENT_HOST": "algo-2",
    "SM_HOSTS": '["algo-1","algo-2"]',
    "SM_NUM_GPUS": "4",
}
TORCHRUN = {
    "RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4", "GROUP_RANK": "1",
    "TORCHELASTIC_RUN_ID": "none",
}  # fmt: skip
# learn.microsoft.com/azure/machine-learning/how-to-train-distributed-gpu, PyTorch: a process for
# each of process_count_per_instance, without torchrun
AZURE_PYTORCH = {
    "AZUREML_RUN_ID": "loving_arm_9m3v5z1k", "RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1",
    "NODE_RANK": "1", "MASTER_ADDR": "10.0.0.4", "MASTER_PORT": "6105",
}  # fmt: skip
# the same page, MPI
AZURE_MPI = {
    "AZUREML_RUN_ID": "loving_arm_9m3v5z1k", "OMPI_COMM_WORLD_RANK": "5",
    "OMPI_COMM_WORLD_SIZE": "8", "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4", "AZ_BATCH_MASTER_NODE": "10.0.0.4:6000",
}  # fmt: skip
# github.com/horovod/horovod/blob/master/horovod/runner/gloo_run.py
HOROVOD = {
    "HOROVOD_HOSTNAME": "host-1", "HOROVOD_RANK": "5", "HOROVOD_SIZE": "8",
    "HOROVOD_LOCAL_RANK": "1", "HOROVOD_LOCAL_SIZE": "4", "HOROVOD_CROSS_RANK": "1",
    "HOROVOD_CROSS_SIZE": "2", "HOROVOD_CONTROLLER": "gloo",
}  # fmt: skip


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

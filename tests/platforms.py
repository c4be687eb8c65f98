"""The variables that platforms and launchers document for a process of a job, here rank 5 of 8."""

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
# each of process_count_per_instance, without torchrun. AZUREML_NODE_COUNT is there as well, as many
# scripts that run there read it; that page does not name it.
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

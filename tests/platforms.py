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

# docs.skypilot.co/en/stable/running-jobs/environment-variables.html, "Environment variables for
# run"; the ranks are of the torchrun of its page distributed-jobs.html
SKYPILOT = {
    "SKYPILOT_TASK_ID": "sky-2023-07-06-21-18-31-563597_myclus_1", "SKYPILOT_NODE_RANK": "1",
    "SKYPILOT_NUM_NODES": "2", "SKYPILOT_NODE_IPS": "10.0.0.4\n10.0.0.5",
    "SKYPILOT_NUM_GPUS_PER_NODE": "4",
}  # fmt: skip

# --- Kubernetes: what controllers put into the pod of node 1 of 2, and its host name --------------
_POD = {"KUBERNETES_SERVICE_HOST": "10.96.0.1", "KUBERNETES_SERVICE_PORT": "443"}
# kubernetes.io/docs/tasks/job/job-with-pod-to-pod-communication: the job is `example-job`, its
# service `headless-svc`
INDEXED_JOB = _POD | {
    "JOB_COMPLETION_INDEX": "1", "HOSTNAME": "example-job-1",
    "MASTER_ADDR": "example-job-0.headless-svc",
}  # fmt: skip
# kubernetes-sigs/jobset, site/static/examples/pytorch/resnet-cifar10/resnet.yaml: `pytorch`
JOBSET = _POD | {
    "JOB_COMPLETION_INDEX": "1", "HOSTNAME": "pytorch-workers-0-1",
    "MASTER_ADDR": "pytorch-workers-0-0.pytorch", "MASTER_PORT": "3389",
}  # fmt: skip
# what its labels and annotations are called where a manifest asks for them: flyteorg/flyte,
# "clustered" plugin, and kubernetes-sigs/jobset, site/static/examples/in-place-restart; the restart
# is in the annotation jobset.sigs.k8s.io/restart-attempt (pkg/constants/constants.go)
JOBSET_LABELS = {
    "JOBSET_NAME": "pytorch", "JOBSET_UID": "8d3f5a0e-52c5-4a9b-9f2f-2a6d2f7b6c11",
    "JOBSET_RESTART_ATTEMPT": "2", "POD_NAMESPACE": "team-a",
}  # fmt: skip
# kubeflow/trainer, pkg/runtime/framework/plugins/torch/torch.go, `EnforceMLPolicy`: `llama`
TRAINJOB = _POD | {
    "JOB_COMPLETION_INDEX": "1", "HOSTNAME": "llama-node-0-1", "PET_NNODES": "2",
    "PET_NPROC_PER_NODE": "4", "PET_NODE_RANK": "1",
    "PET_MASTER_ADDR": "llama-node-0-0.llama", "PET_MASTER_PORT": "29500",
}  # fmt: skip
# kubeflow/training-operator, pkg/controller.v1/pytorch/envvar.go and master.go: `mnist`
PYTORCHJOB = _POD | {
    "HOSTNAME": "mnist-worker-0", "MASTER_ADDR": "mnist-master-0", "MASTER_PORT": "23456",
    "WORLD_SIZE": "2", "RANK": "1", "PYTHONUNBUFFERED": "1",
}  # fmt: skip
# the same, elastic.go
PYTORCHJOB_ELASTIC = _POD | {
    "HOSTNAME": "echo-worker-1", "PET_RDZV_ENDPOINT": "echo-worker-0:23456",
    "PET_RDZV_BACKEND": "c10d", "PET_NNODES": "1:2", "PET_MAX_RESTARTS": "100",
}  # fmt: skip
# volcano-sh/volcano, pkg/controllers/job/plugins: env, svc and pytorch; `pytorch-job` is the job of
# its user guide to the last
VOLCANO = _POD | {
    "VC_TASK_INDEX": "0", "VK_TASK_INDEX": "0", "HOSTNAME": "pytorch-job-worker-0",
    "VC_MASTER_HOSTS": "pytorch-job-master-0.pytorch-job", "VC_MASTER_NUM": "1",
    "VC_WORKER_HOSTS": "pytorch-job-worker-0.pytorch-job", "VC_WORKER_NUM": "1",
    "MASTER_ADDR": "pytorch-job-master-0.pytorch-job", "MASTER_PORT": "23456",
    "WORLD_SIZE": "2", "RANK": "1",
}  # fmt: skip

"""Which job of Kubernetes this pod belongs to, from what controllers put into its environment.

Kubernetes names a job to its pods in labels and annotations, which a container sees only where its
manifest asks for them (`JOBSET_NAME` and the like: docs/attach.md has the lines). Without them the
name of the job is in those of its pods, to which each controller gives a form of its own:

- Job, indexed: `JOB-INDEX`, and `JOB_COMPLETION_INDEX` has the index
  (kubernetes.io/docs/concepts/workloads/controllers/job, "Completion mode")
- JobSet: `SET-REPLICATED-NUMBER-INDEX` in the domain `SET` (kubernetes-sigs/jobset,
  api/jobset/v1alpha2/jobset_types.go, `Network`), so that pods meet at `SET-workers-0-0.SET`
- TrainJob of Kubeflow Trainer: a JobSet of its name; `PET_MASTER_ADDR` is `JOB-node-0-0.JOB`
  (kubeflow/trainer, pkg/runtime/framework/plugins/torch/torch.go)
- PyTorchJob: `JOB-master-0`, `JOB-worker-INDEX`; `MASTER_ADDR` is `JOB-master-0`, and of an elastic
  one `PET_RDZV_ENDPOINT` `JOB-worker-0:PORT` (kubeflow/training-operator,
  pkg/controller.v1/pytorch/master.go and elastic.go)
- Volcano: `JOB-TASK-INDEX` in the domain `JOB`; `VC_TASK_INDEX` of its plugin env, `MASTER_ADDR` of
  pytorch (volcano-sh/volcano, pkg/controllers/job/plugins)

Kueue admits jobs of all these kinds and changes none of it.
"""

from __future__ import annotations

TYPE_CHECKING = False  # see rankscope/__init__.py
if TYPE_CHECKING:
    from collections.abc import Mapping

# of each pod that has a service account
_NAMESPACE = "/var/run/secrets/kubernetes.io/serviceaccount/namespace"
_UID_LENGTH = 8  # of 36: enough to part jobs that had one name
_FIRST_PODS = ("-master-0", "-worker-0")  # of a PyTorchJob


class Job:
    """A job of Kubernetes; `uid` parts those that had one name after each other, "" if unknown."""

    def __init__(self, namespace: str, name: str, uid: str) -> None:
        self.namespace, self.name, self.uid = namespace, name, uid

    @property
    def path(self) -> str:
        """Return it as people write it, NAMESPACE/NAME."""
        return f"{self.namespace}/{self.name}" if self.namespace else self.name

    def __str__(self) -> str:
        parts = (self.namespace, self.name, self.uid[:_UID_LENGTH])
        return "-".join(part for part in parts if part)


def job_of_pod(environ: Mapping[str, str]) -> Job | None:
    """Return the job of this pod, as all pods of the job name it; None where unknown."""
    name, is_set = environ.get("JOBSET_NAME", ""), True
    if not name:
        name, is_set = _of_pod_names(environ)
    if not name:
        return None
    # the Jobs of a JobSet are made anew when it restarts, each with another uid
    uid = environ.get("JOBSET_UID" if is_set else "JOB_UID", "")
    return Job(environ.get("POD_NAMESPACE") or _namespace(), name, uid)


def _of_pod_names(environ: Mapping[str, str]) -> tuple[str, bool]:
    """Return the job that the names of this and of the first pod show, and if it is a JobSet.

    Pods that meet nowhere train alone, as those of an indexed Job that tries parameters: no job.
    """
    pod = environ.get("HOSTNAME", "").partition(".")[0]
    first, domain = _first_pod(environ)
    is_in_domain = all(name.startswith(f"{domain}-") for name in (pod, first)) and bool(domain)
    index = environ.get("JOB_COMPLETION_INDEX", "")
    if index:
        job = pod.removesuffix(f"-{index}")
        replicated, _, number = job.removeprefix(f"{domain}-").rpartition("-")
        if is_in_domain and replicated and number.isdecimal():
            return domain, True
        return (job if job != pod and first == f"{job}-0" else ""), False
    if "VC_TASK_INDEX" in environ:
        return (domain if is_in_domain else ""), False
    for ending in _FIRST_PODS:
        job = first.removesuffix(ending)
        if job != first and pod.startswith(f"{job}-"):
            return job, False
    return "", False


def _first_pod(environ: Mapping[str, str]) -> tuple[str, str]:
    """Return the name of the pod where all meet, and its domain."""
    address = environ.get("PET_MASTER_ADDR") or environ.get("PET_RDZV_ENDPOINT")
    labels = (address or environ.get("MASTER_ADDR", "")).partition(":")[0].split(".")
    return labels[0], labels[1] if len(labels) > 1 else ""


def _namespace() -> str:
    try:
        with open(_NAMESPACE, encoding="utf-8") as file:
            return file.read(64).strip()
    except (OSError, ValueError):
        return ""

"""A job as a manifest for Kubernetes: a TrainJob of Kubeflow Trainer, or a PyTorchJob of the training operator."""

from typing import Any

import yaml

from clipscale.config.checks import choice
from clipscale.errors import UserError
from clipscale.launch.description import Job, handed_over

KINDS = ("TrainJob", "PyTorchJob")
Tree = dict[str, Any]


def manifest(job: Job) -> str:
    """The manifest as YAML. Raises UserError."""
    options = job.config.options
    kind = str(options.get("kind", "TrainJob"))
    choice("job.options.kind", kind, KINDS)
    metadata: Tree = {"name": job.name}
    if "namespace" in options:
        metadata["namespace"] = str(options["namespace"])
    if "queue" in options:
        metadata["labels"] = {"kueue.x-k8s.io/queue-name": str(options["queue"])}
    made = trainjob(job, metadata) if kind == "TrainJob" else pytorchjob(job, metadata)
    return yaml.safe_dump(made, sort_keys=False, allow_unicode=True)


def trainjob(job: Job, metadata: Tree) -> Tree:
    """For Kubeflow Trainer 2. The runtime sets torchrun's PET_ variables; volumes are patches of its pods."""
    pod: Tree = {
        "terminationGracePeriodSeconds": job.grace_s + 60,
        "volumes": volumes(job),
        "containers": [{"name": "node", "volumeMounts": volume_mounts(job)}],
    }
    replicated = {"name": "node", "template": {"spec": {"template": {"spec": pod}}}}
    spec: Tree = {
        "runtimeRef": {"name": str(job.config.options.get("runtime", "torch-distributed"))},
        "trainer": {
            "image": job.config.image,
            "command": command(job),
            "numNodes": job.config.nodes,
            "numProcPerNode": job.procs,
            "resourcesPerNode": resources(job),
            "env": variables(job),
        },
        "runtimePatches": [
            {
                "manager": "clipscale.io/launch",
                "trainingRuntimeSpec": {"template": {"spec": {"replicatedJobs": [replicated]}}},
            }
        ],
    }
    if job.config.hours:
        spec["activeDeadlineSeconds"] = round(job.config.hours * 3600)
    return {"apiVersion": "trainer.kubeflow.org/v1alpha1", "kind": "TrainJob", "metadata": metadata, "spec": spec}


def pytorchjob(job: Job, metadata: Tree) -> Tree:
    """For the training operator 1. Every replica is a node; the operator sets torchrun's PET_ variables."""
    container = {
        "name": "pytorch",  # the name that the operator looks for
        "image": job.config.image,
        "command": command(job),
        "env": variables(job),
        "resources": resources(job),
        "volumeMounts": volume_mounts(job),
    }
    pod = {
        "terminationGracePeriodSeconds": job.grace_s + 60,
        "containers": [container],
        "volumes": volumes(job),
    }
    replicas: Tree = {"Master": {"replicas": 1, "restartPolicy": "OnFailure", "template": {"spec": pod}}}
    if job.config.nodes > 1:
        replicas["Worker"] = {"replicas": job.config.nodes - 1, "restartPolicy": "OnFailure", "template": {"spec": pod}}
    spec: Tree = {"nprocPerNode": str(job.procs), "pytorchReplicaSpecs": replicas}
    if job.config.hours:
        spec["runPolicy"] = {"activeDeadlineSeconds": round(job.config.hours * 3600)}
    return {"apiVersion": "kubeflow.org/v1", "kind": "PyTorchJob", "metadata": metadata, "spec": spec}


def command(job: Job) -> list[str]:
    """torchrun, which finds nodes, processes and the rendezvous in its PET_ variables."""
    return ["python", "-m", "clipscale.launch.torchrun", f"--max-restarts={job.restarts}", *job.command[1:]]


def resources(job: Job) -> Tree:
    """GPUs, cores and memory of a node."""
    config = job.config
    found: Tree = {}
    if config.cpus:
        found["cpu"] = str(config.cpus * job.procs)
    if config.memory:
        found["memory"] = f"{-(-config.memory // 2**20)}Mi"
    if job.gpus:
        found["nvidia.com/gpu"] = str(job.procs)
    return {"requests": found, "limits": dict(found)}  # one object would become a YAML alias


def variables(job: Job) -> list[Tree]:
    """The environment. A name without a value is a key of the secret `job.options.env_from`."""
    secret = job.config.options.get("env_from")
    found: list[Tree] = []
    for name, value in job.variables():
        if value is None and secret is None:
            raise UserError(f"job.env={name}: give job.options.env_from=NAME, the Kubernetes secret that holds it")
        source = {"secretKeyRef": {"name": str(secret), "key": name}}
        found.append({"name": name, "valueFrom": source} if value is None else {"name": name, "value": value})
    return found


def volumes(job: Job) -> list[Tree]:
    """Shared memory, which NCCL and the loaders need, and the mounts: a path of the node, or a volume claim."""
    found: list[Tree] = [{"name": "shm", "emptyDir": {"medium": "Memory"}}]
    for number, (source, _) in enumerate(job.mounts()):
        place = (
            {"hostPath": {"path": source}}
            if source.startswith("/")
            else {"persistentVolumeClaim": {"claimName": source}}
        )
        found.append({"name": f"mount-{number}", **place})
    return found


def volume_mounts(job: Job) -> list[Tree]:
    """Where the volumes are in the container."""
    targets = [("shm", "/dev/shm"), *((f"mount-{number}", target) for number, (_, target) in enumerate(job.mounts()))]
    return [{"name": name, "mountPath": target} for name, target in targets]


def submit(job: Job) -> str:
    """Give the manifest to kubectl; returns the name of what it has made. Raises UserError."""
    command = ["kubectl", "create", "-o", "name", "-f", "-"]
    return handed_over(job, command, manifest(job), "install it, or take --dry-run")

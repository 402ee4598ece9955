"""A job as a manifest for Kubernetes: a TrainJob of Kubeflow Trainer, or a PyTorchJob of the training operator."""

import json
from typing import Any

import yaml

from clipscale.common.errors import UserError
from clipscale.config.checks import choice
from clipscale.launch.description import Job

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
    return yaml.safe_dump(json.loads(json.dumps(made)), sort_keys=False, allow_unicode=True)  # without aliases


def trainjob(job: Job, metadata: Tree) -> Tree:
    """For Kubeflow Trainer 2. The runtime sets torchrun's PET_ variables; volumes are patches of its pods."""
    replicated = {"name": "node", "template": {"spec": {"template": {"spec": pod(job, {"name": "node"})}}}}
    spec: Tree = {
        "runtimeRef": {"name": str(job.config.options.get("runtime", "torch-distributed"))},
        "trainer": {
            **container(job),
            "numNodes": job.config.nodes,
            "numProcPerNode": job.procs,
            "resourcesPerNode": resources(job),
        },
        "runtimePatches": [
            {
                "manager": "clipscale.io/launch",
                "trainingRuntimeSpec": {"template": {"spec": {"replicatedJobs": [replicated]}}},
            }
        ],
        **deadline(job),
    }
    return {"apiVersion": "trainer.kubeflow.org/v1alpha1", "kind": "TrainJob", "metadata": metadata, "spec": spec}


def pytorchjob(job: Job, metadata: Tree) -> Tree:
    """For the training operator 1, which looks for a container `pytorch`. Every replica is a node; it sets torchrun's PET_ variables."""
    template = {"spec": pod(job, {"name": "pytorch", **container(job), "resources": resources(job)})}
    replicas = {
        name: {"replicas": count, "restartPolicy": "OnFailure", "template": template}
        for name, count in (("Master", 1), ("Worker", job.config.nodes - 1))
        if count
    }
    spec: Tree = {"nprocPerNode": str(job.procs), "pytorchReplicaSpecs": replicas}
    if job.config.hours:
        spec["runPolicy"] = deadline(job)
    return {"apiVersion": "kubeflow.org/v1", "kind": "PyTorchJob", "metadata": metadata, "spec": spec}


def pod(job: Job, node: Tree) -> Tree:
    """A pod of the container `node`, with shared memory, which NCCL and the loaders need, and the mounts: paths of the node, or claims."""
    mounts: list[tuple[str, str, Tree]] = [("shm", "/dev/shm", {"emptyDir": {"medium": "Memory"}})]
    for number, (source, target) in enumerate(job.mounts()):
        claim = {"persistentVolumeClaim": {"claimName": source}}
        mounts.append((f"mount-{number}", target, {"hostPath": {"path": source}} if source.startswith("/") else claim))
    return {
        "terminationGracePeriodSeconds": job.grace_s + 60,
        "volumes": [{"name": name, **place} for name, _, place in mounts],
        "containers": [{**node, "volumeMounts": [{"name": name, "mountPath": path} for name, path, _ in mounts]}],
    }


def container(job: Job) -> Tree:
    """What runs: torchrun, which finds nodes, processes and the rendezvous in its PET_ variables."""
    return {"image": job.config.image, "command": [*job.agent, *job.command[1:]], "env": variables(job)}


def deadline(job: Job) -> Tree:
    """The time limit, if there is one."""
    return {"activeDeadlineSeconds": round(job.config.hours * 3600)} if job.config.hours else {}


def resources(job: Job) -> Tree:
    """GPUs, cores and memory of a node."""
    found: Tree = {}
    if job.config.cpus:
        found["cpu"] = str(job.config.cpus * job.procs)
    if job.mebibytes:
        found["memory"] = f"{job.mebibytes}Mi"
    if job.gpus:
        found["nvidia.com/gpu"] = str(job.procs)
    return {"limits": found}  # and requests, which Kubernetes takes from them


def variables(job: Job) -> list[Tree]:
    """The environment. A name without a value is a key of the secret `job.options.env_from`."""
    secret = job.config.options.get("env_from")
    found: list[Tree] = []
    for name, value in job.variables().items():
        if value is None and secret is None:
            raise UserError(f"job.env={name}: give job.options.env_from=NAME, the Kubernetes secret that holds it")
        source = {"secretKeyRef": {"name": str(secret), "key": name}}
        found.append({"name": name, "valueFrom": source} if value is None else {"name": name, "value": value})
    return found

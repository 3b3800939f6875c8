"""A RayJob for KubeRay: a head without GPUs, on which the driver runs, and one pod a node."""

from __future__ import annotations

import json
from typing import Any

import yaml

from lora_moe_rl.errors import ConfigError
from lora_moe_rl.launch.job import Job
from lora_moe_rl.upstream.versions import TESTED

# A job that has ended does nothing more when it is applied again.
NEXT = "kubectl replace --force -f {folder}/rayjob.yaml"
CLAIM = "shared"  # the PersistentVolumeClaim that all pods mount


def files(job: Job) -> dict[str, str]:
    """Raises ConfigError when config, run directory and HF_HOME are not below one folder, which is
    what the pods mount."""
    if job.hub_home is not None and job.hub_home.parts[1:2] != job.run_dir.parts[1:2]:
        raise ConfigError(
            f"model.path is a name of the hub, and HF_HOME={job.hub_home}, where pods would look "
            f"for it, is not below {_top(job)}, where they mount the claim {CLAIM!r}: set HF_HOME "
            "to a folder there that holds the model, or model.path to its directory"
        )
    if job.folder.parts[1] != job.run_dir.parts[1]:
        raise ConfigError(
            f"the pods mount the claim {CLAIM!r} at {_top(job)}, where logging.run_dir="
            f"{job.run_dir} is, and --out {job.folder} is not below it"
        )
    plain = json.loads(json.dumps(_job(job)))  # without YAML's references between equal parts
    return {"rayjob.yaml": HEADER.format(claim=CLAIM) + yaml.safe_dump(plain, sort_keys=False)}


HEADER = """\
# The claim `{claim}` (ReadWriteMany) holds config, run directory and model. KubeRay 1.5.1
# or newer makes the token without which nobody can use the cluster.
"""


def _job(job: Job) -> dict[str, Any]:
    cluster = {
        "rayVersion": TESTED["ray"],
        "authOptions": {"mode": "token"},
        "headGroupSpec": {"rayStartParams": {"num-gpus": "0"}, "template": _pod(job, head=True)},
        "workerGroupSpecs": [
            {
                "groupName": "nodes",
                "replicas": job.nodes,
                "rayStartParams": {},
                "template": _pod(job, head=False),
            }
        ],
    }
    waited = f"python -m lora_moe_rl.launch.wait_nodes {job.nodes + 1}"
    return {
        "apiVersion": "ray.io/v1",
        "kind": "RayJob",
        "metadata": {"name": job.name},
        "spec": {
            "entrypoint": f"bash -c '{waited} && {job.train}'",
            "runtimeEnvYAML": "env_vars: {RAY_ADDRESS: auto}\n",
            "shutdownAfterJobFinishes": True,  # pods would keep their GPUs
            "backoffLimit": 3,  # a job that is started again goes on from its newest checkpoint
            "rayClusterSpec": cluster,
        },
    }


def _pod(job: Job, head: bool) -> dict[str, Any]:
    mounts = [
        {"name": "shared", "mountPath": _top(job)},
        {"name": "dshm", "mountPath": "/dev/shm"},
    ]
    variables = {"RAY_worker_niceness": "0"}
    if job.hub_home is not None:
        variables["HF_HOME"] = str(job.hub_home)
    container: dict[str, Any] = {
        "image": job.image,
        "env": [{"name": name, "value": value} for name, value in variables.items()],
        "volumeMounts": mounts,
    }
    if job.gpus and not head:
        container["resources"] = {"limits": {"nvidia.com/gpu": job.gpus}}
    spec: dict[str, Any] = {
        "containers": [{"name": "ray", **container}],
        "volumes": [
            {"name": "shared", "persistentVolumeClaim": {"claimName": CLAIM}},
            {"name": "dshm", "emptyDir": {"medium": "Memory"}},
        ],
    }
    if not head:  # a node that is not as the run needs it stays in Init, and its log names why
        look = ["bash", "-c", job.node_check]
        spec["initContainers"] = [{"name": "node-check", "command": look, **container}]
    return {"spec": spec}


def _top(job: Job) -> str:
    """The shared file system's place: the first folder of the run directory's path."""
    return "/" + job.run_dir.parts[1]

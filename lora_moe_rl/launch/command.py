"""`lora-moe-rl launch`: the files that start a run on a cluster, from its config and layout."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from lora_moe_rl.config import RunConfig, recipes
from lora_moe_rl.config.files import to_yaml
from lora_moe_rl.config.options import at_least, names, natural, positive
from lora_moe_rl.errors import ConfigError
from lora_moe_rl.launch import kuberay, slurm, ssh
from lora_moe_rl.launch.job import MOST_NOTICE_S, Job, nodes_needed
from lora_moe_rl.models.directory import is_hub_name

KINDS = {"slurm": slurm, "kuberay": kuberay, "ssh": ssh}
# Options that have an effect with some of them alone.
ONLY = {
    "hosts": ("ssh",),
    "image": ("kuberay",),
    "environment": ("slurm", "ssh"),
    "notice": ("slurm",),
}


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="lora-moe-rl launch",
        description="Write what starts a run on a cluster: the resolved config, and a batch script "
        "for Slurm, a RayJob for KubeRay, or a script for nodes that ssh reaches. Each first looks "
        "at every node, and fails early with its name.",
    )
    parser.add_argument("recipe", help="a recipe or a config file")
    parser.add_argument("settings", nargs="*", metavar="key=value", help="settings laid over it")
    parser.add_argument("--on", choices=list(KINDS), required=True, help="what starts nodes")
    parser.add_argument("--gpus-per-node", type=natural, default=8, metavar="N")
    parser.add_argument(
        "--nodes", type=positive, metavar="N", help="by default as few as hold the run"
    )
    parser.add_argument("--hosts", metavar="A,B,...", help="ssh: the nodes' names")
    parser.add_argument("--image", help=f"kuberay: the image of all pods ({Job.image})")
    parser.add_argument(
        "--environment",
        type=Path,
        metavar="DIR",
        help="slurm, ssh: Python's environment, as on all nodes; by default this one",
    )
    parser.add_argument(
        "--notice",
        type=at_least(1, most=MOST_NOTICE_S),
        metavar="S",
        help="slurm: seconds before the end of its time at which the run is told to end after its "
        f"step: more than a step and a checkpoint take ({Job.notice_s})",
    )
    parser.add_argument(
        "--out",
        type=Path,
        metavar="DIR",
        help="on a file system that all nodes share; by default RUN_DIR-launch",
    )
    parser.add_argument("--traceback", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_intermixed_args(argv)
    config = recipes.resolved(options.recipe, options.settings)
    job = make_job(config, options)
    written = write(job, config, options.on)
    print("\n".join(map(str, written)))
    layout = f"{job.nodes} nodes of {job.gpus} GPUs"
    begin = KINDS[options.on].NEXT.format(folder=job.folder, host=(*job.hosts, "")[0])
    print(f"{layout}; begin, and go on after any end, with: {begin}")
    return 0


def make_job(config: RunConfig, options: argparse.Namespace) -> Job:
    """Raises ConfigError when the nodes do not hold the run, or a path cannot be a shared one."""
    gpus = options.gpus_per_node
    for name, kinds in ONLY.items():
        if (given := getattr(options, name)) is not None and options.on not in kinds:
            raise ConfigError(f"--{name} {given} has no effect with --on {options.on}")
    least = nodes_needed(config, gpus)
    nodes = least if options.nodes is None else options.nodes
    if nodes < least:
        raise ConfigError(f"--nodes {nodes} of {gpus} GPUs do not hold the run: it needs {least}")
    run_dir = config.run_dir.absolute()
    if not run_dir.name:
        raise ConfigError(f"logging.run_dir={run_dir} is the root of all files; name a directory")
    folder = (options.out or run_dir.with_name(run_dir.name + "-launch")).absolute()
    environment = (options.environment or Path(sys.prefix)).absolute()
    for path in (run_dir, folder, environment):
        if not re.fullmatch(r"[\w./+-]+", str(path)):  # it stands in scripts as it is
            raise ConfigError(
                f"{path} has characters that a script could take for something else; choose "
                "a path of letters, digits and . _ + - alone"
            )
    return Job(
        name=_label(run_dir.name),
        config_file=folder / "config.yaml",
        run_dir=run_dir,
        folder=folder,
        nodes=nodes,
        gpus=gpus,
        environment=environment,
        image=options.image or Job.image,
        hosts=tuple(names(options.hosts, "--hosts", "a host")) if options.hosts is not None else (),
        notice_s=options.notice or Job.notice_s,
        hub_home=_hub_home(config),
    )


def _hub_home(config: RunConfig) -> Path | None:
    """Where Hugging Face's library keeps the run's model; None for one that is no name of the
    hub."""
    from huggingface_hub.constants import HF_HOME

    return Path(HF_HOME).absolute() if is_hub_name(config.model.path) else None


def _label(name: str) -> str:
    """A name that Kubernetes takes (a label of DNS-1035), as like the given one as it can be."""
    label = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
    if not label[:1].isalpha():
        label = f"run-{label}"
    return label[:40].strip("-")


def write(job: Job, config: RunConfig, kind: str) -> list[Path]:
    """The files that it wrote. Those of before are written anew: the newest settings hold."""
    run_dir = {"run_dir": str(job.run_dir)}
    fixed = config.model_copy(update={"logging": config.logging.model_copy(update=run_dir)})
    texts = {job.config_file.name: to_yaml(fixed), **KINDS[kind].files(job)}
    try:
        job.folder.mkdir(parents=True, exist_ok=True)
        for name, text in texts.items():
            (job.folder / name).write_text(text)
    except OSError as error:
        raise ConfigError(
            f"cannot write into {job.folder}: {error.strerror}; choose another with --out DIR"
        ) from error
    return [job.folder / name for name in texts]

"""A bash script for nodes that are reached by ssh: it is started on the first of them."""

from __future__ import annotations

import shlex

from lora_moe_rl.errors import ConfigError
from lora_moe_rl.launch.job import RAY_PORT, Job

NEXT = "on {host}: bash {folder}/run.sh"


def files(job: Job) -> dict[str, str]:
    """Raises ConfigError when there are fewer hosts than the run needs."""
    if len(job.hosts) < job.nodes:
        raise ConfigError(
            f"the run needs {job.nodes} nodes of {job.gpus} GPUs, and --hosts names "
            f"{len(job.hosts)}: {', '.join(job.hosts) or 'none'}; name all of them, first the one "
            "on which the script is started"
        )
    head, *others = job.hosts[: job.nodes]
    quoted = " ".join(shlex.quote(host) for host in others)
    return {"run.sh": SCRIPT.format(job=job, port=RAY_PORT, head=shlex.quote(head), others=quoted)}


SCRIPT = """\
#!/usr/bin/env bash
# To be started on {head}; the other nodes are reached by ssh without a password.
set -euo pipefail
source {job.environment}/bin/activate
others=({others})

# Before anything starts: is every node as the run needs it? The first that is not is named.
{job.node_check}
for host in "${{others[@]}}"; do
  ssh -n "$host" 'source {job.environment}/bin/activate && {job.node_check}'
done

# Who has this token can run code on all nodes: a file on a shared disk that only you can read.
export RAY_AUTH_MODE=token RAY_AUTH_TOKEN_PATH={job.folder}/token-$$
(umask 077 && openssl rand -hex 32 > "$RAY_AUTH_TOKEN_PATH")
export RAY_worker_niceness=0 # Ray gives its workers a low priority by default
started=()
trap 'rm -f "$RAY_AUTH_TOKEN_PATH"; kill "${{started[@]}}" 2> /dev/null || true' EXIT

other=() # by the name that ssh makes of it, without a user
[ -z "${{others[0]:-}}" ] || other=("$(ssh -G "${{others[0]}}" | sed -n 's/^hostname //p')")
address=$(python -m lora_moe_rl.launch.address "${{other[@]}}") # as the others see it
ray start --head --node-ip-address="$address" --port={port} --num-gpus={job.gpus} --block &
ray=$!
started+=("$ray")
export RAY_ADDRESS="$address:{port}"
until ray status > /dev/null 2>&1; do kill -0 "$ray"; sleep 2; done # as long as it lives
settings="RAY_AUTH_MODE=token RAY_AUTH_TOKEN_PATH=$RAY_AUTH_TOKEN_PATH RAY_worker_niceness=0"
for host in "${{others[@]}}"; do # -tt: a node's Ray ends with this connection
  ssh -tt -n "$host" "source {job.environment}/bin/activate && env $settings \\
    ray start --address=$RAY_ADDRESS --num-gpus={job.gpus} --block" > /dev/null &
  started+=($!)
done
python -m lora_moe_rl.launch.wait_nodes {job.nodes}

{job.train}
"""

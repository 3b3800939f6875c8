"""A batch script for Slurm: one Ray node a Slurm node, and the driver on the first."""

from __future__ import annotations

from lora_moe_rl.launch.job import RAY_PORT, Job

NEXT = "sbatch {folder}/run.sbatch"


def files(job: Job) -> dict[str, str]:
    return {"run.sbatch": SCRIPT.format(job=job, port=RAY_PORT)}


SCRIPT = """\
#!/usr/bin/env bash
#SBATCH --job-name={job.name}
#SBATCH --nodes={job.nodes} --ntasks-per-node=1 --gpus-per-node={job.gpus} --exclusive --mem=0
#SBATCH --requeue --signal=B:TERM@{job.notice_s}
#SBATCH --output={job.folder}/%x-%j.out --open-mode=append
set -euo pipefail
source {job.environment}/bin/activate

# Before anything starts: is every node as the run needs it? The first that is not is named.
srun --ntasks="$SLURM_JOB_NUM_NODES" --ntasks-per-node=1 --kill-on-bad-exit=1 \\
  {job.node_check}

# Who has this token can run code on all nodes: a file on a shared disk that only you can read.
export RAY_AUTH_MODE=token RAY_AUTH_TOKEN_PATH={job.folder}/token-$SLURM_JOB_ID
(umask 077 && openssl rand -hex 32 > "$RAY_AUTH_TOKEN_PATH")
trap 'rm -f "$RAY_AUTH_TOKEN_PATH"' EXIT
export RAY_worker_niceness=0 # Ray gives its workers a low priority by default

mapfile -t hosts < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
head=${{hosts[0]}} # where this script runs
address=$(python -m lora_moe_rl.launch.address ${{hosts[1]:-}}) # as the others see it
srun --nodes=1 --ntasks=1 --overlap -w "$head" \\
  ray start --head --node-ip-address="$address" --port={port} --block &
ray=$!
export RAY_ADDRESS="$address:{port}"
until ray status > /dev/null 2>&1; do kill -0 "$ray"; sleep 2; done # as long as it lives
workers=$((SLURM_JOB_NUM_NODES - 1))
if [ "$workers" -gt 0 ]; then
  srun --nodes=$workers --ntasks=$workers --overlap --exclude "$head" \\
    ray start --address="$RAY_ADDRESS" --block &
fi
python -m lora_moe_rl.launch.wait_nodes {job.nodes}

# The run ends after its step, with a checkpoint, when Slurm wants the nodes back; started again,
# it goes on from there.
told= sent= driver=
tell() {{ told=1; if [ -n "$driver" ]; then sent=1; kill -TERM "$driver"; fi; }}
trap tell TERM
{job.train} &
driver=$!
if [ -n "$told" ] && [ -z "$sent" ]; then tell; fi # while it was started
code=0
wait $driver || code=$?
if [ "$code" -gt 128 ]; then # it was the signal that ended the wait
  code=0
  wait $driver || code=$?
fi
# At the end of a job's time Slurm queues none again by itself. A run that has come to its end, with
# 0, is not begun once more.
if [ -n "$told" ] && [ "$code" -ne 0 ]; then
  scontrol requeue "$SLURM_JOB_ID" || true
fi
exit "$code"
"""

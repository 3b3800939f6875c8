"""An engine whose data-parallel ranks stand on several nodes.

    engine's actor   the front, which is asked, and the first ranks   ── meeting point ──┐
    RanksOfEngine    the next ranks, on another node                  <──────────────────┘
    ...

vLLM's front finds the ranks of other nodes by the address and port of the meeting point, tells them
all else, and from then on speaks to all alike. It does not start them, nor sees them end.
"""

from __future__ import annotations

import asyncio
import socket
from typing import Any, NamedTuple

from lora_moe_rl.adapters.spec import AdapterSpec
from lora_moe_rl.cluster.addresses import speak_towards
from lora_moe_rl.cluster.log import redirect
from lora_moe_rl.config import RolloutConfig, RunConfig
from lora_moe_rl.refit.transports import place
from lora_moe_rl.rollout import device as engine_device
from lora_moe_rl.rollout import unnamed
from lora_moe_rl.upstream.checks import require_parameters, require_version
from lora_moe_rl.upstream.uncollected import uncollected

WHO = "lora_moe_rl/rollout/spread.py"
END_POLL_S = 0.2


class Meeting(NamedTuple):
    """Where the ranks of an engine meet: on the node of its front."""

    host: str
    port: int


def meeting_at(host: str) -> Meeting:
    """A port of this machine that nobody listens on."""
    with socket.socket() as one:
        one.bind((host, 0))
        return Meeting(host, one.getsockname()[1])


def spread_args(rollout: RolloutConfig, meeting: Meeting, node: int) -> dict[str, Any]:
    """More of AsyncEngineArgs, for the ranks on the engine's `node`-th node; its front is on 0."""
    local = rollout.dp // rollout.nodes
    first = {"data_parallel_start_rank": node * local} if node else {}
    return first | {
        "data_parallel_size_local": local,
        "data_parallel_address": meeting.host,
        "data_parallel_rpc_port": meeting.port,
    }


class RanksOfEngine:
    """Runs the ranks of one further node. Its creator applies `ray.remote`."""

    def __init__(
        self,
        config: RunConfig,
        model_dir: str,
        spec: AdapterSpec,
        index: int,
        node: int,
        log_path: str,
    ):
        self.config, self.model_dir, self.spec = config, model_dir, spec
        self.index, self.node = index, node
        redirect(log_path)

    async def start(self, meeting: Meeting) -> str:
        """Starts the processes, which load the model once they have met the front. Returns where
        they run, see `place`."""
        speak_towards(meeting.host)
        with uncollected():
            cpu = engine_device.prepare(self.config)
            import vllm
            from vllm.v1.engine.utils import CoreEngineProcManager
            from vllm.v1.executor import Executor

            check_vllm()
            if cpu:
                engine_device.fork_processes(self.config)
        parts = self.config, self.spec, self.model_dir, self.index, cpu
        args = engine_device.engine_args(*parts)
        args |= spread_args(self.config.rollout, meeting, self.node)
        made = vllm.AsyncEngineArgs(**args).create_engine_config(headless=True)
        self.manager = CoreEngineProcManager(
            local_engine_count=made.parallel_config.data_parallel_size_local,
            start_index=made.parallel_config.data_parallel_rank,
            local_start_index=0,
            vllm_config=made,
            local_client=False,
            handshake_address=f"tcp://{meeting.host}:{meeting.port}",
            executor_class=Executor.get_class(made),
            log_stats=False,
        )
        return place()

    async def forget_names(self) -> list[str]:
        """Called once the front has met them all: see `unnamed`."""
        return unnamed.forget_names()

    async def ended(self) -> str:
        """Waits until one of the processes has ended; which, and how."""
        while not (ended := self.manager.finished_procs()):
            await asyncio.sleep(END_POLL_S)
        return ", ".join(f"{name} with exit code {code}" for name, code in ended.items())

    async def shutdown(self) -> None:
        """Ends vLLM's processes."""
        self.manager.shutdown(timeout=0)


def check_vllm() -> None:
    """Raises ConfigError when the vLLM that is installed is not as this file expects."""
    require_version("vllm", WHO)
    from vllm.v1.engine.utils import CoreEngineProcManager

    names = ("self", "local_engine_count", "start_index", "local_start_index", "vllm_config")
    names += ("local_client", "handshake_address", "executor_class", "log_stats")
    require_parameters(CoreEngineProcManager.__init__, names, WHO)

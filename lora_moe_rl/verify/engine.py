"""A rollout engine that can also take an adapter by vLLM's own loader, to compare ours with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lora_moe_rl.adapters.spec import AdapterSpec
from lora_moe_rl.config import RunConfig
from lora_moe_rl.rollout import outputs
from lora_moe_rl.rollout.engine import RolloutEngine
from lora_moe_rl.rollout.merged import MergedRolloutEngine
from lora_moe_rl.verify.processes import Processes

FILES_ID = 1_000_000  # vLLM's number of the adapter from files, far from those of our versions


class FilesEngine(RolloutEngine):
    """Has beside the versions of ours one adapter from a PEFT directory, in a slot of its own."""

    worker = "lora_moe_rl.verify.refit_worker.VerifiedReceiver"  # methods of vLLM's workers

    def _engine_args(self, cpu: bool) -> dict[str, Any]:
        return super()._engine_args(cpu) | {"worker_extension_cls": self.worker}

    async def load_files(self, directory: str) -> None:
        """Files are parsed and registered in place of the last ones."""
        await self.llm.add_lora(self._from_files(directory, load_inplace=True))

    async def unload_files(self) -> None:
        await self.llm.remove_lora(FILES_ID)

    async def score_files(self, sequences: Sequence[Sequence[int]], directory: str):
        """Logprobs and routes under the adapter that vLLM itself took, one sequence after the
        other."""
        return await self._score_each(sequences, None, self._from_files(directory))

    async def _score_each(self, sequences, version: int | None, adapter: Any = None):
        params = outputs.scoring_params()
        answers = [await self._request(ids, params, version, adapter=adapter) for ids in sequences]
        return outputs.scores_and_routes(answers, self.spec.shape)

    async def unlike_files(
        self, version: int, names: Mapping[tuple[str, int], str], tolerance: float
    ) -> list[dict[str, Any]]:
        """Where the slot of `version` and that of the adapter from files differ. `names`: the site
        of (vLLM's module, part)."""
        told = [[*place, name] for place, name in names.items()]
        answers = await self._workers("verify_unlike", version, FILES_ID, told, tolerance)
        return [fault for answer in answers for fault in answer["unlike"]]

    @staticmethod
    def _from_files(directory: str, load_inplace: bool = False):
        from vllm.lora.request import LoRARequest

        return LoRARequest("from files", FILES_ID, directory, load_inplace=load_inplace)


class EngineProcess(Processes):
    """One engine in a process of its own. A context: vLLM's processes end with it."""

    def __init__(
        self,
        config: RunConfig,
        spec: AdapterSpec,
        model_dir: Path,
        log: Path,
        in_slots: type[RolloutEngine] = FilesEngine,
    ):
        """`in_slots`: the class of an engine that has slots."""
        self.start_timeout_s = config.rollout.start_timeout_s
        arguments = (in_slots, config, spec, str(model_dir), str(log))
        super().__init__(["engine"], _engine, *arguments, logs=[log], grace_s=60.0)

    @property
    def pid(self) -> int:
        return self.processes[0].pid

    def start(self) -> dict[str, Any]:
        return self.ask("start", timeout_s=self.start_timeout_s)

    def ask(self, method: str, *args: Any, timeout_s: float = 600) -> Any:
        """What a coroutine of the engine returns; see `Processes.call`."""
        return self.call(method, *args, timeout_s=timeout_s)[0]


def _engine(
    index: int,
    in_slots: type[RolloutEngine],
    config: RunConfig,
    spec: AdapterSpec,
    model_dir: str,
    log: str,
) -> RolloutEngine:
    engine = MergedRolloutEngine if config.refit.mode == "merged" else in_slots
    return engine(config, model_dir, spec, index, log)

"""The vLLM worker of `bench refit`: ours, with what is measured inside it."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from lora_moe_rl.bench.process import status_bytes
from lora_moe_rl.refit.copies import Port, port_of
from lora_moe_rl.refit.parts import SentPart
from lora_moe_rl.refit.receiver import Receiver


class BenchReceiver(Receiver):
    """Methods of every worker."""

    def bench_in_memory(self, directory: str, lora_id: int) -> dict[str, Any]:
        """vLLM's own classes without its files. Reading the files is not counted; the copy of the
        tensors is, since vLLM scales them in place."""
        from safetensors.torch import load_file
        from vllm.lora.lora_model import LoRAModel
        from vllm.lora.peft_helper import PEFTHelper

        folder = Path(directory)
        config = json.loads((folder / "adapter_config.json").read_text())
        tensors = load_file(folder / "adapter_model.safetensors")
        worker = self.model_runner.lora_manager
        manager = worker._adapter_manager
        mapper = getattr(manager.model, "hf_to_vllm_mapper", None)

        def load() -> None:
            helper = PEFTHelper.from_dict(config)
            helper.validate_legal(worker.lora_config)
            model = LoRAModel.from_lora_tensors(
                lora_id,
                {name: tensor.clone() for name, tensor in tensors.items()},
                helper,
                device="cpu",
                dtype=worker.lora_config.lora_dtype,
                model_vocab_size=worker.vocab_size,
                weights_mapper=mapper and mapper.get_rename_mapper(),
                skip_prefixes=getattr(manager.model, "lora_skip_prefixes", None),
            )
            manager.remove_adapter(lora_id)
            manager.add_adapter(model)
            manager.activate_adapter(lora_id)

        return {"seconds": timed(load, port_of(self.device))}

    def bench_copies(self, sent_json: str, rounds: int) -> dict[str, list[float]]:
        """The write alone, over the newest version with its own values; and one plain copy of as
        many bytes from memory, on a GPU page-locked, to where the slots are. In turns, so that both
        meet the same machine."""
        sent = [SentPart(**fields) for fields in json.loads(sent_json)]
        slot, port = self._refit_slots.versions()[sent[0].version], self._refit_copies
        buffers = {
            part.source: self._refit_incoming.open(self._refit_layouts[part.source], part)
            for part in sent
        }
        source = torch.cat([torch.from_numpy(buffer) for buffer in buffers.values()])
        target = torch.empty_like(source, device=self._refit_slots.device).fill_(1)

        def write() -> None:
            for part in sent:
                buffer, places = buffers[part.source], self._refit_places[part.source]
                writers = self._refit_writers(part.source, slot)
                for place, write_box in zip(places, writers, strict=True):
                    write_box(buffer[place.span])

        seconds: dict[str, list[float]] = {"write": [], "memcpy": []}
        port.lock(source.numpy())
        try:
            for _ in range(rounds):
                seconds["write"].append(timed(write, port))
                seconds["memcpy"].append(
                    timed(lambda: target.copy_(source, non_blocking=True), port)
                )
        finally:
            port.unlock(source.numpy())
        return seconds

    def bench_memory(self, version: int, sent_json: str) -> dict[str, int]:
        """Stages a version. `extra`: the peak over what was resident before, without the pages that
        the sender shares with us, which are in memory already."""
        Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
        resident, shared = status_bytes("VmRSS"), status_bytes("RssShmem")
        answer = self.refit_stage(version, sent_json)
        peak, shared = status_bytes("VmHWM"), status_bytes("RssShmem") - shared
        if "error" in answer:
            return answer
        return {"extra": peak - resident - shared, "shared": shared}


def timed(call: Callable[[], object], port: Port) -> float:
    """Seconds until what it begins on the device is done; what was begun before is not counted."""
    port.wait()
    started = time.perf_counter()
    call()
    port.wait()
    return time.perf_counter() - started

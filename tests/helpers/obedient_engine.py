"""An engine that does what a file tells it. It stands alone, so that its actors, of which the tests
start many, import no torch."""

from __future__ import annotations

import os
import time
from pathlib import Path

from lora_moe_rl.errors import EngineDied, RefitError


class Engine:
    """Writes down what it is asked. What is to happen to it stands in a file that is named after
    its number and the method, once for each line."""

    def __init__(self, config, model_dir, spec, index, log_path):
        self.folder, self.index = Path(log_path).parent, index

    def _do(self, method: str, *args):
        with open(self.folder / f"asked-{self.index}", "a") as file:
            print(method, *args, file=file)
        fate = self.folder / f"fate-{self.index}-{method}"
        lines = fate.read_text().split() if fate.exists() else []
        if lines:
            fate.write_text("\n".join(lines[1:]))
            if lines[0] == "exit":
                os._exit(1)
            if lines[0] == "dead":
                raise EngineDied(f"vLLM's processes of engine {self.index} have ended")
            if lines[0] == "refuse":
                raise RefitError("no")
            time.sleep(60)
        return method, args

    async def start(self):
        return self._do("start")

    async def prepare_refit(self, *args):
        self._do("prepare_refit")

    async def publish(self, version, *sent):
        return self._do("publish", version, *sent)

    async def probe(self, sequences, version):
        return (self._do("probe", version), "checksum", True), f"table-{self.index}"

    async def differing(self, version, *sent):
        return [f"tensor-{self.index}", "tensor"] if self._do("differing", version) else []

    async def sample(self, token_ids, n, version, seed):
        return self._do("sample", token_ids, version, seed), f"table-{self.index}"

"""What a process that holds environments imports, to tell of their tools."""

import json
import subprocess
import sys

import pytest

PROGRAM = """
import json, sys
from lora_moe_rl.environments.parts.instance_worker import Held

class Listener:
    def reset(self): ...
    def hear(self, often: int) -> str:
        '''Hears it.

        Args:
            often: How often.
        '''

held = Held({"one": Listener}, 100)
held.make("one")
(schema,) = held.describe()["schemas"]
print(json.dumps([schema["function"]["parameters"]["properties"], "torch" in sys.modules]))
"""


@pytest.mark.seconds
def test_no_torch():
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True)
    often = {"often": {"type": "integer", "description": "How often."}}
    assert done.returncode == 0 and json.loads(done.stdout) == [often, False], done.stderr

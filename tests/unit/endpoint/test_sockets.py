"""Ten thousand connections at the same time, over real sockets."""

from __future__ import annotations

import asyncio
import json
import resource
import sys
from collections import Counter
from pathlib import Path

import many_sockets
import pytest
from echo_source import Echo
from spoken_source import TOKENIZER

from lora_moe_rl.endpoint.admission import Admission
from lora_moe_rl.endpoint.app import Endpoint
from lora_moe_rl.endpoint.listening import Listening
from lora_moe_rl.endpoint.rendering import Chats
from lora_moe_rl.endpoint.sessions import Sessions

MANY, RUNNING, WAITING = 10_000, 256, 4096


@pytest.fixture
def descriptors():
    """As many as the connections take, in this process and in those that it starts."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MANY + 1000
    if hard != resource.RLIM_INFINITY and hard < wanted:
        pytest.skip(f"a process may open {hard} files here, and {wanted} are needed")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, wanted), hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.slow
@pytest.mark.whole
@pytest.mark.timeout(300)
async def test_of_ten_thousand_connections_each_is_answered_once(descriptors):
    source, listening = Echo(), Listening("127.0.0.1", 0)
    here = Endpoint(Sessions(None, source), Chats(TOKENIZER), Admission(RUNNING, WAITING))
    serving = asyncio.create_task(listening.serve(here.app()))
    await listening.started()
    port = listening.root.rpartition(":")[2]
    client = await asyncio.create_subprocess_exec(
        *(sys.executable, str(Path(many_sockets.__file__)), port, str(MANY)),
        stdout=asyncio.subprocess.PIPE,
    )
    try:
        printed, _ = await client.communicate()
        assert client.returncode == 0
        told = json.loads(printed)
        assert told["answers"] == [str(number)[::-1] for number in range(MANY)]
        assert source.answered == Counter(map(str, range(MANY)))
        assert source.most <= RUNNING and here.admission.refused == told["refused"] > 0
        assert here.admission.inside == here.admission.bytes == 0
    finally:
        if client.returncode is None:
            client.kill()
        listening.stop()
        await serving

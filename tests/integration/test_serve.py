"""`lora-moe-rl serve` with a real engine, asked by the openai client: its logprobs are those of the
forward of Hugging Face."""

from __future__ import annotations

import re
import signal

import numpy as np
import openai
import pytest
from cli_run import CliRun
from engine_fixtures import save_random_model

from lora_moe_rl.verify import hf

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def test_a_model_is_served_with_the_logprobs_of_its_own_forward(tmp_path):
    model = save_random_model("qwen3_moe", tmp_path)
    run = CliRun("serve", tmp_path, "--port", "0", "model.max_length=128", output=tmp_path / "out")
    try:
        run.wait_for_text("serves base")
        assert "chat template: the tokenizer's own; model.max_length=128" in run.output
        url = re.search(r"http://\S+/v1", run.output)[0]
        client = openai.OpenAI(base_url=url, api_key="none", max_retries=0)
        opened = client.post("/sessions", body={}, cast_to=object)
        mine = openai.OpenAI(base_url=opened["base_url"], api_key=opened["api_key"])
        messages = [{"role": "user", "content": "2+3="}]
        for _ in range(2):
            asked = {"model": "base", "messages": messages, "max_tokens": 6, "logprobs": True}
            said = mine.chat.completions.create(**asked, extra_body={"cache_salt": "a"})
            messages += [said.choices[0].message, {"role": "user", "content": "7"}]
        shown = mine.get("/session", cast_to=object)
        assert shown["forks"] == 0
        (sample,) = shown["samples"]
        parts = sample["segments"]
        assert [part["author"] for part in parts] == ["user", "policy", "user", "policy"]
        ids = [token for part in parts for token in part["token_ids"]]
        logprobs = np.array([value for part in parts for value in part["logprobs"]], np.float32)
        sampled = np.array([value for part in parts for value in part["mask"]])
        expected = np.append(0, hf.logprobs(model, ids))
        np.testing.assert_allclose(logprobs[sampled], expected[sampled], atol=1e-5)
        with pytest.raises(openai.NotFoundError, match="there are base"):
            client.completions.create(model="policy@3", prompt="a")
        run.process.send_signal(signal.SIGTERM)
        assert run.finish(120) == 0, run.output
        assert not run.leftovers()
    finally:
        run.end()

"""A tiny Mixture-of-Experts model learns to add and subtract, by a loop of Tinker's SDK.

    lora-moe-rl tinker qwen3_moe adapter.rank=16 trainer.world_size=2 trainer.ep=2
    pip install tinker==0.38.0
    TINKER_BASE_URL=http://127.0.0.1:8100 TINKER_API_KEY=tml-any python recipes/tinker/arithmetic.py

What `recipes/tiny_arithmetic.py` is as a recipe, written as a client writes it: sample groups,
compare their rewards, learn, take a new sampler. It begins with about a third of its answers right.

Shape letters: P prompts of a step, G samples of a group, N tokens that are fed.
"""

import argparse
import itertools

import tinker
from tinker import types

from lora_moe_rl.tiny.arithmetic import problems

PROMPTS, GROUP = 16, 8


def datum(prompt: list[int], sample: types.SampledSequence, advantage: float) -> types.Datum:
    """One sample to learn from: what is fed has its last token left out, what is wanted its first;
    the prompt counts for nothing."""
    tokens = prompt + sample.tokens
    given, told = len(prompt) - 1, len(sample.tokens)
    return types.Datum(
        model_input=types.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={
            "target_tokens": tokens[1:],
            "logprobs": [0.0] * given + sample.logprobs,
            "advantages": [0.0] * given + [advantage] * told,
        },
    )


def step(client: tinker.TrainingClient, rows, tokenizer) -> tuple[float, dict[str, float]]:
    """(Mean reward, metrics) of one step of GRPO on P prompts of G samples each."""
    sampler = client.save_weights_and_get_sampling_client().result()
    how = types.SamplingParams(max_tokens=8, temperature=1.0)
    asked = []
    for text, answer in itertools.islice(rows, PROMPTS):
        prompt = tokenizer.encode(text, add_special_tokens=False)
        given = types.ModelInput.from_ints(prompt)
        asked.append((prompt, answer, sampler.sample(given, GROUP, how)))
    data, rewards = [], []
    for prompt, answer, future in asked:
        samples = future.result().sequences
        texts = [tokenizer.decode(one.tokens, skip_special_tokens=True) for one in samples]
        mine = [float(text == answer) for text in texts]
        mean = sum(mine) / len(mine)
        rewards.append(mean)
        if 0 < mean < 1:
            pairs = zip(samples, mine, strict=True)
            data += [datum(prompt, one, reward - mean) for one, reward in pairs]
    metrics: dict[str, float] = {}
    if data:
        learned = client.forward_backward(data, "importance_sampling")
        stepped = client.optim_step(types.AdamParams(learning_rate=1.5e-3, beta2=0.999))
        metrics = learned.result().metrics | (stepped.result().metrics or {})
    return sum(rewards) / len(rewards), metrics


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--save", metavar="NAME", help="save the model under a name at the end")
    options = parser.parse_args()
    service = tinker.ServiceClient()
    (model,) = tinker.RestClient().get_server_capabilities().result().supported_models
    rank = options.rank
    client = service.create_lora_training_client(model.model_name, rank=rank, seed=0).result()
    tokenizer, rows = client.get_tokenizer(), problems(0)
    for number in range(1, options.steps + 1):
        reward, metrics = step(client, rows, tokenizer)
        told = "  ".join(f"{name} {value:.4g}" for name, value in metrics.items())
        print(f"step {number:3d}  reward {reward:.3f}  {told}", flush=True)
    if options.save:
        print(client.save_state(options.save).result().path)


if __name__ == "__main__":
    main()

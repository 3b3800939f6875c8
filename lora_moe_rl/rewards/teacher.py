"""A teacher behind an OpenAI-compatible server: what it would have given the sampled tokens.

    POST /v1/completions {"prompt": [token ids of a sample], "max_tokens": 1, "prompt_logprobs": K}

`prompt_logprobs` is vLLM's: for each token of the prompt its logprob under the model, at
temperature 1, by the token's id, and those of the K likeliest tokens there. Token ids go there and
are looked up in what comes back, so that nothing is tokenised again and a logprob of another token
is noticed.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from lora_moe_rl.config.teacher import TeacherSettings
from lora_moe_rl.data.samples import Group, Sample
from lora_moe_rl.data.top import Top
from lora_moe_rl.errors import ConfigError, RewardError
from lora_moe_rl.rewards.server import Server

# Logprobs of a sample's tokens, float32 [R], and what is likely in their places; None where nobody
# asked, or nothing is taught.
Judgement = tuple[np.ndarray, Top | None]
KEYS = "algorithm.teacher_"
MINUS_INFINITY = -9999.0  # what vLLM writes for it, since JSON has no infinity
ROUNDING = 1e-3  # that a logprob may be above 0
PROBED, PROBED_ADDED = 200, 100  # ids that are compared, over the vocabulary and of added tokens
PIECE = 128  # tokens of a request that compares ids
UNREADABLE = "\ufffd"  # stands for part of a character
SHOWN = 3


class Teacher:
    """`alone`: whether nothing else gives rewards; a sample's reward is then minus its reverse KL
    to the teacher, the mean over its tokens. `top_k`: of how many of its likeliest tokens it is
    asked. Raises ConfigError for settings that cannot work."""

    def __init__(self, settings: TeacherSettings, alone: bool, top_k: int = 0):
        check_named(settings)
        self.model, self.alone, self.top_k = settings.teacher_model, alone, top_k
        self._server = Server(
            "teacher",
            KEYS,
            str(settings.teacher_url),
            settings.teacher_key_env,
            settings.teacher_concurrency,
            settings.teacher_timeout_s,
            settings.teacher_retries,
            settings.teacher_patience_s,
        )

    async def score(self, group: Group) -> None:
        """Puts the teacher's logprobs into a group, its likeliest tokens, and rewards if it is
        `alone`. A sample that it could not score has failed: no reward, and a line in the
        failures."""
        asked = (self._of_response(sample) for sample in group.samples)
        found = await asyncio.gather(*asked, return_exceptions=True)
        put_all(group, found, self.alone, self.top_k)

    async def _of_response(self, sample: Sample) -> Judgement:
        """Logprobs, float32 [R], 0 for tokens that no policy sampled, and the likeliest tokens at
        each place, [R, K]."""
        steps = (await self._steps(sample.token_ids.tolist()))[len(sample.prompt_ids) - 1 :]
        own = np.array([step.own["logprob"] for step in steps], np.float32)
        if not self.top_k:
            return own * sample.mask, None
        ids = np.array([step.ids for step in steps], np.int32)
        logprobs = np.array([step.logprobs for step in steps], np.float32)
        return own * sample.mask, Top(ids, logprobs)

    async def logprobs(self, token_ids: Sequence[int]) -> np.ndarray:
        """float32 [L - 1], of every token after the first. Raises RewardError."""
        return np.array([step.own["logprob"] for step in await self._steps(token_ids)], np.float32)

    async def _steps(self, token_ids: Sequence[int]) -> list[Step]:
        """What is said of each token after the first. Raises RewardError when it is said of others,
        or is no logprob."""
        answer = await self._server.ask(
            lambda client: client.completions.create(
                model=str(self.model),
                prompt=list(token_ids),
                max_tokens=1,
                temperature=1,
                extra_body={"prompt_logprobs": self.top_k},
            )
        )
        choices = getattr(answer, "choices", None) or [None]
        given = getattr(choices[0], "prompt_logprobs", None)
        try:
            return list(_steps(given, token_ids, self.top_k))
        except (KeyError, TypeError, ValueError) as error:
            raise RewardError(
                f"the teacher at {self._server.url} answered without the logprobs of the tokens "
                f"that it was sent: {type(error).__name__}: {error}"
            ) from error

    async def probe(self, tokenizer: Any, longest: int) -> str:
        """What is known of the teacher once it has answered, as a sentence. `longest`: tokens of a
        sample. Raises ConfigError when it is not there, takes no such length, gives no logprobs or
        reads the ids of `tokenizer` otherwise."""
        try:
            most = await self._most_tokens()
            if most is not None and most < longest + 1:
                raise ConfigError(
                    f"the teacher takes {most} tokens, and a sample may have model.max_length="
                    f"{longest} and one more is asked for; serve it with --max-model-len "
                    f"{longest + 1} or more, or lower model.max_length"
                )
            ids = probe_ids(tokenizer)
            said = [text for piece in _pieces(ids, longest) for text in await self._texts(piece)]
        except RewardError as error:
            more = f"; serve it with --max-logprobs {self.top_k}, or lower {KEYS}top_k"
            few = any(words in str(error) for words in ("prompt logprobs", "were asked for"))
            hint = more if self.top_k and few else ""
            raise ConfigError(f"{KEYS}url={self._server.url}: {error}{hint}") from error
        count = compare_texts(tokenizer, ids, said)
        takes = "" if most is None else f", takes {most:,} tokens"
        tells = f", tells its {self.top_k} likeliest of each" if self.top_k else ""
        where = f"{self.model} at {self._server.url}{takes}{tells}"
        return f"{where}; {count} token ids mean the same to it"

    async def _texts(self, ids: list[int]) -> list[str | None]:
        """What each id is to the teacher; None where it does not say."""
        steps = await self._steps([ids[0], *ids])  # of the first token nothing is said
        return [step.own.get("decoded_token") for step in steps]

    async def _most_tokens(self) -> int | None:
        """Tokens of a request, None where the server does not say."""
        listed = await self._server.ask(lambda client: client.models.list())
        models = {model.id: model for model in getattr(listed, "data", None) or []}
        if models and self.model not in models:
            raise ConfigError(
                f"{KEYS}model={self.model}: the server at {self._server.url} has "
                f"{', '.join(sorted(models))}"
            )
        return getattr(models.get(str(self.model)), "max_model_len", None)

    async def close(self) -> None:
        await self._server.close()


def put_all(
    group: Group, found: Sequence[Judgement | BaseException], alone: bool, top_k: int
) -> None:
    """Puts what a teacher has found of each sample into its group, or why there is nothing. A
    RewardError fails the sample, another error is raised. `alone`: nothing else gives rewards.
    `top_k`: how many of its likeliest tokens were asked for."""
    teacher: list[np.ndarray] = []
    likeliest: list[Top | None] = []
    for i, (sample, one) in enumerate(zip(group.samples, found, strict=True)):
        if isinstance(one, RewardError):
            _failed(group, i, one)
            own, top = np.zeros(len(sample.mask), np.float32), None
        elif isinstance(one, BaseException):
            raise one
        else:
            own, top = one
            if alone and i not in group.details.reasons:  # its conversation may have failed
                group.rewards[i] = (own - sample.logprobs)[sample.mask].mean()
        teacher.append(own)
        likeliest.append(top)
    group.teacher = teacher
    if top_k:
        pairs = zip(group.samples, likeliest, strict=True)
        group.likeliest = [top or _nothing(sample, top_k) for sample, top in pairs]


def _nothing(sample: Sample, top_k: int) -> Top:
    """What stands in the place of likeliest tokens for a sample of which nothing is learned: any,
    which are as likely as each other."""
    ids = np.tile(np.arange(top_k, dtype=np.int32), (len(sample.mask), 1))
    return Top(ids, np.full(ids.shape, -np.log(2 * top_k), np.float32))


def _failed(group: Group, index: int, error: RewardError) -> None:
    if not (np.isnan(group.rewards[index]) and index in group.details.reasons):
        reason = f"prompt {group.prompt.number}: {error}"
        group.failures.append(reason)
        group.details.reasons[index] = reason
    group.rewards[index] = np.nan


def check_named(settings: TeacherSettings) -> None:
    """Raises ConfigError when the teacher is not named."""
    for key in ("url", "model"):
        if getattr(settings, f"teacher_{key}") is None:
            raise ConfigError(
                f"{KEYS}{key} is not set: name the teacher's server (http://HOST:PORT/v1) by "
                f"{KEYS}url and its name there by {KEYS}model (docs/algorithms.md)"
            )


class Step(NamedTuple):
    """What is said of a token, and the teacher's likeliest tokens in its place, the likeliest
    first, as many as were asked for."""

    own: dict[str, Any]
    ids: list[int]
    logprobs: list[float]


def _steps(given: Any, token_ids: Sequence[int], top_k: int) -> Iterator[Step]:
    """What `prompt_logprobs` says of each token after the first. Raises KeyError, TypeError or
    ValueError for what are no logprobs of these tokens, or of fewer than were asked for."""
    if given is None:
        raise ValueError("no prompt_logprobs (they are vLLM's; does another program serve it?)")
    if len(given) != len(token_ids):
        raise ValueError(f"{len(given)} logprobs for {len(token_ids)} tokens")
    for place, (token, step) in enumerate(zip(token_ids[1:], given[1:], strict=True), 1):
        if str(token) not in step:
            raise ValueError(f"at place {place} is {'/'.join(step)}, and {token} was sent")
        value = float(step[str(token)]["logprob"])
        if not MINUS_INFINITY < value <= ROUNDING:
            raise ValueError(f"token {token} at place {place} has {value:g}, which is no logprob")
        ids, logprobs = _likeliest(step, place, top_k) if top_k else ([], [])
        yield Step(step[str(token)], ids, logprobs)


def _likeliest(step: dict[str, Any], place: int, top_k: int) -> tuple[list[int], list[float]]:
    """The ids and logprobs of the `top_k` likeliest of the tokens that are told at a place; vLLM
    tells the prompt's own token too, where it is none of them."""
    every = sorted(
        ((float(one["logprob"]), int(token)) for token, one in step.items()), reverse=True
    )
    if len(every) < top_k:
        raise ValueError(f"at place {place} are {len(every)} tokens, and {top_k} were asked for")
    ids, logprobs = [token for _, token in every[:top_k]], [one for one, _ in every[:top_k]]
    if not sum(map(math.exp, logprobs)) <= 1 + ROUNDING or any(token < 0 for token in ids):
        raise ValueError(f"at place {place} are {ids} with {logprobs}, which are no probabilities")
    return ids, logprobs


def probe_ids(tokenizer: Any) -> list[int]:
    """Ids over the whole vocabulary, and of added tokens, by which vocabularies differ that are
    otherwise one."""
    added = sorted(tokenizer.get_added_vocab().values())[:PROBED_ADDED]
    spread = np.linspace(0, len(tokenizer) - 1, PROBED).astype(int).tolist()
    return sorted({*spread, *added})


def _pieces(ids: list[int], longest: int) -> Iterator[list[int]]:
    size = max(1, min(PIECE, longest) - 1)
    for start in range(0, len(ids), size):
        yield ids[start : start + size]


def compare_texts(tokenizer: Any, ids: Sequence[int], said: Sequence[str | None]) -> int:
    """How many ids were compared. Raises ConfigError when the teacher reads one otherwise, or says
    of none what it is. Ids of parts of characters cannot be compared, which have no text alone."""
    own = [tokenizer.decode([i]) for i in ids]
    known = [
        (i, mine, theirs)
        for i, mine, theirs in zip(ids, own, said, strict=True)
        if theirs is not None and UNREADABLE not in mine + theirs
    ]
    wrong = [one for one in known if one[1].strip() != one[2].strip()]
    if wrong:
        shown = (f"{i} is {mine!r} here and {theirs!r} there" for i, mine, theirs in wrong[:SHOWN])
        some = "; ".join(shown)
        raise ConfigError(
            f"{KEYS}model has another vocabulary than the policy: of {len(known)} token ids "
            f"{len(wrong)} mean something else to it ({some}); its logprobs would be of other "
            "texts. Take a teacher with the policy's tokenizer"
        )
    if not known:
        raise ConfigError(
            f"{KEYS}model: its server does not say what token ids stand for, so that vocabularies "
            "cannot be compared; serve it without --skip-tokenizer-init"
        )
    return len(known)

"""A model behind an OpenAI-compatible server, asked within bounds: a judge, or a teacher."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable

from lora_moe_rl.errors import ConfigError, RewardError

try:
    import openai
except ImportError as missing:
    raise ConfigError(
        "a judge or a teacher behind a server needs the package openai: install "
        "lora_moe_rl[judge], or openai"
    ) from missing


class Server:
    """One server. Requests are bounded in number at a time, and each in its tries and its time.

    `who` names it in errors (`judge`), `keys` is what its settings' names begin with (`args.`).
    url: up to and with `/v1`. key_env: the environment variable that holds the key, None for a
    server that wants none. concurrency: requests at a time. timeout_s: of one try. retries: more
    tries after one that failed, with growing pauses. patience_s: of a request with all its tries,
    once it is its turn. Raises ConfigError for settings that cannot work.
    """

    def __init__(
        self,
        who: str,
        keys: str,
        url: str,
        key_env: str | None,
        concurrency: int,
        timeout_s: float,
        retries: int,
        patience_s: float,
    ):
        if not str(url).startswith(("http://", "https://")):
            raise ConfigError(f"{keys}url={url} is no address: write http://HOST:PORT/v1")
        if concurrency < 1 or retries < 0 or not (timeout_s > 0 and patience_s > 0):  # nor NaN
            raise ConfigError(
                f"{keys}concurrency={concurrency} is to be at least 1, {keys}retries={retries} at "
                f"least 0, and {keys}timeout_s and {keys}patience_s above 0"
            )
        self.who, self.keys, self.url, self.patience_s = who, keys, url, patience_s
        key = _key(key_env, who, keys)
        self._client = openai.AsyncOpenAI(
            base_url=url, api_key=key, timeout=timeout_s, max_retries=retries
        )
        self._turn = asyncio.Semaphore(concurrency)

    async def ask[Answer](
        self, request: Callable[[openai.AsyncOpenAI], Awaitable[Answer]]
    ) -> Answer:
        """What the request is answered. Raises RewardError when there is no answer in the tries
        and the time it has."""
        where = f"the {self.who} at {self.url}"
        try:
            async with self._turn, asyncio.timeout(self.patience_s):
                return await request(self._client)
        except TimeoutError as error:
            raise RewardError(
                f"{where} gave no answer within {self.keys}patience_s={self.patience_s:g}"
            ) from error
        except (openai.OpenAIError, ValueError) as error:  # ValueError: of a body that is no JSON
            cause = f" ({error.__cause__})" if str(error.__cause__ or "") else ""
            raise RewardError(f"{where} gave no answer: {error}{cause}") from error

    async def close(self) -> None:
        await self._client.close()


def _key(variable: str | None, who: str, keys: str) -> str:
    """Raises ConfigError when the variable is not set."""
    if variable is None:
        return "none"  # what the client sends; it insists on one
    if not (key := os.environ.get(variable)):
        raise ConfigError(
            f"{keys}key_env={variable}: there is no such environment variable, or it is empty; set "
            f"it to the key of the {who}'s server"
        )
    return key

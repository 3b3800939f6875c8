"""A client with many connections at the same time, each with one request that is asked again until
it is answered. By itself, for it needs as many descriptors as it has connections:

    python many_sockets.py PORT COUNT      prints {"answers": [...], "refused": N} as JSON
"""

from __future__ import annotations

import asyncio
import json
import random
import sys

SOONER = 20  # times as soon as Retry-After says
CONNECTING = 1000  # at a time


async def asked(reader, writer, number: int) -> tuple[int, dict[str, str], dict]:
    """Status, headers and body of the answer to one completion."""
    body = json.dumps({"model": "policy", "prompt": str(number)}).encode()
    head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
    await writer.drain()
    status, *lines = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
    headers = {
        name.lower(): value for name, _, value in (line.partition(": ") for line in lines if line)
    }
    answer = await reader.readexactly(int(headers["content-length"]))
    return int(status.split()[1]), headers, json.loads(answer)


async def main(port: int, count: int) -> None:
    refused, draw, opened, all_open = 0, random.Random(0), 0, asyncio.Event()
    connecting = asyncio.Semaphore(CONNECTING)

    async def until_answered(number: int) -> str:
        nonlocal refused, opened
        async with connecting:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
        opened += 1
        if opened == count:
            all_open.set()
        await all_open.wait()
        while True:
            status, headers, body = await asked(reader, writer, number)
            if status == 200:
                writer.close()
                return body["choices"][0]["text"]
            assert status == 429, body
            refused += 1
            await asyncio.sleep(draw.uniform(1, 2) * float(headers["retry-after"]) / SOONER)

    answers = await asyncio.gather(*(until_answered(number) for number in range(count)))
    print(json.dumps({"answers": answers, "refused": refused}))


if __name__ == "__main__":
    asyncio.run(main(*map(int, sys.argv[1:])))

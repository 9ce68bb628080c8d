"""The limit: a bare aiohttp loop that posts the growing conversation and keeps nothing.

As lean as aiohttp allows: no cookies, no needless headers, JSON by msgspec, and the garbage collector as rarely at
work as in our own runs. Nobody who talks to an engine
through aiohttp can spend less.
"""

import aiohttp
import msgspec
import uvloop

from overhead_episode import (
    MODEL,
    OBSERVATION,
    OPENING,
    SYSTEM,
    TURNS,
    Cell,
    Order,
    allow_open_files,
    measure,
    report,
)
from rollwright.run.gc_tuning import rare_collections


async def run(order: Order) -> Cell:
    url = f"{order.url}/chat/completions"
    encode = msgspec.json.Encoder().encode
    decode = msgspec.json.Decoder().decode
    async with aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0),
        cookie_jar=aiohttp.DummyCookieJar(),
        headers={"Content-Type": "application/json"},
        skip_auto_headers=("Accept", "Accept-Encoding", "User-Agent"),
    ) as session:

        async def play() -> bool:
            messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": OPENING}]
            for _ in range(TURNS):
                body = encode({"model": MODEL, "messages": messages})
                async with session.post(url, data=body) as response:
                    answer = decode(await response.read())
                messages.append(answer["choices"][0]["message"])
                messages.append({"role": "user", "content": OBSERVATION})
            return True

        return await measure(play, order, f"aiohttp {aiohttp.__version__}")


if __name__ == "__main__":
    order = Order.from_command_line()
    allow_open_files(order.concurrent)
    with rare_collections():
        report(uvloop.run(run(order)))

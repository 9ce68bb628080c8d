"""An agent as one has it already, with OpenAI's client, and a reward for it.

The only lines for rollwright are the address and the key, which lead to the model that is trained.
"""

from typing import Any

import openai


async def solve(task: dict[str, Any], session: Any) -> str:
    """Asks once, and returns the answer."""
    messages: list[Any] = [{"role": "user", "content": task["question"]}]
    async with openai.AsyncOpenAI(base_url=session.base_url, api_key=session.api_key) as client:
        reply = await client.chat.completions.create(model="policy", messages=messages)
    return reply.choices[0].message.content or ""


def correct(task: dict[str, Any], answer: str) -> float:
    """1 where the last word is the larger number."""
    words = answer.split()
    return float(bool(words) and words[-1].strip(".!") == task["answer"])

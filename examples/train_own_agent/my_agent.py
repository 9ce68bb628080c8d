"""An agent as one has it already, with OpenAI's client, and a reward for it.

The only lines for rollwright are the address and the key, which lead to the model that is trained.
"""

import re
from typing import Any

import openai

CLIENT = openai.OpenAI(api_key="each rollout has its own")


def solve(task: dict[str, Any], session: Any) -> str:
    """Asks once, and returns the answer."""
    client = CLIENT.with_options(base_url=session.base_url, api_key=session.api_key)
    messages: list[Any] = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": task["question"]},
    ]
    reply = client.chat.completions.create(model="policy", messages=messages)
    return reply.choices[0].message.content or ""


def correct(task: dict[str, Any], answer: str) -> float:
    """1 where the first number of the answer is the larger one."""
    return float(re.findall(r"\d+", answer)[:1] == [task["answer"]])

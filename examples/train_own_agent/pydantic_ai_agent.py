"""A pydantic-ai program, trained as it is: `solve` is all that is added.

rollwright run examples/train_own_agent/config.yaml custom_envs.Larger.agent=pydantic_ai_agent:solve
"""

from typing import Any

from pydantic_ai import Agent
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

AGENT = Agent(instructions="Be brief.")
"""The program."""


async def solve(task: dict[str, Any], session: Any) -> str:
    """Plays one task with the model that is trained."""
    provider = OpenAIProvider(base_url=session.base_url, api_key=session.api_key)
    model = OpenAIChatModel("policy", provider=provider)
    return str((await AGENT.run(task["question"], model=model)).output)

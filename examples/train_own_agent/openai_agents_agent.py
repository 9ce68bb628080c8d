"""A program of the `openai-agents` framework, trained as it is: `solve` is all that is added.

rollwright run examples/train_own_agent/config.yaml custom_envs.Larger.agent=openai_agents_agent:solve
"""

from typing import Any

from openai import AsyncOpenAI

from agents import Agent, OpenAIChatCompletionsModel, RunConfig, Runner

AGENT: Agent[Any] = Agent(name="comparer", instructions="Be brief.")
"""The program."""


async def solve(task: dict[str, Any], session: Any) -> str:
    """Plays one task with the model that is trained."""
    async with AsyncOpenAI(base_url=session.base_url, api_key=session.api_key) as client:
        model = OpenAIChatCompletionsModel("policy", client)
        config = RunConfig(model=model, tracing_disabled=True)
        return str((await Runner.run(AGENT, task["question"], run_config=config)).final_output)

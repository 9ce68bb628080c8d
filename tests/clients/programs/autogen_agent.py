"""autogen: an assistant with a tool, and one with a typed answer."""

import asyncio
import os

from autogen_agentchat.agents import AssistantAgent
from autogen_ext.models.openai import OpenAIChatCompletionClient
from pydantic import BaseModel


class Report(BaseModel):
    city: str
    degrees: int


async def get_weather(city: str) -> str:
    """The weather in a city."""
    return f"21 degrees in {city}"


async def main() -> None:
    info = {
        "vision": False,
        "function_calling": True,
        "json_output": True,
        "family": "unknown",
        "structured_output": True,
    }
    client = OpenAIChatCompletionClient(
        model="policy", base_url=os.environ["OPENAI_BASE_URL"], model_info=info
    )
    agent = AssistantAgent("reporter", client, tools=[get_weather], reflect_on_tool_use=True)
    print((await agent.run(task="What is the weather in Lisbon?")).messages[-1].content)
    typed = AssistantAgent("typed", client, output_content_type=Report)
    print((await typed.run(task="What is the weather in Lisbon?")).messages[-1].content)
    await client.close()


asyncio.run(main())

"""llama-index: a function agent, and a structured prediction, which forces a tool."""

import asyncio
import os

from llama_index.core.agent.workflow import FunctionAgent
from llama_index.core.prompts import PromptTemplate
from llama_index.llms.openai_like import OpenAILike
from pydantic import BaseModel


class Report(BaseModel):
    """A weather report."""

    city: str
    degrees: int


def get_weather(city: str) -> str:
    """The weather in a city."""
    return f"21 degrees in {city}"


async def main() -> None:
    to = {"api_base": os.environ["OPENAI_BASE_URL"], "api_key": os.environ["OPENAI_API_KEY"]}
    model = OpenAILike(model="policy", **to, is_chat_model=True, is_function_calling_model=True)
    agent = FunctionAgent(tools=[get_weather], llm=model, system_prompt="Report.")
    print(await agent.run("What is the weather in Lisbon?"))
    print(await model.astructured_predict(Report, PromptTemplate("What is the weather in Lisbon?")))


asyncio.run(main())

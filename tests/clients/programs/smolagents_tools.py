"""smolagents: a ToolCallingAgent, which forces a tool at every step, and a CodeAgent."""

import os

from smolagents import CodeAgent, OpenAIServerModel, ToolCallingAgent, tool


@tool
def get_weather(city: str) -> str:
    """The weather in a city.

    Args:
        city: Name of the city.
    """
    return f"21 degrees in {city}"


model = OpenAIServerModel(
    "policy", api_base=os.environ["OPENAI_BASE_URL"], api_key=os.environ["OPENAI_API_KEY"]
)
print(ToolCallingAgent([get_weather], model, max_steps=3).run("What is the weather in Lisbon?"))
print(CodeAgent([get_weather], model, max_steps=2).run("Say hello in code."))

"""The clients that most agents are written with, from their own packages and unmodified: a tool loop and structured output."""

from typing import Any

from pydantic import BaseModel


class Report(BaseModel):
    """A weather report."""

    city: str
    degrees: int


class City(BaseModel):
    """A city."""

    city: str


QUESTION = "What is the weather in Lisbon?"


def get_weather(city: str) -> str:
    """The weather in a city."""
    return f"21 degrees in {city}"


async def test_openai_parses_structured_output_and_runs_tools(recorded: Any) -> None:
    from openai import AsyncOpenAI, pydantic_function_tool

    async with AsyncOpenAI(base_url=recorded.base_url, api_key=recorded.api_key) as client:
        messages: list[Any] = [{"role": "user", "content": QUESTION}]
        parsed = await client.chat.completions.parse(model="gpt-5", messages=messages, response_format=Report)
        assert isinstance(parsed.choices[0].message.parsed, Report)
        response = await client.responses.parse(model="gpt-5", input=QUESTION, text_format=Report)
        assert isinstance(response.output_parsed, Report)
        tool = pydantic_function_tool(City, name="get_weather")
        forced = await client.chat.completions.parse(
            model="gpt-5", messages=messages, tools=[tool], tool_choice="required"
        )
    (call,) = forced.choices[0].message.tool_calls
    assert call.function.name == "get_weather"
    recorded.assert_served(sequences=3)


async def test_anthropic_runs_tools_with_thinking_and_counts(recorded: Any) -> None:
    from anthropic import AsyncAnthropic

    tools: Any = [
        {
            "name": "get_weather",
            "description": "The weather in a city.",
            "input_schema": {
                "type": "object",
                "properties": {"city": {"type": "string"}},
                "required": ["city"],
            },
        }
    ]
    async with AsyncAnthropic(base_url=recorded.base_url, api_key=recorded.api_key) as client:
        messages: list[Any] = [{"role": "user", "content": QUESTION}]
        asked: Any = {
            "model": "claude",
            "max_tokens": 500,
            "tools": tools,
            "system": [{"type": "text", "text": "Be brief."}],
        }
        for _ in range(2):
            answer = await client.messages.create(**asked, messages=messages)
            messages.append({"role": "assistant", "content": answer.content})
            results = [
                {"type": "tool_result", "tool_use_id": block.id, "content": get_weather(**block.input)}
                for block in answer.content
                if block.type == "tool_use"
            ]
            messages.append({"role": "user", "content": results or "thanks"})
        counted = await client.messages.count_tokens(
            model="claude", tools=tools, system=asked["system"], messages=messages
        )
    assert counted.input_tokens > answer.usage.input_tokens
    assert answer.stop_reason == "end_turn"
    recorded.assert_served(sequences=1)


async def test_openai_agents_run_tools_and_return_a_type(recorded: Any) -> None:
    from openai import AsyncOpenAI

    from agents import (
        Agent,
        ModelSettings,
        OpenAIChatCompletionsModel,
        OpenAIResponsesModel,
        RunConfig,
        Runner,
        function_tool,
    )

    async with AsyncOpenAI(base_url=recorded.base_url, api_key=recorded.api_key) as client:
        for kind in (OpenAIChatCompletionsModel, OpenAIResponsesModel):
            agent = Agent(
                name="reporter",
                instructions=f"Report by {kind.__name__}.",
                tools=[function_tool(get_weather)],
                model=kind("gpt-5", client),
                model_settings=ModelSettings(parallel_tool_calls=False),
                output_type=Report,
            )
            result = await Runner.run(agent, QUESTION, run_config=RunConfig(tracing_disabled=True))
            assert result.final_output == Report(city="Lisbon", degrees=21)
    assert [turn.extends for turn in recorded.trajectory.turns] == [None, 0, None, 2]
    recorded.assert_served(sequences=2)


async def test_langgraph_runs_tools_and_structured_output(recorded: Any) -> None:
    from langchain_core.messages import HumanMessage
    from langchain_core.tools import tool
    from langchain_openai import ChatOpenAI
    from langgraph.graph import START, MessagesState, StateGraph
    from langgraph.prebuilt import ToolNode, tools_condition

    model = ChatOpenAI(model="gpt-5", base_url=recorded.base_url, api_key=recorded.api_key)
    bound = model.bind_tools([tool(get_weather)])

    async def think(state: MessagesState) -> dict[str, Any]:
        return {"messages": [await bound.ainvoke(state["messages"])]}

    graph: Any = StateGraph(MessagesState)
    graph.add_node("think", think)
    graph.add_node("tools", ToolNode([tool(get_weather)]))
    graph.add_edge(START, "think")
    graph.add_conditional_edges("think", tools_condition)
    graph.add_edge("tools", "think")
    state = await graph.compile().ainvoke({"messages": [HumanMessage(QUESTION)]})
    assert "21" in state["messages"][-1].content
    for method in ("json_schema", "function_calling"):
        structured = model.with_structured_output(Report, method=method)
        assert isinstance(await structured.ainvoke(QUESTION), Report)
    assert [turn.extends for turn in recorded.trajectory.turns] == [None, 0, None, None]
    recorded.assert_served(sequences=3)


async def test_pydantic_ai_runs_tools_and_returns_a_type(recorded: Any) -> None:
    from pydantic_ai import Agent, NativeOutput
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    provider = OpenAIProvider(base_url=recorded.base_url, api_key=recorded.api_key)
    model = OpenAIChatModel("gpt-5", provider=provider)
    agent: Any = Agent(model, tools=[get_weather], output_type=Report)
    assert isinstance((await agent.run(QUESTION)).output, Report)
    native: Any = Agent(model, output_type=NativeOutput(Report))
    assert isinstance((await native.run(QUESTION)).output, Report)
    recorded.assert_served(sequences=2)

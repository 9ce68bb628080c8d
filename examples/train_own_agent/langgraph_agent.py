"""A LangGraph program, trained as it is: `solve` is all that is added.

rollwright run examples/train_own_agent/config.yaml custom_envs.Larger.agent=langgraph_agent:solve
"""

from typing import Any

from langchain_openai import ChatOpenAI
from langgraph.graph import END, START, MessagesState, StateGraph


def build_graph(model: ChatOpenAI) -> Any:
    """The program: a graph with one node that asks the model."""

    async def answer(state: MessagesState) -> dict[str, Any]:
        return {"messages": [await model.ainvoke([("system", "Be brief."), *state["messages"]])]}

    graph = StateGraph(MessagesState)
    graph.add_node("answer", answer)
    graph.add_edge(START, "answer")
    graph.add_edge("answer", END)
    return graph.compile()


async def solve(task: dict[str, Any], session: Any) -> str:
    """Plays one task with the model that is trained."""
    model = ChatOpenAI(model="policy", base_url=session.base_url, api_key=session.api_key)
    state = await build_graph(model).ainvoke({"messages": [("user", task["question"])]})
    return str(state["messages"][-1].content)

"""crewai: a crew of one, with a typed result."""

import os

from crewai import LLM, Agent, Crew, Task
from pydantic import BaseModel


class Report(BaseModel):
    city: str
    degrees: int


model = LLM(
    model="openai/policy", base_url=os.environ["OPENAI_BASE_URL"], api_key=os.environ["OPENAI_API_KEY"]
)
agent = Agent(role="reporter", goal="report", backstory="You report.", llm=model, max_iter=3)
task = Task(
    description="What is the weather in Lisbon?",
    expected_output="A report.",
    agent=agent,
    output_pydantic=Report,
)
print(Crew(agents=[agent], tasks=[task], tracing=False).kickoff().pydantic)

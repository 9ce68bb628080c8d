"""instructor: a typed answer by tools, by JSON and by a JSON schema."""

import instructor
from openai import OpenAI
from pydantic import BaseModel


class Report(BaseModel):
    city: str
    degrees: int


for mode in (
    instructor.Mode.TOOLS,
    instructor.Mode.TOOLS_STRICT,
    instructor.Mode.JSON,
    instructor.Mode.JSON_SCHEMA,
):
    client = instructor.from_openai(OpenAI(), mode=mode)
    question = "What is the weather in Lisbon?"
    report = client.chat.completions.create(
        model="policy", response_model=Report, messages=[{"role": "user", "content": question}], max_retries=0
    )
    print(mode, report)

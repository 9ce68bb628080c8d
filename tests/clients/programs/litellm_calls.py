"""litellm: a call, a stream, a forced tool, a schema, and the legacy API."""

import os

import litellm
from pydantic import BaseModel


class Report(BaseModel):
    city: str
    degrees: int


TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
question = [{"role": "user", "content": "What is the weather in Lisbon?"}]
to = {"model": "openai/policy", "api_base": os.environ["OPENAI_BASE_URL"], "messages": question}
print(litellm.completion(**to, logprobs=True, n=2).choices[1].message.content)
print("".join(part.choices[0].delta.content or "" for part in litellm.completion(**to, stream=True)))
print(
    litellm.completion(**to, tools=[TOOL], tool_choice="required").choices[0].message.tool_calls[0].function
)
print(Report.model_validate_json(litellm.completion(**to, response_format=Report).choices[0].message.content))
legacy = {"model": "text-completion-openai/policy", "api_base": os.environ["OPENAI_BASE_URL"]}
print(litellm.text_completion(**legacy, prompt="Hello").choices[0].text)

"""dspy: a chain of thought with the JSON adapter, which asks for a schema."""

import os

import dspy

to = {"api_base": os.environ["OPENAI_BASE_URL"], "api_key": os.environ["OPENAI_API_KEY"], "cache": False}
dspy.configure(lm=dspy.LM("openai/policy", **to, max_tokens=500), adapter=dspy.JSONAdapter())
print(dspy.ChainOfThought("question -> answer")(question="What is two and two?"))

"""mini-swe-agent: its default agent with bash as its one tool."""

import os

from minisweagent.agents.default import DefaultAgent
from minisweagent.environments.local import LocalEnvironment
from minisweagent.models.litellm_model import LitellmModel

model = LitellmModel(
    model_name="openai/policy",
    model_kwargs={"api_base": os.environ["OPENAI_BASE_URL"], "drop_params": True},
    cost_tracking="ignore_errors",
)
agent = DefaultAgent(
    model,
    LocalEnvironment(),
    system_template="You solve tasks in a shell.",
    instance_template="{{task}}",
    step_limit=4,
)
print(agent.run("Print a word in the shell."))

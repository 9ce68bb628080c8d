"""A program of its own, trained as it is: it reads its task from a file, and the SDK reads the address from the environment.

rollwright run examples/train_own_agent/config.yaml 'custom_envs.Larger.agent={command: [python, command_agent.py]}'
"""

import json
from pathlib import Path

import openai

task = json.loads(Path("task.json").read_text())
client = openai.OpenAI()
reply = client.chat.completions.create(
    model="policy",
    messages=[{"role": "system", "content": "Be brief."}, {"role": "user", "content": task["question"]}],
)
print(reply.choices[0].message.content)

"""An agent of the `openai-agents` framework, recorded without a change to it.

    python examples/gateway_agents.py

The framework makes its own calls and runs its own tools; it is only told another address and key. Here they come from
a gateway over a store in memory, opened by HTTP as any program in any language can; in a worker they are
`session.base_url` and `session.api_key`. The policy is the simulated engine with a script that calls the tool once, so that
the example needs no model; the ids it samples are the ids that are recorded.
"""

import asyncio

import httpx
from openai import AsyncOpenAI

from agents import Agent, ModelSettings, OpenAIResponsesModel, RunConfig, Runner, function_tool
from rollwright import MemoryStore, Sampling, SimulatedEngine, Trajectory
from rollwright.gateway import Gateway
from rollwright.gateway.service import GatewayService, ServiceSettings
from rollwright.simulation.script import read_script

ADMIN_KEY = "rw-admin-example"
SCRIPT = [
    {"call": {"name": "temperature", "arguments": {"city": "Lisbon"}}},
    {"say": "It is warm."},
]


@function_tool
def temperature(city: str) -> str:
    """The temperature in a city."""
    return f"{city}: 21 degrees"


async def play(base_url: str, api_key: str) -> str:
    """The agent's own program."""
    async with AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
        agent = Agent(
            name="weather",
            instructions="Look before you answer.",
            model=OpenAIResponsesModel(model="policy", openai_client=client),
            model_settings=ModelSettings(temperature=1.0),
            tools=[temperature],
        )
        run = await Runner.run(agent, "Is it warm in Lisbon?", run_config=RunConfig(tracing_disabled=True))
        return str(run.final_output)


async def main() -> None:
    store, gateway = MemoryStore(), Gateway()
    policy = SimulatedEngine(tokens_per_second=1000, player=read_script(SCRIPT))
    service = GatewayService(
        store, policy, gateway, ServiceSettings(Sampling(max_tokens=256)), admin_key=ADMIN_KEY
    )
    service.listen()
    running = asyncio.create_task(service.run())
    async with httpx.AsyncClient(headers={"Authorization": f"Bearer {ADMIN_KEY}"}) as http:
        opened = (await http.post(f"{gateway.url}/rollouts", json={"input": "Lisbon"})).json()
        said = await play(opened["base_url"], opened["api_key"])
        reward = float("warm" in said)
        end = f"{gateway.address(opened['rollout_id'])}/end"
        print((await http.post(end, json={"reward": reward})).text)
    kept = await store.get_trajectories([opened["rollout_id"]])
    trajectory = Trajectory.from_bytes(kept[opened["rollout_id"]])
    for turn in trajectory.turns:
        print(f"turn {turn.id} continues {turn.extends}: {len(turn.sampled_ids)} sampled ids, {turn.text!r}")
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    await service.close()
    await store.close()


if __name__ == "__main__":
    asyncio.run(main())

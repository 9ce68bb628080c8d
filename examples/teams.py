"""Teams of agents: a shipped one, and one that is led by code of one's own.

    python examples/teams.py

`debate` asks two agents at the same time, lets a third decide between them, and starts again when the judge is not
satisfied; all of it is ordinary Python. An engine without a model plays every agent, so the answers mean nothing, but
everything around them is as it would be: each call is a turn with its own prompt, exact ids and its agent's name.
"""

import asyncio
from collections import Counter

from rollwright import Run, Trajectory, load_config
from rollwright.teams import Reply, TeamSession


async def debate(s: TeamSession) -> Reply:
    """Two proposals side by side, one answer, and a judge that may ask for another round."""
    answer = Reply("writer")
    for each in s.loops(2):
        await s.gather("optimist", "sceptic")
        answer = await s.call("writer")
        if not each.last and (await s.call("judge")).approves:
            s.approve()
    return answer


SETTINGS = {
    "name": "teams",
    "agent": {"performance": {"enable_parallel_agents": True}},
    "policy": {"kind": "simulated", "slots": 16, "tokens_per_second": 2000, "skill": 0.6},
    "custom_envs": {
        "Sums": {"env_type": "rollwright.teams.toy_envs:Sums", "max_tokens_per_step": 400},
        "Lookup": {
            "env_type": "rollwright.teams.toy_envs:Lookup",
            "max_steps": 4,
            "max_tokens_per_step": 400,
        },
    },
    "train_env_manager": {"num_env_groups": 4, "group_size": 4, "tags": ["Sums", "Lookup"]},
    "orchestras": {
        "Lookup": {"kind": "search"},
        "Sums": {
            "kind": "own",
            "name": "debate",
            "function": f"{__name__}:debate",
            "agents": {
                "optimist": {"prompt": "{question}\nGive the first answer that comes to mind."},
                "sceptic": {"prompt": "{question}\nWhat could go wrong here?", "trainable": False},
                "writer": {"prompt": "{question}\n{context}\nPut the answer in \\boxed{{}}."},
                "judge": {
                    "prompt": "{question}\n{context}\nEnd with <verify>approve</verify> or <verify>reject</verify>.",
                    "verdict": {"malformed": "reject"},
                },
            },
        },
    },
}


async def main() -> None:
    async with Run(load_config(SETTINGS)) as run:
        batch = await run.get_batch()
    for tag in ("Sums", "Lookup"):
        _report(tag, [each for each in batch.trajectories if each.tag == tag])


def _report(tag: str, played: list[Trajectory]) -> None:
    calls = Counter(turn.agent for trajectory in played for turn in trajectory.turns)
    frozen = {turn.agent for trajectory in played for turn in trajectory.turns if turn.filtered}
    solved = sum(bool(trajectory.success) for trajectory in played)
    print(f"{tag}: {solved} of {len(played)} solved")
    for agent, count in sorted(calls.items()):
        print(f"  {agent:18} {count:3} calls{', frozen' if agent in frozen else ''}")


if __name__ == "__main__":
    asyncio.run(main())

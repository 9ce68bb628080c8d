"""Training the agents of a team apart from each other."""

from collections.abc import Collection

import msgspec

from rollwright.trajectory import Trajectory

OTHER_AGENT = "other agent"
"""`Turn.filtered` of a turn that another model is trained with."""


def only_agents(trajectory: Trajectory, agents: Collection[str]) -> Trajectory:
    """The same trajectory with only these agents' turns in the loss. `agents` are ids: `team/agent`.

    Rewards and every turn stay, so that advantages come out as for the whole team.
    """
    turns = [
        turn
        if turn.agent in agents or turn.filtered is not None
        else msgspec.structs.replace(turn, filtered=OTHER_AGENT)
        for turn in trajectory.turns
    ]
    return msgspec.structs.replace(trajectory, turns=turns)

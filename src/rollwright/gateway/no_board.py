"""What players without a model look at where there is no environment: there is nothing to choose.

So an agent of one's own can be tried out against a simulated engine: it says filler text.
"""

from rollwright.policies.base import Playable


class NoBoard:
    def actions(self) -> list[str]:
        return []

    def best_action(self) -> str | None:
        return None

    def answer(self, action: str) -> str:
        return action


NO_BOARD: Playable = NoBoard()

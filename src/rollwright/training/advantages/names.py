"""Advantages by the name that a configuration gives them."""

from typing import Any, cast

from rollwright.training.advantages.base import Advantage, Groups, TurnAdvantages
from rollwright.training.settings import ADVANTAGES


class NamedAdvantage:
    """An advantage of the user's own: an exception in it, or an answer of the wrong shape, is one line that names it."""

    def __init__(self, name: str, advantage: Advantage) -> None:
        self._name, self._advantage = name, advantage

    def __call__(self, groups: Groups) -> TurnAdvantages:
        with ADVANTAGES.blame(self._name):
            found = [[list(map(float, turns)) for turns in group] for group in self._advantage(groups)]
            wanted = [[len(each.turns) for each in group] for group in groups]
            if [[len(turns) for turns in group] for group in found] != wanted:
                raise ValueError("gives no number for each turn of each trajectory of each group")
            return found


def make_advantage(name: str, **options: Any) -> Advantage:
    """The advantage called `name`, with its options."""
    found = cast(Advantage, ADVANTAGES.function(name, **options))
    return found if ADVANTAGES.is_built_in(name) else NamedAdvantage(name, found)

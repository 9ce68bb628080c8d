"""Filters and advantages of a run, for the page: those that are built in.

A configuration may name any importable object. A run folder may come from anywhere, so the page imports nothing that a
configuration names: what is the user's own is named in `notes`, and left out.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import cast

from rollwright.config import RunConfig
from rollwright.errors import RollwrightError
from rollwright.observe.judged_group import JudgedGroup, batch_advantages, caught_beside, judged_group
from rollwright.rollout.filters import Filter, build_filters
from rollwright.rollout.filters.settings import OwnFilterConfig
from rollwright.training.advantages import turn_means
from rollwright.training.settings import ADVANTAGES
from rollwright.trajectory import Trajectory

WHOLE_BATCH = frozenset({"reinforce_plus_plus", "reinforce_plus_plus_tokens"})
"""Built-in advantages that compare all groups of a batch; the others compare the members of a group alone."""


@dataclass(frozen=True)
class Judging:
    """Filters and advantage of one run."""

    config: RunConfig | None = None
    filters: tuple[Filter, ...] = ()
    notes: tuple[str, ...] = ()
    """What is left out, and why."""

    @classmethod
    def of(cls, config: RunConfig | None) -> "Judging":
        if config is None:
            return cls(notes=("the settings cannot be read: filters and advantages are not shown",))
        notes: list[str] = []
        filters: tuple[Filter, ...] = ()
        manager = config.train_env_manager
        if manager is not None:
            own = [each.test for each in manager.filters if isinstance(each, OwnFilterConfig)]
            if manager.group_filter is not None:
                own.append(manager.group_filter)
            if own:
                notes.append(f"filters of your own are not applied here: {', '.join(own)}")
                kept = [each for each in manager.filters if not isinstance(each, OwnFilterConfig)]
                manager = manager.model_copy(update={"filters": kept, "group_filter": None})
            try:
                filters = build_filters(manager)
            except RollwrightError as error:
                notes.append(f"filters are not applied here: {error}")
        if config.training is not None and not ADVANTAGES.is_built_in(config.training.advantage.name):
            notes.append(f"advantages of your own are not computed here: {config.training.advantage.name}")
        return cls(config, filters, tuple(notes))

    def applies_to(self, group_id: str) -> bool:
        """Whether the filters judge this group: only training has any."""
        return self.config is not None and group_id.startswith(f"{self.config.name}.train-")

    @property
    def group_size(self) -> int:
        manager = None if self.config is None else self.config.train_env_manager
        return 0 if manager is None else manager.group_size

    @property
    def compares_batches(self) -> bool:
        """Whether an advantage depends on the other groups of its batch."""
        training = None if self.config is None else self.config.training
        return training is not None and training.advantage.name in WHOLE_BATCH


@dataclass
class GroupView:
    """A group as the trainer sees it."""

    group: JudgedGroup
    advantage: str | None
    """Name of the estimator; `None` if there are no advantages."""
    advantages: dict[str, list[float]] = field(default_factory=dict)
    """One number for each turn, by rollout."""
    token_advantages: dict[str, list[list[float]]] = field(default_factory=dict)
    """One number for each sampled token of each turn, if the estimator gives them."""
    caught: dict[str, list[str]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


def view_group(
    judging: Judging,
    members: Sequence[Trajectory],
    batch: Callable[[], Sequence[Sequence[Trajectory]]] = lambda: (),
) -> GroupView:
    """Apply filters and advantages to a group. `batch`: the other groups of its batch, for an advantage that needs them."""
    filters = judging.filters if members and judging.applies_to(members[0].group_id) else ()
    judged = judged_group(filters, members)
    view = GroupView(judged, None, notes=list(judging.notes))
    for each in judged.judged:
        view.caught[each.rollout_id] = caught_beside(filters, judged.judged, each.rollout_id)
    config = judging.config
    if config is None or (
        config.training is not None and not ADVANTAGES.is_built_in(config.training.advantage.name)
    ):
        return view
    others = batch() if judging.compares_batches else ()
    beside = [judged_group(filters, each).members for each in others]
    try:
        view.advantage, values = batch_advantages(config, [judged.members, *beside])
    except (RollwrightError, ValueError, ZeroDivisionError) as error:
        view.notes.append(f"advantages cannot be computed: {error}")
        return view
    of_members: Sequence[Sequence[float] | Sequence[Sequence[float]]] = values[0]
    for each, own in zip(judged.members, of_members, strict=True):
        view.advantages[each.rollout_id] = turn_means(own)
        if any(isinstance(turn, list) for turn in own):
            view.token_advantages[each.rollout_id] = cast(list[list[float]], own)
    return view

"""A tree of decisions, drawn for people: branches, what each is worth, and what sharing saved."""

from collections.abc import Sequence

from rich.text import Text
from rich.tree import Tree

from rollwright.rollout.tree import COPIED_BY
from rollwright.training.advantages.tree import turn_values
from rollwright.trajectory import Trajectory, Turn, children, leaves, path, turn_weights

MOST_ACTIONS = 4
"""Actions written out where turns follow each other without a branch; of more, the number is given."""


def leaf_count(trajectory: Trajectory) -> int:
    return len(leaves(trajectory.turns))


def tokens_saved(trajectory: Trajectory) -> int:
    """Sampled tokens that separate episodes would have cost on top: those that paths share, for each further path."""
    turns = trajectory.turns
    along = sum(turn.completion_tokens for leaf in leaves(turns) for turn in path(turns, leaf))
    return along - trajectory.sampled_tokens


def tree_view(trajectory: Trajectory, advantages: Sequence[float]) -> Tree:
    """One line for each stretch without a branch: actions, share of the tree, value V and advantage A."""
    saved = tokens_saved(trajectory)
    share = f" ({100 * saved / (saved + trajectory.sampled_tokens):.0f} %)" if saved else ""
    head = Text.assemble(
        ("start", "bold"),
        f"  {leaf_count(trajectory)} leaves, {len(trajectory.turns)} turns, {trajectory.paid_tokens:,} tokens sampled, "
        f"{saved:,} saved by sharing{share}{_copied(trajectory)}{_left_out(trajectory)}",
    )
    drawn = Tree(head, guide_style="dim")
    below = children(trajectory.turns)
    values, weights = turn_values(trajectory), turn_weights(trajectory.turns)
    todo = [(drawn, turn) for turn in reversed(below.get(None, []))]
    while todo:
        under, first = todo.pop()
        turns = [trajectory.turns[first]]
        next_turns = below.get(first, [])
        while sum(trajectory.turns[each].count for each in next_turns) == 1:
            turns.append(trajectory.turns[next_turns[0]])
            next_turns = below.get(next_turns[0], [])
        line = _line(turns, weights[first], values[first], advantages[first], ends=not next_turns)
        node = under.add(line)
        todo += [(node, turn) for turn in reversed(next_turns)]
    return drawn


def _copied(trajectory: Trajectory) -> str:
    """How its environments were copied, and what that cost."""
    metrics = trajectory.metrics
    modes = [name.removeprefix(COPIED_BY) for name in metrics if name.startswith(COPIED_BY)]
    told = f"; environments copied by {modes[0]}" if modes else ""
    if steps := metrics.get("tree_replayed_steps"):
        told += f", {steps:,.0f} steps replayed"
    if other := metrics.get("tree_replay_mismatches"):
        told += f", {other:,.0f} came another way and were not used"
    return told


def _left_out(trajectory: Trajectory) -> str:
    """Answers that were asked for and are no turn of their own."""
    told = ""
    if merged := trajectory.metrics.get("tree_merged"):
        told += f"; {merged:,.0f} answers the same as another"
    if refused := trajectory.metrics.get("tree_refused"):
        told += f"; {refused:,.0f} answers not in the budget"
    return told


def _line(turns: Sequence[Turn], weight: float, value: float, advantage: float, *, ends: bool) -> Text:
    first, last = turns[0], turns[-1]
    actions = [(turn.outcome.action if turn.outcome else None) or "no action" for turn in turns]
    if len(actions) > MOST_ACTIONS:
        actions = [*actions[: MOST_ACTIONS - 1], f"… {len(actions) - MOST_ACTIONS} …", actions[-1]]
    style = "bold" if ends else ""
    text = Text(actions[0], style=style)
    if first.count > 1:
        text.append(f" ×{first.count}", style="magenta")
    for action in actions[1:]:
        text.append(f" → {action}", style=style)
    if ends and last.outcome is not None and last.outcome.success is not None:
        text.append(" solved" if last.outcome.success else " not solved", style="italic")
    text.append(f"  V {value:.3g}", style="cyan")
    text.append(
        f"  A {advantage:+.3g}", style="green" if advantage > 0 else "red" if advantage < 0 else "dim"
    )
    text.append(f"  weight {weight:.3g}, {sum(turn.completion_tokens for turn in turns)} tokens", style="dim")
    if any(turn.filtered for turn in turns):
        caught = ", ".join(sorted({turn.filtered for turn in turns if turn.filtered}))
        text.append(f"  out of the loss: {caught}", style="yellow")
    return text

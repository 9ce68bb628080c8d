"""Renders one trajectory: its turns with their rewards, the prompts behind them, and a tree as a tree.

A prompt is recorded as token ids, so its text is decoded from them, control tokens of the chat format included. An engine
with a text interface takes no ids; then only the environment's opening messages are recorded.
"""

from collections import Counter
from collections.abc import Sequence
from contextlib import suppress

import msgspec
from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.text import Text
from rich.tree import Tree

from rollwright.observe.prompt_text import PromptReader
from rollwright.rollout.tree import COPIED_BY
from rollwright.run.folder import SIMULATED, TREE_PREFIX
from rollwright.training.advantages.tree import turn_values
from rollwright.trajectory import Trajectory, Turn, children, leaves, path, turn_weights

DEFAULT_AGENT = "agent"
"""Agent name of a turn without a named agent."""

MOST_ACTIONS = 4
"""Actions that are written out for a stretch without a branch; of longer ones, the middle is counted."""

MOST_RETURNED = 2000
"""Characters of a returned value that are shown."""


def render(
    trajectory: Trajectory,
    prompts: "PromptReader | None" = None,
    *,
    turns: bool = True,
    simulated: bool = False,
) -> RenderableType:
    """`prompts` shows the prompts, too: the opening messages of a single conversation, else each turn's own prompt."""
    parts: list[RenderableType] = [_headline(trajectory, simulated)]
    alone = sum(turn.extends is None for turn in trajectory.turns) <= 1 and not _is_team(trajectory)
    if prompts is not None and (alone or not any(turn.prompt_ids for turn in trajectory.turns)):
        parts += [
            Panel(Text(message.content), title=message.role, title_align="left", border_style="dim")
            for message in trajectory.opening
        ]
    parts.append(Panel(Text(trajectory.observation), title="start", title_align="left", expand=False))
    for turn in trajectory.turns if turns else ():
        if prompts is not None and not alone:
            title = f"prompt of turn {turn.id + 1}{_by(turn)} · {turn.prompt_tokens} tokens"
            asked = Text(prompts.text(turn))
            parts.append(Panel(asked, title=title, title_align="left", expand=False, border_style="dim"))
        parts.append(_turn(turn))
    if trajectory.returned is not None:
        parts.append(
            Panel(Text(_returned(trajectory.returned)), title="returned", title_align="left", expand=False)
        )
    if counted := _counted(trajectory):
        parts.append(counted)
    return Group(*parts)


def _returned(encoded: str) -> str:
    """The value that an agent's own function or command returned: a text as it is, of a long one the end."""
    text = encoded
    with suppress(msgspec.DecodeError):
        value = msgspec.json.decode(encoded)
        text = value if isinstance(value, str) else encoded
    return text if len(text) <= MOST_RETURNED else f"… {text[-MOST_RETURNED:]}"


def _is_team(trajectory: Trajectory) -> bool:
    return len({turn.agent for turn in trajectory.turns}) > 1


def _by(turn: Turn) -> str:
    """Label with the agent's name, if it has one."""
    return "" if turn.agent == DEFAULT_AGENT else f" · {turn.agent}"


def _counted(trajectory: Trajectory) -> Text | None:
    """The episode's own metrics, without those of a tree, which the tree shows."""
    counters = {name: value for name, value in trajectory.metrics.items() if not name.startswith(TREE_PREFIX)}
    if not counters:
        return None
    return Text("counted: " + ", ".join(f"{name} {value:g}" for name, value in sorted(counters.items())))


def _headline(trajectory: Trajectory, simulated: bool) -> Text:
    solved = {True: "solved", False: "not solved", None: "not judged"}[trajectory.success]
    if trajectory.success is None and (share := trajectory.success_share) is not None:
        solved = f"{100 * share:.0f} % solved"
    text = Text(trajectory.rollout_id, style="bold")
    if simulated:
        text.append(f" {SIMULATED}", style="yellow")
    text.append(
        f"  {trajectory.tag}, level {trajectory.seed}: {solved}, reward {trajectory.reward:g}"
        f"{f', format penalty {trajectory.penalty:g}' if trajectory.penalty else ''}"
        f", {len(trajectory.turns)} turns, {trajectory.sampled_tokens} tokens, ended by {trajectory.stop}",
        style="not bold",
    )
    if trajectory.components:
        parts = (f"{name} {value:g}" for name, value in trajectory.components.items())
        text.append(f"\nrewards: {', '.join(parts)}", style="not bold")
    if trajectory.sampling is not None:
        text.append(f"\nsampled at {trajectory.sampling.describe()}", style="not bold")
    if (why := trajectory.not_trainable) is not None:
        text.append(f"\nnot trainable: {why}", style="yellow")
    elif untrained := Counter(trajectory.never_trained()):
        parts = (f"{count} turn{'s' * (count > 1)}, {reason}" for reason, count in untrained.items())
        text.append(f"\nout of the loss: {'; '.join(parts)}", style="yellow")
    if of_gateway := [
        f"{name} {value:g}" for name, value in trajectory.metrics.items() if name.startswith("gateway_")
    ]:
        text.append(f"\n{', '.join(of_gateway)}", style="not bold")
    if trajectory.filtered is not None:
        beside = "" if trajectory.in_baseline else ", and out of the baseline"
        text.append(f"\nout of the loss{beside}: {trajectory.filtered}", style="yellow")
    return text


def _turn(turn: Turn) -> RenderableType:
    parts: list[RenderableType] = [Text(turn.text, style="cyan")]
    title = f"turn {turn.id + 1}{_by(turn)} · {turn.completion_tokens} tokens"
    title += f" · {turn.count} answers the same" if turn.count > 1 else ""
    if turn.versions:
        first, last = turn.versions[0].version, turn.versions[-1].version
        title += f" · version {first}" + (f"–{last}" if last != first else "")
    for call in turn.tool_calls:
        parts.append(Text(f"{call.name}({call.arguments})", style="cyan"))
    if turn.outcome is not None:
        outcome = turn.outcome
        parts.append(Text(outcome.observation))
        title += f" · {outcome.action or 'no action'} · reward {outcome.reward:+g}"
        title += f" · format penalty {outcome.penalty:+g}" if outcome.penalty else ""
    if turn.sampling is not None:
        title += f" · {turn.sampling.describe()}"
        title += " · out of the loss" if turn.sampling.not_modelled and turn.filtered is None else ""
    if turn.filtered is not None:
        title += f" · out of the loss: {turn.filtered}"
    return Panel(Group(*parts), title=title, title_align="left", expand=False)


def leaf_count(trajectory: Trajectory) -> int:
    return len(leaves(trajectory.turns))


def tokens_saved(trajectory: Trajectory) -> int:
    """Additional tokens that separate episodes would have sampled: shared tokens, once for each further path."""
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
    """Mode and cost of copying its environments."""
    metrics = trajectory.metrics
    modes = [name.removeprefix(COPIED_BY) for name in metrics if name.startswith(COPIED_BY)]
    told = f"; environments copied by {modes[0]}" if modes else ""
    if steps := metrics.get("tree_replayed_steps"):
        told += f", {steps:,.0f} steps replayed"
    if other := metrics.get("tree_replay_mismatches"):
        told += f", {other:,.0f} diverged and were not used"
    return told


def _left_out(trajectory: Trajectory) -> str:
    """Sampled answers that did not become turns."""
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

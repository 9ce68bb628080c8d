"""A trajectory as plain data for the page: turns with messages and rewards, exact tokens, the forest, a group's members.

Invariant: everything here is data for text nodes. No text of a trajectory is turned into markup, on either side.
"""

from collections.abc import Sequence
from typing import Any

from rollwright.observe.prompt_text import PromptReader
from rollwright.training.advantages.tree import turn_values
from rollwright.trajectory import Message, Trajectory, Turn, expand_versions, turn_weights

TURNS_AT_ONCE = 100
"""Turns of one answer; the page asks for more when they are scrolled to."""

MOST_TEXT = 200_000
"""Characters of one text that are sent; a longer one is cut in the middle and says so."""

MOST_TOKENS = 20_000
"""Tokens of one turn that are sent."""


def shortened(text: str, most: int = MOST_TEXT) -> str:
    if len(text) <= most:
        return text
    half = most // 2
    return f"{text[:half]}\n… {len(text) - most:,} characters left out …\n{text[-half:]}"


def head_of(trajectory: Trajectory) -> dict[str, Any]:
    """All about a trajectory but its turns."""
    error = trajectory.error
    return {
        "rollout_id": trajectory.rollout_id,
        "attempt_id": trajectory.attempt_id,
        "group_id": trajectory.group_id,
        "tag": trajectory.tag,
        "seed": trajectory.seed,
        "reward": trajectory.reward,
        "penalty": trajectory.penalty,
        "episode_reward": trajectory.episode_reward,
        "components": trajectory.components,
        "penalties": trajectory.penalties,
        "success": trajectory.success_share,
        "stop": trajectory.stop,
        "filtered": trajectory.filtered,
        "in_baseline": trajectory.in_baseline,
        "not_trainable": trajectory.not_trainable,
        "sampling": None if trajectory.sampling is None else trajectory.sampling.describe(),
        "metrics": trajectory.metrics,
        "error": None
        if error is None
        else {"boundary": error.boundary, "kind": error.kind, "message": error.message, "turn": error.turn},
        "opening": [message_of(each) for each in trajectory.opening],
        "observation": shortened(trajectory.observation),
        "conversation": [message_of(each) for each in trajectory.conversation],
        "returned": None if trajectory.returned is None else shortened(trajectory.returned),
        "turn_count": len(trajectory.turns),
        "tokens": trajectory.sampled_tokens,
        "duration": trajectory.duration,
        "worker": None if trajectory.timing is None else trajectory.timing.worker,
        "started": None if trajectory.timing is None else trajectory.timing.started,
    }


def message_of(message: Message) -> dict[str, Any]:
    return {
        "role": message.role,
        "content": shortened(message.content),
        "reasoning": shortened(message.reasoning),
        "name": message.name,
        "tool_call_id": message.tool_call_id,
        "tool_calls": [
            {"id": each.id, "name": each.name, "arguments": shortened(each.arguments)}
            for each in message.tool_calls
        ],
    }


def turn_of(trajectory: Trajectory, turn: Turn, advantage: float | None) -> dict[str, Any]:
    outcome = turn.outcome
    return {
        "id": turn.id,
        "after": turn.after,
        "extends": turn.extends,
        "agent": turn.agent,
        "text": shortened(turn.text),
        "finish": turn.finish,
        "exact": turn.exact,
        "prompt_tokens": turn.prompt_tokens,
        "tokens": turn.completion_tokens,
        "count": turn.count,
        "versions": [[run.version, run.count] for run in turn.versions],
        "untrained": trajectory.untrained(turn),
        "advantage": advantage,
        "sampling": None if turn.sampling is None else turn.sampling.describe(),
        "tool_calls": [
            {"id": each.id, "name": each.name, "arguments": shortened(each.arguments)}
            for each in turn.tool_calls
        ],
        "outcome": None
        if outcome is None
        else {
            "observation": shortened(outcome.observation),
            "reward": outcome.reward,
            "penalty": outcome.penalty,
            "action": outcome.action,
            "valid": outcome.valid,
            "success": outcome.success,
            "terminated": outcome.terminated,
            "truncated": outcome.truncated,
        },
    }


def tokens_of_turn(
    trajectory: Trajectory,
    turn: Turn,
    reader: PromptReader | None,
    advantage: float | None,
    advantages: Sequence[float] | None = None,
) -> dict[str, Any]:
    """The ids that the prompt adds and those that were sampled, with text, log-probability, version, mask and advantage.
    `advantages`: one for each sampled token, where the estimator gives them."""
    prompt, sampled = list(turn.prompt_ids), list(turn.sampled_ids)
    note = None
    prompt_text: list[str] = []
    sampled_text: list[str] = []
    if not prompt and not sampled:
        note = "the engine takes and returns text, so there are no token ids"
    elif reader is None:
        note = "the run's settings cannot be read, so the ids have no text"
    elif isinstance(decoder := reader.decoder(turn.agent), str):
        note = decoder
    else:
        prompt_text = reader.pieces(turn.agent, prompt[-MOST_TOKENS:])
        sampled_text = reader.pieces(turn.agent, sampled[:MOST_TOKENS])
    why = trajectory.untrained(turn)
    left_out = why or ("not trainable: " + reason if (reason := trajectory.not_trainable) else None)
    return {
        "turn": turn.id,
        "agent": turn.agent,
        "note": note,
        "prompt": {
            "ids": prompt[-MOST_TOKENS:],
            "text": prompt_text,
            "left_out": max(0, len(prompt) - MOST_TOKENS),
            "before": turn.prompt_tokens - len(prompt),
        },
        "sampled": {
            "ids": sampled[:MOST_TOKENS],
            "text": sampled_text,
            "logprobs": [round(each, 5) for each in turn.logprobs[:MOST_TOKENS]],
            "versions": expand_versions(turn.versions)[:MOST_TOKENS],
            "mask": 0 if left_out else 1,
            "untrained": left_out,
            "advantage": advantage,
            "advantages": None
            if advantages is None
            else [round(each, 5) for each in advantages[:MOST_TOKENS]],
            "left_out": max(0, len(sampled) - MOST_TOKENS),
        },
    }


def forest_of(trajectory: Trajectory, advantages: Sequence[float] | None) -> list[dict[str, Any]]:
    """The turns as nodes with both links, value, advantage and weight."""
    values, weights = turn_values(trajectory), turn_weights(trajectory.turns)
    return [
        {
            "id": turn.id,
            "after": turn.after,
            "extends": turn.extends,
            "agent": turn.agent,
            "action": None if turn.outcome is None else turn.outcome.action,
            "text": turn.text[:120],
            "reward": 0.0 if turn.outcome is None else turn.outcome.reward,
            "success": None if turn.outcome is None else turn.outcome.success,
            "value": values[turn.id],
            "advantage": None if advantages is None else advantages[turn.id],
            "weight": weights[turn.id],
            "count": turn.count,
            "tokens": turn.completion_tokens,
            "untrained": trajectory.untrained(turn),
        }
        for turn in trajectory.turns
    ]


def member_of(
    trajectory: Trajectory, advantages: Sequence[float] | None, caught: Sequence[str], replaced: str | None
) -> dict[str, Any]:
    """One member of a group, for a comparison side by side."""
    return {
        **{
            name: value
            for name, value in head_of(trajectory).items()
            if name not in ("opening", "conversation", "metrics")
        },
        "advantages": None if advantages is None else list(advantages),
        "caught": list(caught),
        "replaced": replaced,
        "turns": [
            {
                "id": turn.id,
                "agent": turn.agent,
                "text": shortened(turn.text, 4000),
                "action": None if turn.outcome is None else turn.outcome.action,
                "reward": None if turn.outcome is None else turn.outcome.reward,
                "observation": None if turn.outcome is None else shortened(turn.outcome.observation, 4000),
                "untrained": trajectory.untrained(turn),
            }
            for turn in trajectory.turns[:TURNS_AT_ONCE]
        ],
    }

"""Adapter for Gymnasium environments with discrete or text actions.

The observation is the environment's `ansi` rendering, else its observation as text. Colours in a rendering carry meaning
(often the player's position), so they are written out: a red S becomes `[red:S]`. An answer without a valid action leaves
the environment unchanged and counts as an action. `step` may block, so each environment runs in its own thread. It can be
forked only if a trial shows that a copy behaves exactly like the original.
"""

import copy
import inspect
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Self

import gymnasium
from gymnasium.envs.registration import load_env_creator

from rollwright import rng
from rollwright.envs.base import Info, PromptTemplates, Reset, Step
from rollwright.envs.parsing import ANSWER_PATTERN, AnswerFormat
from rollwright.envs.threaded import ThreadedEnv, wrap
from rollwright.errors import ConfigError, RollwrightError
from rollwright.registry import suggestion

if TYPE_CHECKING:
    from rollwright.envs.adapters.gymnasium_vector import VectorGymnasium

DEFAULT_MAX_STEPS = 100
"""Enough for small environments; overrides the limit in an environment's own spec."""

_TRIAL_STEPS = 20
"""Number of actions for which an environment and its copy are compared before it counts as forkable."""

_SET_HERE = ("render_mode", "max_episode_steps")
"""Arguments of `gymnasium.make` that this module sets."""

_COLOURED = re.compile(r"\x1b\[([0-9;]+)m(.*?)\x1b\[0m", re.DOTALL)
_COLOURS = ("gray", "red", "green", "yellow", "blue", "magenta", "cyan", "white")
"""Terminal colours in the order of their codes: 30 to 37 for the foreground, 40 to 47 for the background."""

_MEANING = re.compile(r"^\s*- (\d+): (.+)$", re.MULTILINE)
"""Line of a Gymnasium docstring that describes an action."""

PROMPTS = PromptTemplates(
    system="You act in an environment, step by step. Collect as much reward as you can.",
    opening="{instruction}\n\nStep {turn_idx}. The state is:\n{observation}\nActions left: {actions_left}.",
    turn="Step {turn_idx}. The state is:\n{observation}\nActions left: {actions_left}.",
)


def make_gymnasium(
    env_id: str,
    *,
    action_names: list[str] | None = None,
    rules: str | None = None,
    max_steps: int = DEFAULT_MAX_STEPS,
    format_penalty: float = 0.0,
    action_pattern: str = ANSWER_PATTERN,
    answer_template: str | None = None,
    num_envs: int = 1,
    **options: Any,
) -> "ThreadedEnv | VectorGymnasium":
    """Creates an environment. `options` are passed to Gymnasium; `rules` precedes the list of actions in the prompt.
    `num_envs`: environments that are stepped together, in one thread; 1: each has a thread of its own."""
    if format_penalty > 0:
        raise ConfigError(f"format_penalty must be zero or negative, got {format_penalty}")
    if max_steps < 1:
        raise ConfigError(f"max_steps must be 1 or more, got {max_steps}")
    if num_envs < 1:
        raise ConfigError(f"num_envs must be 1 or more, got {num_envs}")
    env = _make(env_id, max_steps, options)
    actions = _action_table(env, action_names)
    answers = AnswerFormat(action_pattern, answer_template)
    described = rules or _describe(env_id, env, named=action_names is not None)

    def make_game(env: Any, kind: type[GymnasiumGame] = GymnasiumGame) -> GymnasiumGame:
        return kind(env, actions, described, format_penalty, answers)

    if num_envs == 1:
        return wrap(make_game(env, ForkableGymnasiumGame if _copies_exactly(env) else GymnasiumGame))
    from rollwright.envs.adapters.gymnasium_vector import VectorGymnasium

    key = (env_id, max_steps, repr(sorted(options.items())), described, repr(actions), format_penalty)
    template = make_game(env)
    template.close()
    return VectorGymnasium(
        (*key, action_pattern, answer_template, num_envs),
        template,
        lambda: _make(env_id, max_steps, options),
        make_game,
        num_envs,
    )


def _make(env_id: str, max_steps: int, options: Mapping[str, Any]) -> Any:
    try:
        spec = gymnasium.spec(env_id)
        creator = spec.entry_point if callable(spec.entry_point) else load_env_creator(str(spec.entry_point))
        _check_options(creator, options)
        modes = getattr(creator, "metadata", {}).get("render_modes", ())
        mode: dict[str, Any] = {"render_mode": "ansi"} if "ansi" in modes else {}
        return gymnasium.make(env_id, max_episode_steps=max_steps, **mode, **options)
    except (gymnasium.error.Error, ImportError) as error:
        raise ConfigError(f"Gymnasium cannot create it: {_one_line(error)}") from error
    except (TypeError, ValueError, AssertionError, KeyError) as error:
        raise ConfigError(f"Gymnasium refuses {dict(options)}: {_one_line(error)}") from error


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())


def _check_options(creator: Any, options: Mapping[str, Any]) -> None:
    parameters = inspect.signature(creator).parameters.values()
    if any(each.kind is each.VAR_KEYWORD for each in parameters):
        return
    accepted = [each.name for each in parameters if each.name not in _SET_HERE]
    own = list(inspect.signature(make_gymnasium).parameters)[1:-1]
    for key in options:
        if key not in accepted:
            known = ", ".join([*own, *accepted])
            hint = suggestion(key, [*own, *accepted])
            raise ConfigError(f"unknown setting {key!r}{hint}; accepted: {known}")


def _action_table(env: Any, names: Sequence[str] | None) -> dict[str, int] | None:
    """The discrete actions by name; `None`: actions are free text."""
    space = env.action_space
    if isinstance(space, gymnasium.spaces.Text):
        if names is not None:
            raise ConfigError("action_names: this environment has free-text actions")
        return None
    if not isinstance(space, gymnasium.spaces.Discrete):
        raise ConfigError(f"its actions are {space}; only Discrete and Text actions are supported")
    values = [int(space.start) + index for index in range(int(space.n))]
    if names is None:
        names = [str(value) for value in values]
    if len(names) != len(values) or len({name.lower() for name in names}) < len(names):
        raise ConfigError(f"action_names must be {len(values)} different names, got {list(names)}")
    return dict(zip(names, values, strict=True))


def _describe(env_id: str, env: Any, named: bool) -> str:
    """Description of an environment: its id and, unless `named`, the meaning of the actions from its docstring."""
    text = f"You act in the environment {env_id}."
    doc = inspect.getdoc(type(env.unwrapped)) or ""
    section = re.search(r"## Action Space\n(.*?)(?=\n\s*## |\Z)", doc, re.DOTALL)
    meanings = _MEANING.findall(section[1]) if section and not named else []
    if meanings:
        text += (
            " Meaning of the actions: " + "; ".join(f"{number} = {what}" for number, what in meanings) + "."
        )
    return text


class GymnasiumGame:
    """Synchronous environment that parses actions from answers."""

    def __init__(
        self,
        env: Any,
        actions: dict[str, int] | None,
        rules: str,
        format_penalty: float,
        answers: AnswerFormat,
    ) -> None:
        self._env = env
        self._actions = actions
        self._by_lower = {name.lower(): name for name in actions or ()}
        self._rules = rules
        self._format_penalty = format_penalty
        self._format = answers
        self._max_steps: int = env.spec.max_episode_steps
        self._steps = 0
        self._running = False
        self._text = ""

    @property
    def instruction(self) -> str:
        colours = (
            " A coloured letter in a state is written with its colour, like [red:A]."
            if self._env.render_mode == "ansi"
            else ""
        )
        if self._actions is None:
            choice = f"An action is free text. {self._format.request('your action', 'your text')}"
        else:
            names = list(self._actions)
            choice = f"Available actions: {', '.join(names)}.\n{self._format.request('one action', names[0])}"
        return f"{self._rules}{colours}\n{choice}"

    @property
    def prompts(self) -> PromptTemplates:
        return PROMPTS

    def reset(self, seed: int) -> Reset:
        observation, _ = self._env.reset(seed=seed)
        self._steps = 0
        self._running = True
        self._text = _state_text(self._env, observation)
        return Reset(self._text, {})

    def step(self, answer: str) -> Step:
        if not self._running:
            raise RollwrightError(f"{self._env.spec.id}: no episode is running; call reset first")
        name, action = self._parse_action(answer)
        reward, terminated, truncated = 0.0, False, False
        if action is not None:
            observation, given, terminated, truncated, _ = self._env.step(action)
            reward = float(given)
            self._text = _state_text(self._env, observation)
        self._steps += 1
        truncated = not terminated and (bool(truncated) or self._steps >= self._max_steps)
        self._running = not (terminated or truncated)
        info: Info = {
            "action": name,
            "valid": action is not None,
            "penalty": self._format_penalty if action is None else 0.0,
        }
        return Step(self._text, reward, bool(terminated), truncated, info)

    def _parse_action(self, answer: str) -> tuple[str | None, int | str | None]:
        found = self._format.find(answer)
        if found is None:
            return None, None
        if self._actions is None:
            return (found, found) if self._env.action_space.contains(found) else (None, None)
        name = self._by_lower.get(found.lower())
        return (name, self._actions[name]) if name is not None else (None, None)

    def close(self) -> None:
        self._running = False
        self._env.close()

    def actions(self) -> Sequence[str]:
        return tuple(self._actions or ())

    def best_action(self) -> str | None:
        return None

    def answer(self, action: str) -> str:
        return self._format.write(action)


class ForkableGymnasiumGame(GymnasiumGame):
    """A game whose environment can be copied exactly."""

    def fork(self) -> Self:
        twin = copy.copy(self)
        twin._env = copy.deepcopy(self._env)
        return twin


def _state_text(env: Any, observation: Any) -> str:
    if env.render_mode == "ansi":
        return _COLOURED.sub(_named_colour, env.render()).strip("\n")
    return observation if isinstance(observation, str) else str(_plain(observation))


def _named_colour(match: re.Match[str]) -> str:
    for code in match[1].split(";"):
        if code[:1] in ("3", "4") and code[1:] in tuple("01234567"):
            return f"[{_COLOURS[int(code[1])]}:{match[2]}]"
    return match[2]


def _plain(value: Any) -> Any:
    """Converts numpy values to Python's, whose text does not depend on the numpy version."""
    if isinstance(value, tuple | list):
        return type(value)(_plain(each) for each in value)
    if isinstance(value, dict):
        return {key: _plain(each) for key, each in value.items()}
    return value.tolist() if hasattr(value, "tolist") else value


def _copies_exactly(env: Any) -> bool:
    """Whether a deep copy, stepped after the original, gives the same results."""
    space = env.action_space
    if not isinstance(space, gymnasium.spaces.Discrete):
        return False
    actions = [
        int(space.start) + rng.digest("copying trial", step) % int(space.n) for step in range(_TRIAL_STEPS)
    ]
    try:
        env.reset(seed=0)
        twin = copy.deepcopy(env)
        return _play(env, actions) == _play(twin, actions)
    except Exception:  # noqa: BLE001 - any exception of foreign code means that it cannot be copied
        return False


def _play(env: Any, actions: Sequence[int]) -> list[tuple[str, float, bool, bool]]:
    seen = []
    for action in actions:
        observation, reward, terminated, truncated, _ = env.step(action)
        seen.append((_state_text(env, observation), float(reward), bool(terminated), bool(truncated)))
        if terminated or truncated:
            break
    return seen

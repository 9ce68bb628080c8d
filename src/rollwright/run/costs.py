"""What a run has spent, and whether more episodes fit into its budget.

Always true:
- A rollout is counted once, when it ends: all turns that were paid for, in whichever attempt and process, its judges' calls,
  and those of agents beside the episode. Turns that a later attempt took from the journal were paid once and count once.
  Judges of whole groups are counted when the group is ranked.
- `costs.jsonl` of the run's folder has a line for each counted rollout, so that a resumed run continues with the same sums.
  Lines may lag behind the log of trajectories in a crash; `restore` counts those from the log.
- Nothing is opened once the budget is reached, so it is exceeded by no more than what was in flight. A group is opened only
  if those in flight and its own rollouts are expected to fit, with two standard deviations to spare. With a budget, no
  rollouts wait in the queue but one group: whatever is opened is played at once, so that `in flight` means being played.
- Money follows from tokens and the table `prices` when it is asked for, so a corrected price corrects the past, too.
"""

import math
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from rollwright.config import RunConfig
from rollwright.engines.settings import PriceConfig, model_name
from rollwright.errors import ConfigError, RollwrightError
from rollwright.rewards.settings import JudgeSettings
from rollwright.rollout.settings import BudgetConfig
from rollwright.run.folder import RunFolder, RunReader
from rollwright.trajectory import OutsideCall, TokenUsage, Trajectory

MILLION = 1_000_000

PILOT = 16
"""Rollouts that are opened first, with a budget, to show what one costs; at least one group. Others wait until they have
ended."""

SPARE = 2.0
"""Standard deviations that are kept free for episodes in flight."""

WRITTEN_AT_ONCE = 64
"""Lines of `costs.jsonl` that are collected before they are written."""


class BudgetReached(RollwrightError):
    """The budget leaves no room for another group. The run has ended in good order and can be resumed."""

    exit_code = 3


class CostKey(NamedTuple):
    """Who used tokens."""

    model: str
    agent: str
    tag: str
    judge: str
    """Name of the reward whose judge it was; empty for the agents' own calls."""


@dataclass
class CostLedger:
    """Tokens by model, agent, tag and judge; seconds by tag."""

    used: dict[CostKey, TokenUsage] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    """Seconds that episodes took, summed over them."""
    rollouts: int = 0

    def add(self, used: Mapping[CostKey, TokenUsage], seconds: float, tag: str, *, rollouts: int = 1) -> None:
        self.rollouts += rollouts
        self.seconds[tag] = self.seconds.get(tag, 0.0) + seconds
        for key, usage in used.items():
            before = self.used.get(key)
            self.used[key] = usage if before is None else before + usage

    @property
    def total(self) -> TokenUsage:
        return sum(self.used.values(), TokenUsage())

    def dollars(self, prices: Mapping[str, PriceConfig]) -> float | None:
        """Money spent; `None` if no model in it has a price."""
        return _dollars(self.used, prices)

    def rows(self, prices: Mapping[str, PriceConfig]) -> list[dict[str, Any]]:
        """One row for each model, agent, tag and judge, sorted."""
        return [
            {
                **key._asdict(),
                **_tokens_row(usage),
                "usd": _dollars({key: usage}, prices),
            }
            for key, usage in sorted(self.used.items())
        ]

    def sums(self, prices: Mapping[str, PriceConfig]) -> dict[str, Any]:
        """The ledger as plain data: all entries, and the sums by model, agent, tag and judge."""
        return {
            "rollouts": self.rollouts,
            "total": {**_tokens_row(self.total), "usd": self.dollars(prices)},
            "by": {
                name: {each: self._sum_of(name, each, prices) for each in self._values(name)}
                for name in CostKey._fields
            },
            "entries": self.rows(prices),
            "seconds": {tag: round(self.seconds[tag], 3) for tag in sorted(self.seconds)},
        }

    def _values(self, name: str) -> list[str]:
        return sorted({value for key in self.used if (value := getattr(key, name))})

    def _sum_of(self, name: str, value: str, prices: Mapping[str, PriceConfig]) -> dict[str, Any]:
        part = {key: usage for key, usage in self.used.items() if getattr(key, name) == value}
        return {**_tokens_row(sum(part.values(), TokenUsage())), "usd": _dollars(part, prices)}


def _tokens_row(usage: TokenUsage) -> dict[str, int]:
    return {
        "calls": usage.calls,
        "prompt": usage.prompt,
        "cached": usage.cached,
        "completion": usage.completion,
        "reasoning": usage.reasoning,
    }


def _dollars(used: Mapping[CostKey, TokenUsage], prices: Mapping[str, PriceConfig]) -> float | None:
    amounts = [price_of(usage, prices[key.model]) for key, usage in used.items() if key.model in prices]
    return math.fsum(amounts) if amounts else None


def price_of(usage: TokenUsage, price: PriceConfig) -> float:
    """Dollars for these calls. Cached and reasoning tokens are parts of the others, with prices of their own."""
    cached = price.prompt if price.cached is None else price.cached
    reasoning = price.completion if price.reasoning is None else price.reasoning
    return (
        usage.calls * price.call
        + (
            (usage.prompt - usage.cached) * price.prompt
            + usage.cached * cached
            + (usage.completion - usage.reasoning) * price.completion
            + usage.reasoning * reasoning
        )
        / MILLION
    )


def used_by(trajectory: Trajectory, tag: str, model_of: "ModelNames") -> dict[CostKey, TokenUsage]:
    """What a rollout's turns, its judges and its agents beside the episode have used."""
    used: dict[CostKey, TokenUsage] = {}
    for turn in trajectory.turns:
        key = CostKey(model_of(tag, turn.agent, turn.policy), turn.agent, tag, "")
        used[key] = used.get(key, TokenUsage()) + turn.usage
    return _add_calls(used, trajectory.judged, tag, model_of)


def _add_calls(
    used: dict[CostKey, TokenUsage], calls: Iterable[OutsideCall], tag: str, model_of: "ModelNames"
) -> dict[CostKey, TokenUsage]:
    for call in calls:
        model = call.model or model_of(tag, call.agent, call.policy)
        key = CostKey(model, call.agent, tag, call.judge)
        used[key] = used.get(key, TokenUsage()) + call.usage
    return used


@dataclass
class _Spread:
    """Mean and standard deviation of what one rollout costs, kept up to date."""

    count: int = 0
    mean: float = 0.0
    squares: float = 0.0

    def add(self, value: float) -> None:
        self.count += 1
        apart = value - self.mean
        self.mean += apart / self.count
        self.squares += apart * (value - self.mean)

    def expected(self, rollouts: int, group: int) -> float:
        """What so many rollouts cost together, with some to spare. Members of a group play the same level, and cost alike."""
        deviation = math.sqrt(self.squares / (self.count - 1)) if self.count > 1 else self.mean
        # The mean itself is known from `count` rollouts only, which matters where many more are in flight.
        spread = math.sqrt(group * (rollouts + rollouts**2 / max(self.count, 1)))
        return rollouts * self.mean + SPARE * spread * deviation


class CostBook:
    """Counts a run's costs, writes them to its folder, and is the gate of its schedulers."""

    def __init__(
        self,
        config: RunConfig,
        folder: RunFolder | None = None,
        *,
        running: Callable[[], int] = lambda: 0,
        capacity: Callable[[], float] = lambda: math.inf,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`running`: counts the rollouts in flight. `capacity`: how many can be played at once."""
        check_prices(config)
        self.ledger = CostLedger()
        self.prices: Mapping[str, PriceConfig] = config.prices
        self.budget: BudgetConfig | None = config.budget
        self._model_of = agent_models(config)
        self._folder = folder
        self._running = running
        self._capacity = capacity
        self._clock = clock
        self._began = clock()
        self._earlier = 0.0
        """Seconds of playing in earlier processes."""
        self._seen: set[str] = set()
        self._unwritten: list[dict[str, Any]] = []
        self._tokens, self._dollars, self._seconds = _Spread(), _Spread(), _Spread()
        self._spent = 0.0

    @property
    def elapsed(self) -> float:
        """Seconds of playing, over all resumes."""
        return self._earlier + self._clock() - self._began

    def restore(self) -> None:
        """Continue with what earlier processes have written into the folder."""
        assert self._folder is not None
        keys: dict[tuple[str, ...], CostKey] = {}
        """One object for each key: there may be a line for each of a million rollouts."""
        for row in RunReader(self._folder.path).iterate_costs():
            if (clock := row.get("clock", 0.0)) > self._earlier:
                self._earlier = float(clock)
            used = {}
            for each in row["used"]:
                names = tuple(each[:4])
                key = keys.get(names) or keys.setdefault(names, CostKey(*names))
                used[key] = TokenUsage(*each[4:])
            rollout_id = row["rollout_id"]
            if not rollout_id:  # of the judges of a group, or a sum over pruned rollouts
                self._add(used, row.get("seconds", 0.0), row.get("tag", ""), row.get("rollouts", 1))
            elif not used:
                self._seen.add(rollout_id)
            elif rollout_id not in self._seen:
                self._count(rollout_id, used, row.get("seconds", 0.0), row.get("tag", ""), True)
        missing = [each for each in self._folder.log.rollouts if each not in self._seen]
        for first in range(0, len(missing), WRITTEN_AT_ONCE):
            kept = self._folder.log.read(missing[first : first + WRITTEN_AT_ONCE])
            for rollout_id, encoded in kept.items():
                self.add(rollout_id, Trajectory.from_bytes(encoded))

    def add(self, rollout_id: str, trajectory: Trajectory) -> None:
        """Count a rollout that has ended; one that is counted already is ignored."""
        if rollout_id in self._seen:
            return
        tag = trajectory.tag
        used = used_by(trajectory, tag, self._model_of)
        finished = trajectory.error is None and trajectory.stop is not None
        self._count(rollout_id, used, trajectory.duration, tag, finished)
        self._write({"rollout_id": rollout_id}, tag, used, trajectory.duration)
        # What failed is in no log, so that its line alone remembers it.
        if not finished or len(self._unwritten) >= WRITTEN_AT_ONCE:
            self.flush()

    def add_ranking(self, group_id: str, tag: str, calls: Iterable[OutsideCall]) -> None:
        """Count the calls of a group's judges. A group that is ranked again after a restart has paid again."""
        used = _add_calls({}, calls, tag, self._model_of)
        self._add(used, 0.0, tag, 0)
        self._write({"rollout_id": "", "rollouts": 0, "group_id": group_id}, tag, used, 0.0)
        self.flush()

    def _add(self, used: Mapping[CostKey, TokenUsage], seconds: float, tag: str, rollouts: int = 1) -> float:
        """Add to the sums; returns the dollars."""
        self.ledger.add(used, seconds, tag, rollouts=rollouts)
        if not self.prices:
            return 0.0
        dollars = _dollars(used, self.prices) or 0.0
        self._spent += dollars
        return dollars

    def _write(
        self, whose: Mapping[str, Any], tag: str, used: Mapping[CostKey, TokenUsage], seconds: float
    ) -> None:
        if self._folder is None:
            return
        self._unwritten.append(
            {
                **whose,
                "tag": tag,
                "seconds": round(seconds, 3),
                "clock": round(self.elapsed, 1),
                "used": [
                    [*key, each.calls, each.prompt, each.cached, each.completion, each.reasoning]
                    for key, each in used.items()
                ],
            }
        )

    def add_free(self, rollout_id: str) -> None:
        """Count a rollout whose result was known: it costs nothing here, whatever its trajectory says."""
        if rollout_id not in self._seen:
            self._seen.add(rollout_id)
            self._unwritten.append({"rollout_id": rollout_id, "used": []})
            self.flush()  # at once: once its trajectory is in the log, it would be counted from there

    def flush(self) -> None:
        """Write the lines that were collected."""
        if self._folder is not None and self._unwritten:
            rows, self._unwritten = self._unwritten, []
            self._folder.add_costs(rows)

    def _count(
        self, rollout_id: str, used: Mapping[CostKey, TokenUsage], seconds: float, tag: str, finished: bool
    ) -> None:
        self._seen.add(rollout_id)
        dollars = self._add(used, seconds, tag)
        if finished:
            self._tokens.add(sum(each.tokens for each in used.values()))
            self._dollars.add(dollars)
            self._seconds.add(seconds)

    def admits(self, rollouts: int) -> bool:
        """Whether so many more rollouts are expected to fit beside those in flight."""
        if self.budget is None:
            return True
        together = self._running() + rollouts
        if self._running() > self._capacity():
            return False
        if self.ledger.rollouts < PILOT or not self._tokens.count:
            # Those that end first are the short ones: only when all of the first have ended is their mean to be trusted.
            few = self.ledger.rollouts + together <= max(PILOT, rollouts)
            return (few or together == rollouts) and not self._is_reached()
        return all(spent + expected <= limit for spent, expected, limit in self._limits(together, rollouts))

    def refusal(self, rollouts: int) -> RollwrightError | None:
        """Why so many cannot be opened although nothing is in flight; `None`: they can, or something is."""
        if self._running() or self.admits(rollouts):
            return None
        return BudgetReached(f"the budget leaves no room for another group of episodes: {self.status()}")

    def _is_reached(self) -> bool:
        return any(spent >= limit for spent, _, limit in self._limits(0, 1))

    def _limits(self, rollouts: int, group: int) -> Iterable[tuple[float, float, float]]:
        """What is spent, what so many rollouts are expected to take, and the limit; for each limit that is set."""
        assert self.budget is not None
        if self.budget.tokens is not None:
            yield self.ledger.total.tokens, self._tokens.expected(rollouts, group), self.budget.tokens
        if self.budget.usd is not None:
            yield self._spent, self._dollars.expected(rollouts, group), self.budget.usd
        if (
            self.budget.hours is not None
        ):  # those in flight end together, so one of them is expected, whatever their number
            yield self.elapsed, self._seconds.expected(min(rollouts, 1), 1), self.budget.hours * 3600

    def live(self) -> dict[str, Any]:
        """Spending so far as plain data, with the limits that are set."""
        budget = None if self.budget is None else self.budget.model_dump(mode="json", exclude_none=True)
        total = {**_tokens_row(self.ledger.total), "usd": self._spent if self.prices else None}
        return {"total": total, "hours": round(self.elapsed / 3600, 4), "budget": budget}

    def status(self) -> str:
        """Spending in one line, with the limits that are set."""
        budget, total = self.budget, self.ledger.total
        of_tokens = "" if budget is None or budget.tokens is None else f" of {budget.tokens:,}"
        parts = [f"{total.tokens:,}{of_tokens} tokens"]
        if self.prices:
            of_usd = "" if budget is None or budget.usd is None else f" of ${budget.usd:,.2f}"
            parts.insert(0, f"${self._spent:,.4f}{of_usd}")
        if budget is not None and budget.hours is not None:
            parts.append(f"{self.elapsed / 3600:.2f} of {budget.hours:g} hours")
        return " · ".join(parts)


ModelNames = Callable[[str, str, str], str]
"""Names the model that answers a tag's agent; for an empty agent that of the run's own policy, and with the name of one of
`policies` the model of that."""


def agent_models(config: RunConfig) -> ModelNames:
    """The models of a run's agents."""
    own = model_name(config.policy)
    named = {name: model_name(each) for name, each in config.policies.items()}
    models = {
        (tag, agent): model_name(config.policies[settings.policy])
        for tag, team in config.orchestras.items()
        for agent, settings in team.agents.items()
        if settings.policy in config.policies
    }
    return lambda tag, agent, policy: named.get(policy) or models.get((tag, agent.rpartition("/")[2]), own)


def check_prices(config: RunConfig) -> None:
    """Raise a `ConfigError` if a budget in dollars meets a model without a price: it would never be reached."""
    if config.budget is None or config.budget.usd is None:
        return
    for name in sorted(_models(config)):
        if name not in config.prices:
            raise ConfigError(
                f"budget.usd: the price of {name!r} is not known; give it as prices.{name}: "
                "{prompt: …, completion: …}, in dollars for a million tokens (0 for a model of your own)"
            )


def _models(config: RunConfig) -> set[str]:
    """Names of all models that a run may ask: its policies', its judges' and its served opponents'."""
    found = {model_name(config.policy), *(model_name(each) for each in config.policies.values())}
    for tag in config.tags:
        if (custom := config.custom_envs.get(tag)) is None:
            continue
        judges = [each for each in custom.rewards if isinstance(each, JudgeSettings)]
        found |= {name for each in judges if (name := each.model_name)}
        opponent = custom.env_config.get("opponent")
        if isinstance(opponent, Mapping) and "model" in opponent:
            found.add(str(opponent["model"]))
    return found

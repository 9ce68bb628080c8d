"""Players and the simulated engine, made from their settings."""

from rollwright.engines.base import Policy
from rollwright.engines.settings import OraclePolicyConfig, RandomPolicyConfig, SimulatedPolicyConfig
from rollwright.simulation.engine import SimulatedEngine
from rollwright.simulation.lengths import LogNormalLength
from rollwright.simulation.players import OraclePlayer, RandomPlayer, SkilledPlayer


def make_random(settings: RandomPolicyConfig) -> Policy:
    return RandomPlayer()


def make_oracle(settings: OraclePolicyConfig) -> Policy:
    return OraclePlayer()


def make_simulated(settings: SimulatedPolicyConfig, player: SkilledPlayer | None = None) -> SimulatedEngine:
    """`player`: chooses the answers; unset: one of the settings' skill."""
    return SimulatedEngine(
        slots=settings.slots,
        tokens_per_second=settings.tokens_per_second,
        lengths=LogNormalLength(settings.mean_tokens, settings.spread),
        player=player or SkilledPlayer(settings.skill),
        failure_rate=settings.failure_rate,
        hang_rate=settings.hang_rate,
        max_queue=settings.max_queue,
        track_episodes=False,
    )

"""The other ranks of a trainer as Ray actors, in one placement group over the cluster's nodes.

Always true: all ranks are placed or none is; an actor that ends or is lost ends the group, and the trainer starts another one.
Only the address of rank 0 passes through Ray; what ranks say to each other goes over torch's process group.
"""

import os
import time
from collections.abc import Mapping
from functools import partial
from typing import Any

import ray
from ray.exceptions import RayActorError, RayError, RayTaskError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from rollwright.errors import RollwrightError
from rollwright.run.ray_fleet import AUTO, LOCAL, LOOPBACK, join_ray, last_line
from rollwright.training.ranks.group import Seat
from rollwright.training.ranks.processes import ALLOCATOR

PLACE_SECONDS = 120.0
"""Time for the cluster to have room for all ranks; one that scales needs a while for a new node."""


class RankActor:
    """Code of the actor: one rank."""

    def follow(self, seat: Mapping[str, Any]) -> None:
        """Makes the calls of rank 0 until it is told to stop."""
        os.environ["LOCAL_RANK"] = "0"  # Ray shows an actor its own GPU alone
        import torch

        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
        from rollwright.training.ranks.follower import follow
        from rollwright.training.ranks.group import connect

        mine = Seat(**seat)
        follow(mine, connect(mine))

    def pid(self) -> int:
        return os.getpid()


class RayRanks:
    """Ranks 1 to `size` − 1."""

    def __init__(self, leader: Seat, *, address: str, gpus: bool = False) -> None:
        """`address`: of the cluster, as for `RayCluster`. `gpus`: every rank gets a GPU, else a CPU."""
        if not ray.is_initialized():
            join_ray(address)
        need = {"GPU": 1.0} if gpus else {"CPU": 1.0}
        self._group: PlacementGroup = placement_group([need] * (leader.size - 1), strategy="PACK")
        if not self._group.wait(PLACE_SECONDS):
            self._remove()
            raise RollwrightError(
                f"ray: no room for {leader.size - 1} ranks with {next(iter(need))} 1 each within {PLACE_SECONDS:g} s; "
                "add nodes, or set training.processes lower"
            )
        # Reading GPUs by Ray's resources; `max_restarts=0`: the trainer starts new ranks, from a checkpoint.
        make = ray.remote(
            num_cpus=0 if gpus else 1,
            num_gpus=1 if gpus else 0,
            max_restarts=0,
            runtime_env={"env_vars": ALLOCATOR},
        )(RankActor)
        self.actors: dict[int, Any] = {}
        self._calls: dict[Any, int] = {}
        for rank in range(1, leader.size):
            place = PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=rank - 1)
            self.actors[rank] = make.options(scheduling_strategy=place, max_concurrency=2).remote()
            seat = {**vars(leader), "rank": rank}
            self._calls[self.actors[rank].follow.remote(seat)] = rank

    @property
    def pids(self) -> dict[int, int]:
        return {rank: ray.get(actor.pid.remote()) for rank, actor in self.actors.items()}

    def lost(self, seconds: float = 0.0) -> str | None:
        """Why a rank has ended, if one has; waits up to `seconds` for it."""
        end = time.monotonic() + seconds
        while True:
            done, _ = ray.wait(list(self._calls), num_returns=1, timeout=max(end - time.monotonic(), 0.01))
            for call in done:
                try:
                    ray.get(call)
                except RayTaskError as error:
                    return f"rank {self._calls[call]}: {last_line(error.cause)}"
                except RayActorError:
                    return f"rank {self._calls[call]} was lost with its process or node"
                except RayError as error:
                    return f"rank {self._calls[call]}: {last_line(error)}"
                return f"rank {self._calls[call]} ended"
            if time.monotonic() >= end:
                return None

    def end(self, *, at_once: bool = False) -> None:
        """Ends all ranks: those that were told to stop have a few seconds."""
        if not at_once and self._calls:
            ray.wait(list(self._calls), num_returns=len(self._calls), timeout=5.0)
        for actor in self.actors.values():
            ray.kill(actor)
        self.actors.clear()
        self._calls.clear()
        self._remove()

    def _remove(self) -> None:
        remove_placement_group(self._group)


def ray_ranks(address: str, *, gpus: bool = False) -> tuple[partial[RayRanks], str]:
    """What starts the ranks, and the host by which they reach this process."""
    if not ray.is_initialized():
        join_ray(address)
        started_here = address == LOCAL
    else:
        started_here = False
    host = LOOPBACK if started_here else str(ray.util.get_node_ip_address())  # type: ignore[no-untyped-call]
    return partial(RayRanks, address=address or AUTO, gpus=gpus), host

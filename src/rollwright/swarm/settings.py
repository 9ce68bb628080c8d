"""Settings of how a node shares rollouts with its swarm, and the plug point of transports."""

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from rollwright.registry import Registry
from rollwright.settings import Settings

TRANSPORTS: Registry[Any] = Registry(
    "transports",
    "transport",
    {
        "zenoh": "rollwright.swarm.transports.zenoh:open_zenoh",
        "directory": "rollwright.swarm.transports.directory:open_directory",
    },
    protocol="rollwright.swarm.transports.base:Transport",
    key="swarm.communication.transport",
)


def _known_transport(name: str) -> str:
    if not TRANSPORTS.knows(name):
        raise ValueError(TRANSPORTS.unknown(name))
    return name


class CommunicationConfig(Settings):
    """How a node reaches the others. Every call has a deadline; without reachable peers the node goes on alone, and
    joins again by itself."""

    transport: Annotated[str, AfterValidator(_known_transport)] = "zenoh"
    """`zenoh`: over the network. `directory`: through a folder that all nodes see, mounted or synced. Or one's own as
    `module:name`."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Settings of a transport of one's own."""
    bootstrap: list[str] = Field(default_factory=list)
    """Addresses of nodes to begin with, as `tcp/HOST:PORT`; any node of the swarm will do, and it may be away. Unset:
    nodes of this machine find each other."""
    listen: list[str] = Field(default_factory=list)
    """Addresses to be reached at, as `tcp/0.0.0.0:7447`. Unset: any free port, of this machine alone as long as no
    other one is in `bootstrap`; else of every address that this machine has, so that nodes which met at the bootstrap
    can do without it."""
    multicast: bool = True
    """Whether to look for nodes on the same machine and network without any address."""
    folder: str | None = None
    """For `directory`: the folder."""
    announce: Literal["all", "views"] = "all"
    """Whom a node's groups are announced to. `all`: every node hears of every group, for swarms up to about a hundred nodes.
    `views`: each node gossips with a few peers and pulls a sample; what it sends and receives does not grow with the
    swarm. All nodes of a swarm must agree; `views` needs transport `zenoh`."""
    gossip_interval: PositiveFloat = 5.0
    """For `announce: views`: seconds between two exchanges with peers of the view; a tenth of a round or less."""
    startup_timeout: PositiveFloat = 60.0
    """Seconds in which the transport must have started; peers need not have been found by then."""
    beam_size: PositiveInt = 4
    """Groups of peers that are fetched and checked at the same time."""
    fetch_timeout: PositiveFloat = 10.0
    """Seconds for the content of one group to come."""
    verify_timeout: PositiveFloat = 20.0
    """Seconds for one group to be played again."""
    gather_timeout: PositiveFloat = 60.0
    """Seconds to gather foreign groups in a round; then the round continues with those that have arrived."""
    zenoh: dict[str, Any] = Field(default_factory=dict)
    """Settings of zenoh's own, by path: `transport/link/tls`, say."""

    @model_validator(mode="after")
    def _fits(self) -> "CommunicationConfig":
        if self.transport == "directory" and self.folder is None:
            raise ValueError("folder: transport `directory` needs one that all nodes see")
        if self.transport == "zenoh" and self.folder is not None:
            raise ValueError(f"folder: transport `{self.transport}` has none; use transport `directory`")
        if self.announce == "views" and self.transport != "zenoh":
            raise ValueError(f"announce: `views` needs transport `zenoh`, not `{self.transport}`")
        return self


class SwarmConfig(Settings):
    """`rollwright swarm join`: rounds of generate, share, sample, train, evaluate; `max_steps` of them."""

    name: Annotated[str, Field(min_length=1, max_length=128)] = "rollwright"
    """Of the swarm. Nodes with the same name share; with the node's key it decides the node's `seed`, and with that its
    tasks."""
    local_groups: PositiveInt = 4
    """Own groups in a round."""
    external_groups: NonNegativeInt = 4
    """Groups of peers in a round, as far as there are so many. Those without anything to learn from are left out first,
    then they are drawn by lot, from everybody in turn."""
    max_round_lag: NonNegativeInt = 3
    """Rounds that a foreign group may be older than the round that takes it."""
    max_clock_skew: PositiveFloat = 300.0
    """Seconds that the clock of a peer may differ from this node's."""
    per_peer: PositiveInt | None = None
    """Groups that one peer may give to a round. Unset: as many as are left when the others have given theirs."""
    max_group_kb: PositiveInt = 1024
    """Kilobytes of content in a foreign group; larger ones are not fetched."""
    min_mean_logprob: float | None = None
    """Mean log-probability, under this node's own policy, that each foreign episode must reach; below it the text is
    nothing that this policy would say. Unset: any."""
    communication: CommunicationConfig = CommunicationConfig()

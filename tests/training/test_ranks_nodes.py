"""Ranks on several machines, as far as a network can tell: torchrun in two namespaces, and Ray over two nodes."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from rollwright.models import load_model
from rollwright.training.ranks.group import interface_to

sys.path.insert(0, str(Path(__file__).parents[1] / "swarm"))
sys.path.insert(0, str(Path(__file__).parent))
from network import Network, why_not
from test_ranks_elsewhere import ROOT, configuration, difference, run, settings

torch.set_num_threads(1)
PORT = 29511
STEPS = ("max_steps=6", "training.checkpoint_steps=1", "training.rank_timeout=20")


def test_the_interface_of_ranks_is_the_one_on_the_way_to_rank_0() -> None:
    loopback = [
        name
        for name, given in psutil.net_if_addrs().items()
        if any(each.address == "127.0.0.1" for each in given)
    ]
    assert interface_to("127.0.0.1") in loopback
    assert interface_to("no-such-host.invalid") is None


@pytest.fixture
def network() -> Iterator[Network]:
    if (reason := why_not()) is not None:
        pytest.skip(reason)
    made = Network((["ann"], ["bob"]))
    yield made
    made.close()


@pytest.fixture
def node(network: Network, tmp_path: Path) -> Iterator[Callable[..., "subprocess.Popen[str]"]]:
    """Starts torchrun on one of two machines, with a rank each."""
    running = []

    def start(number: int, *words: str) -> "subprocess.Popen[str]":
        name = ("ann", "bob")[number]
        launch = (
            *("ip", "netns", "exec", network.namespace(name), sys.executable, "-m", "torch.distributed.run"),
            *("--nnodes=2", f"--node-rank={number}", "--nproc-per-node=1"),
            *(f"--master-addr={network.address('ann')}", f"--master-port={PORT}", "-m", "rollwright", *words),
        )
        environment = {each: value for each, value in os.environ.items() if each != "GLOO_SOCKET_IFNAME"}
        running.append(
            subprocess.Popen(
                launch,
                cwd=tmp_path,
                env={**environment, "OMP_NUM_THREADS": "1"},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                start_new_session=True,
            )
        )
        return running[-1]

    yield start
    for each in running:
        if each.poll() is None:
            os.killpg(each.pid, signal.SIGKILL)
        each.communicate()


@pytest.mark.ranks
def test_torchrun_over_two_machines_trains_what_one_process_does(
    tmp_path: Path, node: Callable[..., "subprocess.Popen[str]"]
) -> None:
    plain = ("train", str(configuration(tmp_path)), "--no-live", "--runs")
    run("rollwright", *plain, str(tmp_path / "one"), place=tmp_path)
    given = (*plain, str(tmp_path / "two"), "training.checkpoint_layout=sharded")
    both = [node(number, *given) for number in (0, 1)]
    for each in both:
        said = each.communicate(timeout=400)[0]
        assert each.returncode == 0, said
    one, two = (load_model(tmp_path / each / "lake" / "model").state_dict() for each in ("one", "two"))
    assert difference(one, load_model(ROOT / "models" / "frozen_lake").state_dict()) > 1e-4
    assert difference(one, two) < 1.2e-3 / 10
    assert '"ranks": 2' in (tmp_path / "two" / "lake" / "training" / "metrics.jsonl").read_text(
        encoding="utf-8"
    )
    assert len(list((tmp_path / "two" / "lake" / "checkpoints" / "000001").glob("shard-*"))) == 2


@pytest.mark.ranks
@pytest.mark.parametrize("loss", ["killed", "cut"])
def test_a_machine_that_is_lost_ends_the_others_and_the_run_resumes_on_one(
    tmp_path: Path, network: Network, node: Callable[..., "subprocess.Popen[str]"], loss: str
) -> None:
    config = configuration(tmp_path)
    given = (
        "train",
        str(config),
        *STEPS,
        "training.checkpoint_layout=sharded",
        "--no-live",
        "--runs",
        str(tmp_path),
    )
    first, second = (node(number, *given) for number in (0, 1))
    while not list((tmp_path / "lake" / "checkpoints").glob("0*")):
        assert first.poll() is None, first.communicate()[0]
        time.sleep(0.1)
    if loss == "killed":
        for each in psutil.Process(second.pid).children(recursive=True):
            each.kill()
        second.kill()
    else:
        network.cut("bob")
    said = first.communicate(timeout=300)[0]
    assert first.returncode != 0
    assert "rollwright resume" in said
    assert "Traceback" not in said.partition("rollwright resume")[0]
    if loss == "cut":
        assert "rank 1: rank 0 at 10.77.0.1 was not there for 20 s" in second.communicate(timeout=300)[0]
    run("rollwright", "train", "--resume", str(tmp_path / "lake"), "--no-live", place=tmp_path)
    rows = (tmp_path / "lake" / "training" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    assert len(rows) == 6


@pytest.mark.ranks
def test_ranks_of_ray_are_placed_over_its_nodes_and_those_of_a_lost_node_are_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ray = pytest.importorskip("ray", reason="needs rollwright[ray]")
    from ray.cluster_utils import Cluster
    from test_ranks import batch, save_model

    from rollwright.run.ray_ranks import ray_ranks
    from rollwright.training.ranks.leader import LeadingTrainer, Setup
    from rollwright.training.trainer import Trainer

    model = save_model(tmp_path / "model")
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
    try:
        other = cluster.add_node(num_cpus=1)
        start, host = ray_ranks(cluster.address)
        one = Trainer(load_model(model), settings(), total_updates=10, seed=5)
        many = LeadingTrainer(Setup(model, settings(processes=3), 10, seed=5), start, host)
        try:
            assert len(nodes_of(ray, many)) == 2
            for each in (one, many):
                each.step(batch(0))
            cluster.remove_node(other, allow_graceful=False)
            cluster.add_node(num_cpus=1)
            for each in (one, many):
                each.step(batch(1))
            assert len(nodes_of(ray, many)) == 2
            assert (many.version, many.updates) == (one.version, one.updates) == (2, 2)
            assert difference(one.weights().tensors, many.weights().tensors) < 1e-4
        finally:
            many.close()
    finally:
        ray.shutdown()
        cluster.shutdown()


def nodes_of(ray: Any, many: Any) -> set[str]:
    """Nodes on which the ranks that are actors are placed."""
    return set(ray.util.placement_group_table(many.others._group)["bundles_to_node_id"].values())

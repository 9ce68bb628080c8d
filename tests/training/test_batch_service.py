"""A trainer in another process: batches by HTTP, weights back, each batch trained once whatever dies."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from rollwright.config.resuming import check_resumable
from rollwright.errors import ConfigError, FormatError, RollwrightError
from rollwright.models import load_model
from rollwright.run.build_training import check
from rollwright.run.folder import RunReader
from rollwright.training.advantages import RLOO
from rollwright.training.rows import Row, build_rows
from rollwright.training.service.ledger import Finish, HandOut, ServedLedger
from rollwright.training.service.remote_trainer import ADDRESS, LEDGER, RemoteTrainer
from rollwright.training.settings import ServeSettings
from rollwright.trajectory import Trajectory

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "trainer_over_http.py"


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    import tiny_training

    yield tiny_training
    sys.modules.pop("tiny_training")


@pytest.fixture
def model(tiny: Any, tmp_path: Path) -> Path:
    return Path(tiny.save_model(tmp_path / "model"))


@pytest.fixture
def rows(chain: Callable[..., Trajectory]) -> list[Row]:
    return build_rows([[chain("a", [0.0, 1.0]), chain("b", [0.5])]], RLOO())


class Steps:
    """A remote trainer whose steps run in threads, and a client of its service."""

    def __init__(self, model: Path, run: Path, **settings: Any) -> None:
        self.trainer = RemoteTrainer(str(model), ServeSettings(port=0, **settings), run)
        token = os.environ.get(settings.get("token_env", ""), "")
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        self.http = httpx.Client(base_url=self.trainer.url, headers=headers, timeout=30)

    def begin(self, rows: list[Row]) -> "asyncio.Future[Any]":
        return asyncio.get_running_loop().run_in_executor(None, self.trainer.step, rows)

    async def ask(self, name: str, **fields: Any) -> httpx.Response:
        return await asyncio.to_thread(self.http.post, f"/v1/{name}", json=fields)

    async def batch(self, trainer: str = "") -> dict[str, Any]:
        reply = (await self.ask("get_batch", trainer=trainer)).json()
        assert reply["state"] == "batch", reply
        return dict(reply["batch"])

    def close(self) -> None:
        self.trainer.interrupt()
        self.http.close()
        self.trainer.close()


@pytest.fixture
def steps(model: Path, tmp_path: Path) -> Iterator[Callable[..., Steps]]:
    made: list[Steps] = []

    def make(**settings: Any) -> Steps:
        made.append(Steps(model, tmp_path / "run", **settings))
        return made[-1]

    yield make
    for each in made:
        each.close()


def saved(model: Path, place: Path, shift: float = 0.01) -> Path:
    """The model with other weights."""
    changed: Any = load_model(str(model))
    with torch.no_grad():
        for each in changed.parameters():
            each.add_(shift)
    changed.save_pretrained(place)
    return place


async def test_a_batch_holds_the_rows_and_comes_back_as_weights(
    steps: Callable[..., Steps], rows: list[Row], model: Path, tmp_path: Path
) -> None:
    served = steps()
    step = served.begin(rows)
    batch = await served.batch("mine")
    assert (batch["step"], batch["version"], Path(batch["folder"])) == (0, 0, model)
    for sent, row in zip(batch["rows"], rows, strict=True):
        assert sent["token_ids"] == list(row.token_ids)
        assert sent["mask"] == list(row.mask)
        assert sent["advantages"] == list(row.advantages)
        assert sent["logprobs"] == list(row.logprobs)
    folder = saved(model, tmp_path / "new")
    told = {"lease": batch["lease"], "folder": str(folder), "metrics": {"loss": 0.5, "mine": 2.0}}
    assert (await served.ask("finish_batch", **told)).json() == {"version": 1}
    assert (await served.ask("finish_batch", **told)).json() == {"version": 1}
    report = await step
    expected = next(load_model(str(folder)).parameters())
    saved(model, folder, shift=7.0)  # a trainer may write its next weights into the same files
    assert (report.version, report.loss, report.skipped) == (1, 0.5, None)
    assert report.figures()["trainer/mine"] == 2.0
    weights = served.trainer.export(tmp_path / "exported")
    assert (weights.version, served.trainer.version) == (1, 1)
    assert torch.equal(next(load_model(str(tmp_path / "exported")).parameters()), expected)


async def test_the_batch_of_a_dead_trainer_goes_to_the_next_and_the_late_one_is_refused(
    steps: Callable[..., Steps], rows: list[Row], model: Path, tmp_path: Path
) -> None:
    served = steps(lease_seconds=0.2)
    step = served.begin(rows)
    first, second = await served.batch("a"), await served.batch("b")
    assert first["lease"] != second["lease"]
    assert first["rows"] == second["rows"]
    late = await served.ask("finish_batch", lease=first["lease"], folder=str(saved(model, tmp_path / "x")))
    assert (late.status_code, late.json()["kind"]) == (409, "lease_lost")
    assert not step.done()
    third = await served.batch("b")
    skipped = await served.ask("finish_batch", lease=third["lease"], skipped="no advantage")
    assert skipped.json() == {"version": 0}
    report = await step
    assert (report.updates, report.version, served.trainer.skipped) == (0, 0, {"no advantage": 1})
    assert (await asyncio.to_thread(served.http.get, "/v1/status")).json()["lost_leases"] >= 1


async def test_weights_can_be_uploaded_and_downloaded(
    steps: Callable[..., Steps], rows: list[Row], model: Path, tmp_path: Path
) -> None:
    served = steps()
    step = served.begin(rows)
    batch = await served.batch()
    content = (saved(model, tmp_path / "new") / "model.safetensors").read_bytes()

    def put(name: str, content: bytes) -> httpx.Response:
        return served.http.put(f"/v1/uploads/{batch['lease']}/{name}", content=content)

    def finish(**sums: str) -> Any:
        return served.ask("finish_batch", lease=batch["lease"], uploaded=sums)

    assert (await asyncio.to_thread(put, "..%2Fmodel.safetensors", content)).status_code in (404, 422)
    assert (await asyncio.to_thread(put, "model.safetensors", content[:-3])).status_code == 200
    right = {"model.safetensors": sha256(content).hexdigest()}
    assert (await finish(**right)).json()["kind"] == "damaged"
    assert (await asyncio.to_thread(put, "model.safetensors", content)).status_code == 200
    assert (await finish(**right)).json() == {"version": 1}
    assert (await step).version == 1
    names = [each["name"] for each in served.http.get("/v1/weights").json()["files"]]
    assert "config.json" in names
    assert served.http.get("/v1/weights/model.safetensors").content == content
    assert served.http.get("/v1/weights/..%2F..%2Fconfig.yaml").status_code == 404


@pytest.mark.parametrize(
    ("told", "status"),
    [
        ({}, 422),
        ({"folder": "/nowhere", "skipped": "both"}, 422),
        ({"folder": "/nowhere"}, 422),
        ({"folder": "."}, 422),
        ({"unknown": 1}, 422),
        ({"folder": 3}, 422),
    ],
)
async def test_a_wrong_acknowledgement_is_one_line_and_keeps_the_lease(
    steps: Callable[..., Steps], rows: list[Row], told: dict[str, Any], status: int
) -> None:
    served = steps()
    step = served.begin(rows)
    batch = await served.batch()
    refused = await served.ask("finish_batch", lease=batch["lease"], **told)
    assert (refused.status_code, "\n" in refused.json()["message"]) == (status, False)
    assert (await served.ask("renew_lease", lease=batch["lease"])).json() == {"lease_seconds": 60.0}
    assert (await served.ask("finish_batch", lease=batch["lease"], skipped="enough")).status_code == 200
    await step


async def test_weights_of_another_model_are_refused(
    steps: Callable[..., Steps], rows: list[Row], tiny: Any, tmp_path: Path
) -> None:
    from rollwright.models.tiny import tiny_llama

    tiny_llama(300, hidden_size=32, layers=1).save_pretrained(tmp_path / "other")
    served = steps()
    step = served.begin(rows)
    batch = await served.batch()
    refused = await served.ask("finish_batch", lease=batch["lease"], folder=str(tmp_path / "other"))
    assert refused.json()["kind"] == "another_model"
    await served.ask("finish_batch", lease=batch["lease"], skipped="enough")
    await step


async def test_a_batch_given_back_is_handed_out_at_once(steps: Callable[..., Steps], rows: list[Row]) -> None:
    served = steps()
    step = served.begin(rows)
    first = await served.batch("a")
    assert (await served.ask("get_batch", trainer="b", wait_seconds=0)).json() == {
        "state": "wait",
        "batch": None,
    }
    assert (await served.ask("release_batch", lease=first["lease"])).status_code == 200
    second = await served.batch("b")
    await served.ask("finish_batch", lease=second["lease"], skipped="enough")
    await step


def test_strangers_and_web_pages_are_refused(
    steps: Callable[..., Steps], monkeypatch: pytest.MonkeyPatch, model: Path, tmp_path: Path
) -> None:
    monkeypatch.setenv("BATCH_TOKEN", "secret")
    served = steps(token_env="BATCH_TOKEN")
    stranger = httpx.Client(base_url=served.trainer.url)
    for token in ({}, {"Authorization": "Bearer wrong"}):
        for path in ("/v1/status", "/v1/weights", "/v1/weights/config.json"):
            assert stranger.get(path, headers=token).status_code == 401
        assert stranger.post("/v1/get_batch", json={}, headers=token).status_code == 401
        assert stranger.put("/v1/uploads/x/y", content=b"1", headers=token).status_code == 401
    assert served.http.get("/v1/status").status_code == 200
    assert served.http.post("/v1/get_nothing", json={}).status_code == 404
    assert served.http.post("/v1/get_batch", json={"trainer": "x" * 3_000_000}).status_code == 413
    with pytest.raises(ConfigError, match="can be reached from other machines"):
        RemoteTrainer(str(model), ServeSettings(host="0.0.0.0", port=0), tmp_path / "open")
    monkeypatch.delenv("BATCH_TOKEN")
    with pytest.raises(ConfigError, match="the variable BATCH_TOKEN is not set"):
        RemoteTrainer(str(model), ServeSettings(token_env="BATCH_TOKEN", port=0), tmp_path / "unset")
    plain = RemoteTrainer(str(model), ServeSettings(port=0), tmp_path / "plain")
    page = {"Origin": "http://evil.example"}
    assert httpx.post(f"{plain.url}/v1/get_batch", json={}, headers=page).status_code == 403
    plain.close()


async def test_batches_come_as_messagepack_too_and_the_document_names_every_call(
    steps: Callable[..., Steps], rows: list[Row]
) -> None:
    import msgspec

    served = steps()
    step = served.begin(rows)
    kind = {"Accept": "application/msgpack", "Content-Type": "application/msgpack"}
    asked = msgspec.msgpack.encode({"trainer": "m"})
    reply = await asyncio.to_thread(served.http.post, "/v1/get_batch", content=asked, headers=kind)
    batch = msgspec.msgpack.decode(reply.content)["batch"]
    assert batch["rows"][0]["token_ids"] == list(rows[0].token_ids)
    await served.ask("finish_batch", lease=batch["lease"], skipped="enough")
    await step
    paths = served.http.get("/openapi.json").json()["paths"]
    assert {"/v1/get_batch", "/v1/finish_batch", "/v1/uploads/{lease}/{name}"} <= paths.keys()


async def test_waiting_trainers_hear_that_the_run_has_ended(steps: Callable[..., Steps]) -> None:
    served = steps()
    asking = asyncio.create_task(served.ask("get_batch"))
    await asyncio.sleep(0.05)
    await asyncio.to_thread(served.trainer.close)
    assert (await asking).json()["state"] == "done"


async def test_an_interrupted_step_ends_and_its_batch_is_offered_again(
    steps: Callable[..., Steps], rows: list[Row], model: Path, tmp_path: Path
) -> None:
    served = steps()
    step = served.begin(rows)
    batch = await served.batch("a")
    served.trainer.interrupt()
    with pytest.raises(RollwrightError, match="the run is ending"):
        await step
    served.close()
    again = steps()
    step = again.begin(rows)
    # The trainer was at work meanwhile: its lease holds in the new process, too.
    folder = str(saved(model, tmp_path / "new"))
    assert (await again.ask("finish_batch", lease=batch["lease"], folder=folder)).json() == {"version": 1}
    assert (await step).version == 1
    again.close()
    third = steps()
    assert third.trainer.step(rows).version == 1  # known from the ledger: offered to nobody
    assert (await third.ask("finish_batch", lease=batch["lease"], folder=folder)).json() == {"version": 1}


def test_a_torn_line_of_the_ledger_is_forgotten_and_a_damaged_one_is_named(tmp_path: Path) -> None:
    file = tmp_path / "served.jsonl"
    ledger = ServedLedger(file)
    ledger.append(HandOut(0, "one", "a"))
    ledger.append(Finish(0, "one", 1, "folder"))
    ledger.close()
    whole = file.read_bytes()
    file.write_bytes(whole + b'{"type": "finish", "step')
    again = ServedLedger(file)
    again.append(HandOut(1, "two", "b"))
    again.close()
    assert file.read_bytes().startswith(whole)
    assert sorted(ServedLedger(file).handed) == [0, 1]
    file.write_bytes(b"{}\n" + whole)
    with pytest.raises(FormatError, match="line 1"):
        ServedLedger(file)


@pytest.mark.parametrize(
    "change", ["training.processes=2", "training.critic={}", "training.hand_over=tensors"]
)
def test_what_only_a_trainer_in_this_process_could_do_is_refused(tiny: Any, model: Path, change: str) -> None:
    advantage = ["training.advantage=gae"] if "critic" in change else []
    config = tiny.configuration(model, "training.hand_over=auto", "training.serve={}", change, *advantage)
    with pytest.raises(ConfigError, match=r"^training\.(processes|critic|hand_over): "):
        check(config)


SERVE = """
import sys
from pathlib import Path
sys.path.insert(0, {tests!r})
import asyncio, tiny_training
model = Path({model!r})
config = tiny_training.configuration(
    model, "training.hand_over=auto", "training.serve.port=0", "training.serve.lease_seconds=3", max_steps=6
)
asyncio.run(tiny_training.train(Path({runs!r}), config, model))
"""


def start_run(tmp_path: Path, model: Path) -> "subprocess.Popen[bytes]":
    code = SERVE.format(tests=str(Path(__file__).parent), model=str(model), runs=str(tmp_path / "runs"))
    return subprocess.Popen([sys.executable, "-c", code], cwd=tmp_path)


def start_trainer(tmp_path: Path, url: str) -> "subprocess.Popen[bytes]":
    command = [sys.executable, str(EXAMPLE), url, str(tmp_path / "own"), "--learning-rate=0.003"]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, cwd=tmp_path)


def wait_until(true: Callable[[], Any], *running: "subprocess.Popen[bytes]") -> None:
    while not true():
        assert all(each.poll() is None for each in running), "it ended"
        time.sleep(0.05)


def finished(ledger: Path) -> list[int]:
    if not ledger.exists():
        return []
    lines = [json.loads(line) for line in ledger.read_text().splitlines(keepends=True) if line.endswith("\n")]
    return [line["step"] for line in lines if line["type"] == "finish"]


def test_run_and_trainer_are_killed_in_turn_and_every_batch_is_trained_once(
    tmp_path: Path, model: Path
) -> None:
    folder = tmp_path / "runs" / "tiny"
    ledger, address = folder / LEDGER, folder / ADDRESS
    run = start_run(tmp_path, model)
    wait_until(address.exists, run)
    trainer = start_trainer(tmp_path, address.read_text().strip())
    try:
        wait_until(lambda: len(finished(ledger)) >= 1, run, trainer)
        trainer.send_signal(signal.SIGKILL)
        trainer.wait()
        trainer = start_trainer(tmp_path, address.read_text().strip())
        wait_until(lambda: len(finished(ledger)) >= 3, run, trainer)
        run.send_signal(signal.SIGKILL)
        run.wait()
        trainer.kill()
        trainer.wait()
        address.unlink()
        run = start_run(tmp_path, model)
        wait_until(address.exists, run)
        trainer = start_trainer(tmp_path, address.read_text().strip())
        assert run.wait(timeout=200) == 0
        assert trainer.wait(timeout=60) == 0
    finally:
        for each in (run, trainer):
            if each.poll() is None:
                each.kill()
                each.wait()
    assert finished(ledger) == list(range(6))
    reader = RunReader(folder)
    groups = [group for row in reader.metrics() for group in row["groups"]]
    assert len(groups) == len(set(groups))


def test_a_served_run_is_resumed_at_its_own_address_or_at_another_one(
    tiny: Any, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from rollwright.cli import train as command

    given: list[list[str]] = []
    monkeypatch.setattr(command, "train", lambda config, changes, **more: given.append(changes))
    monkeypatch.delenv(command.BATCH_TOKEN, raising=False)
    command.serve_batches(resume=Path("runs/served"))
    command.serve_batches(resume=Path("runs/served"), port=9001)
    command.serve_batches(Path("run.yaml"), lease_seconds=5.0)
    resumed, moved, begun = given
    assert resumed == []
    before = tiny.configuration(model, "training.serve.port=9000", "training.serve.lease_seconds=20")
    for changes, port in ((resumed, 9000), (moved, 9001)):
        now = tiny.configuration(
            model, "training.serve.port=9000", "training.serve.lease_seconds=20", *changes
        )
        assert now.training.serve.port == port
        check_resumable(before, now)
    serve = tiny.configuration(model, "training.serve.port=9000", *begun).training.serve
    assert (serve.port, serve.lease_seconds) == (9000, 5.0)

"""What `auto` chooses: by what was measured on this machine, once, and with the figures on record."""

from pathlib import Path

import pytest

from rollwright import hardware
from rollwright.config import build
from rollwright.engines.settings import TorchPolicyConfig
from rollwright.errors import ConfigError
from rollwright.hardware import (
    Cores,
    MachineSpeed,
    choose_batch,
    choose_dtype,
    measured_speed,
    plan_threads,
    speed_on_file,
)


def speed(
    bfloat16: float | None = 0.1,
    threads: float = 1.9,
    load: float = 0.0,
    batches: dict[int, float] | None = None,
) -> MachineSpeed:
    rates = {"float32": 1.0} | ({} if bfloat16 is None else {"bfloat16": bfloat16})
    return MachineSpeed(rates, batches or {8: 0.5, 64: 0.95, 256: 1.0}, {1: 1.0, 2: threads}, load)


@pytest.mark.parametrize(
    ("rate", "chosen"), [(None, "float32"), (0.01, "float32"), (1.05, "float32"), (2.0, "bfloat16")]
)
def test_bfloat16_is_chosen_only_where_it_is_measurably_faster(rate: float | None, chosen: str) -> None:
    assert speed(bfloat16=rate).dtype == chosen


@pytest.mark.parametrize(
    ("gain", "load", "threads"), [(1.9, 0.0, 2), (1.05, 0.0, 1), (0.3, 0.0, 1), (1.9, 1.5, 1)]
)
def test_threads_that_do_not_help_or_that_others_have_the_cores_for_are_not_taken(
    gain: float, load: float, threads: int
) -> None:
    found = speed(threads=gain, load=load)
    assert found.threads == threads
    assert plan_threads("auto", {}, Cores(2, ""), found).threads == threads
    assert plan_threads("auto", {"OMP_NUM_THREADS": "2"}, Cores(2, ""), found).threads == 2, (
        "the user decides"
    )
    assert plan_threads("auto", {"ROLLWRIGHT_WORKERS": "2"}, Cores(2, ""), found).threads == 1
    assert plan_threads(2, {}, Cores(2, ""), found).threads == 2


def test_the_smallest_batch_at_nearly_full_speed_is_chosen() -> None:
    assert speed().batch == 64
    assert speed(batches={8: 1.0, 64: 0.95, 256: 0.9}).batch == 8
    assert choose_batch(17) == 17


def test_a_machine_is_measured_once_and_again_if_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ROLLWRIGHT_CACHE", str(tmp_path))
    monkeypatch.setattr(hardware, "MEASURED_SECONDS", 0.001)
    assert speed_on_file() is None
    first = measured_speed()
    assert first.rates["float32"] > 0
    assert set(first.batches) == {8, 16, 32, 64, 128, 256}
    assert first == measured_speed() == speed_on_file()
    (file,) = tmp_path.iterdir()
    file.write_text("half a fi", encoding="utf-8")
    assert speed_on_file() is None
    assert measured_speed(again=True).rates["float32"] > 0


def test_a_machine_without_torch_is_told_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROLLWRIGHT_CACHE", str(tmp_path))
    monkeypatch.setattr(hardware, "_MEASURE", "raise ImportError")
    with pytest.raises(ConfigError, match="torch does not run; install"):
        choose_batch("auto")


def test_settings_accept_auto_and_a_data_type_that_kills_its_process_is_not_chosen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ROLLWRIGHT_CACHE", str(tmp_path))
    monkeypatch.setenv("CPU_ONLY", "1")
    monkeypatch.setattr(hardware, "MEASURED_SECONDS", 0.001)
    illegal = "import os, signal, sys\nif 'bfloat16' in sys.argv[3]: os.kill(os.getpid(), signal.SIGILL)\n"
    monkeypatch.setattr(hardware, "_MEASURE", illegal + hardware._MEASURE)
    config = build({"policy": {"kind": "torch", "model": "x", "dtype": "auto", "max_batch": "auto"}})
    assert isinstance(config.policy, TorchPolicyConfig)
    assert choose_dtype(config.policy.dtype) == "float32"
    assert choose_batch(config.policy.max_batch) in (8, 16, 32, 64, 128, 256)

"""Options of the command line that stand for bindings of the configuration."""

from __future__ import annotations

from pathlib import Path

import pytest

from pdjax.config import Config
from pdjax.launch import __main__ as launch
from pdjax.launch import instance


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[Config]:
    """The configurations of the instances that were started; none is."""
    found: list[Config] = []
    monkeypatch.setattr(launch, "_under_mpi", lambda processes, arguments: 0)
    monkeypatch.setattr(instance, "run_and_exit", lambda role, config: found.append(config) or 0)
    return found


def test_options_of_their_own_name_bindings_and_gin_has_the_last_word(started: list[Config], tmp_path: Path):
    file = tmp_path / "some.gin"
    file.write_text("Instance.processes = 3\nTransfer.backend = 'nixl'\n")
    devices = '{"0": "mlx5_0", "1": ["mlx5_1", "mlx5_2"]}'
    options = ["--nproc", "2", "--devices-per-process", "4", "--transfer-backend", "jax", "--ib-device", devices]
    options += ["--attention-backend", "plain", "--gin.Instance.devices_per_process=5"]
    assert launch.main(["decode", "--config", str(file), *options]) == 0
    assert launch.main(["decode", "--config", str(file)]) == 0
    config, plain = started
    assert (config.instance.processes, config.instance.devices_per_process) == (2, 5)
    assert (config.transfer.backend, config.transfer.ib_device) == ("jax", devices)
    assert config.engine.attention_backend == "plain"
    assert (plain.instance.processes, plain.transfer.backend, plain.engine.attention_backend) == (3, "nixl", "auto")

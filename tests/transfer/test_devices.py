from __future__ import annotations

from pathlib import Path

import pytest

from pdjax.transfer.backend import TransferError
from pdjax.transfer.devices import devices_for
from pdjax.transfer.ucx import devices
from pdjax.transfer.ucx.devices import Resource

MACHINE = [
    Resource("self", "memory"),
    Resource("posix", "memory"),
    Resource("cma", "memory"),
    Resource("tcp", "eth0"),
    Resource("tcp", "lo"),
    Resource("rc_mlx5", "mlx5_0:1"),
    Resource("dc_mlx5", "mlx5_0:1"),
    Resource("rc_mlx5", "mlx5_1:1"),
]


def test_a_name_a_list_a_map_and_its_file_are_all_understood(tmp_path: Path) -> None:
    file = tmp_path / "nics.json"
    file.write_text('{"0": "mlx5_0,mlx5_1", "1": ["mlx5_2"]}')
    assert devices_for("", 0) == ()
    assert devices_for("mlx5_0", 3) == ("mlx5_0",)
    assert devices_for("mlx5_0, mlx5_1", 3) == ("mlx5_0", "mlx5_1")
    assert devices_for('{"0": "mlx5_0", "1": "mlx5_1"}', 1) == ("mlx5_1",)
    assert devices_for(str(file), 0) == ("mlx5_0", "mlx5_1")
    assert devices_for(str(file), 1) == ("mlx5_2",)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ('{"0": "mlx5_0"}', "no entry for rank 1; it has 0"),
        ("{0: mlx5_0}", "expected a name, a list"),
        ("mlx5_0,,mlx5_1", "an empty name"),
        ("/nowhere/nics.json", "cannot be read"),
    ],
)
def test_what_is_none_of_them_is_refused_in_words(text: str, sentence: str) -> None:
    with pytest.raises(TransferError, match=sentence):
        devices_for(text, 1)


def test_a_device_is_known_with_and_without_its_port() -> None:
    assert devices.choose(("mlx5_0", "mlx5_1:1"), MACHINE) == ["mlx5_0:1", "mlx5_1:1"]
    assert devices.choose((), MACHINE) == []


def test_a_wrong_device_is_refused_with_the_right_ones() -> None:
    with pytest.raises(TransferError, match=r"no network device 'eth1'; did you mean 'eth0'\? It sees: eth0 \(tcp\)"):
        devices.choose(("eth1",), MACHINE)


def test_only_transports_of_the_chosen_devices_are_used() -> None:
    assert devices.transports(MACHINE, [], gpu=False) == "posix,tcp,rc_mlx5,dc_mlx5"
    assert devices.transports(MACHINE, ["eth0"], gpu=False) == "posix,tcp"
    assert devices.transports(MACHINE, ["mlx5_1:1"], gpu=False) == "posix,rc_mlx5"


def test_gpus_are_reached_by_cuda_transports_and_a_network_that_is_not_tcp() -> None:
    with_cuda = [*MACHINE, Resource("cuda_copy", "cuda"), Resource("gdr_copy", "cuda")]
    assert devices.transports(with_cuda, ["mlx5_1:1"], gpu=True) == "posix,rc_mlx5,cuda_copy,gdr_copy"
    assert devices.problem_with_gpus(with_cuda, [], over_tcp=False) is None
    assert "no cuda transports" in str(devices.problem_with_gpus(MACHINE, [], over_tcp=True))
    assert "no network here" in str(devices.problem_with_gpus(with_cuda, ["eth0"], over_tcp=False))
    assert devices.problem_with_gpus(with_cuda, ["eth0"], over_tcp=True) is None

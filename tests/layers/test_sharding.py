from __future__ import annotations

import jax.numpy as jnp
import pytest
from flax import nnx
from jax.sharding import AbstractMesh, AxisType, PartitionSpec

from pdjax.layers.sharding import (
    POOL_AXES,
    instance_mesh,
    param_shardings,
    parameter,
    partition_spec,
    spec_of,
    stage_meshes,
    tensor_mesh,
)
from pdjax.models.llama import Llama
from pdjax.models.random import tiny_config


def mesh(tp: int) -> AbstractMesh:
    return AbstractMesh((tp,), ("tp",), axis_types=(AxisType.Auto,))


def test_every_large_parameter_is_cut_and_norms_are_whole():
    module = nnx.eval_shape(lambda: Llama(tiny_config(model_type="qwen2", attention_bias=True), jnp.float32))
    specs = {name: sharding.spec for name, sharding in param_shardings(module, tensor_mesh()).items()}
    assert specs["layers.0.attention.qkv.weight"] == PartitionSpec("tp", None, None, None)
    assert specs["layers.0.attention.qkv.bias"] == PartitionSpec("tp", None, None)
    assert specs["layers.0.attention.out.weight"] == PartitionSpec(None, "tp")
    assert specs["layers.0.mlp.gate_up.weight"] == PartitionSpec("tp", None, None)
    assert {name for name, spec in specs.items() if "tp" not in spec} == {
        name for name in specs if name.endswith("norm.weight")
    }


def test_heads_that_tp_does_not_divide_are_refused_with_both_numbers():
    with pytest.raises(ValueError, match="qkv: tp=2 does not divide its 3 kv_heads"):
        partition_spec("qkv", (3, 8), ("kv_heads", None), mesh(2))


def test_beyond_the_number_of_heads_each_head_is_on_several_devices_and_the_rest_is_cut_further():
    devices = instance_mesh(range(8), kv_heads=4)  # type: ignore[arg-type]
    assert dict(devices.shape) == {"tp": 4, "copy": 2}
    assert partition_spec("qkv", (4, 8), ("kv_heads", None), devices) == PartitionSpec("tp", None)
    assert partition_spec("mlp", (16, 8), ("mlp", None), devices) == PartitionSpec(("tp", "copy"), None)
    with pytest.raises(ValueError, match="mlp: tp=8 does not divide its 12 mlp"):
        partition_spec("mlp", (12, 8), ("mlp", None), devices)


@pytest.mark.parametrize("devices", [1, 2, 4, 6])
def test_up_to_the_number_of_heads_and_beside_its_multiples_a_mesh_has_one_axis(devices: int):
    assert instance_mesh(range(devices), kv_heads=4).axis_names == ("tp",)


def test_a_vocabulary_that_tp_does_not_divide_stays_whole():
    assert partition_spec("embed", (49153, 8), ("vocab", None), mesh(2)) == PartitionSpec(None, None)


def test_a_parameter_without_an_axis_for_each_dimension_is_refused():
    with pytest.raises(ValueError, match="needs 2 logical axes"):
        parameter((2, 3), ("mlp",), jnp.dtype("float32"), None)


def test_dp_ranks_are_groups_of_neighbours_that_share_mlp_and_vocabulary():
    devices = instance_mesh(range(8), kv_heads=2, dp=2)  # type: ignore[arg-type]
    assert dict(devices.shape) == {"dp": 2, "tp": 2, "copy": 2}
    assert devices.devices[1].ravel().tolist() == [4, 5, 6, 7]
    assert partition_spec("qkv", (2, 8), ("kv_heads", None), devices) == PartitionSpec("tp", None)
    assert partition_spec("mlp", (16, 8), ("mlp", None), devices) == PartitionSpec(("dp", "tp", "copy"), None)
    with pytest.raises(ValueError, match="mlp: dp x tp=8 does not divide its 12 mlp"):
        partition_spec("mlp", (12, 8), ("mlp", None), devices)
    with pytest.raises(ValueError, match="pp x dp x cp is 1 x 3 x 1, which does not divide 8 devices"):
        instance_mesh(range(8), kv_heads=2, dp=3)  # type: ignore[arg-type]


def test_pipeline_stages_are_the_outermost_groups_and_share_the_vocabulary():
    devices = instance_mesh(range(8), kv_heads=2, pp=2, dp=2)  # type: ignore[arg-type]
    assert dict(devices.shape) == {"pp": 2, "dp": 2, "tp": 2}
    stages = stage_meshes(devices)
    assert [stage.devices.ravel().tolist() for stage in stages] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert all(dict(stage.shape) == {"dp": 2, "tp": 2} for stage in stages)
    assert spec_of((4, 9, 2, 2, 4, 16), POOL_AXES, devices)[0] == "pp"
    assert partition_spec("embed", (16, 8), ("vocab", None), devices) == PartitionSpec(("pp", "dp", "tp"), None)
    assert stage_meshes(stages[0]) == stages[:1]

"""How parameters lie on a mesh: one table from logical axes to mesh axes, and parameters that carry logical axes."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

LogicalAxes = tuple[str | None, ...]

# Logical axis -> mesh axes. An axis that is not named here is whole on every device. A mesh has the axis copy only
# where there are more devices than key-value heads: each head is then on so many of them.
RULES: dict[str, tuple[str, ...]] = {
    "kv_heads": ("tp",),  # a key-value head with the query heads that read it
    "heads": ("tp",),  # query heads times head_dim, in the order of kv_heads
    "mlp": ("tp", "copy"),
    "vocab": ("tp", "copy"),
}

# Axes that stay whole where the mesh does not divide them: a vocabulary may have any size.
MAY_STAY_WHOLE = frozenset({"vocab"})

TENSOR_AXIS = "tp"
COPY_AXIS = "copy"
NORMAL = jax.nn.initializers.normal(0.02)


def tensor_mesh(devices: Sequence[Any] | None = None) -> Mesh:
    """A mesh with the one axis tp over `jax.Device` objects (default: all of the program). Its axes are Auto."""
    found = np.array(jax.devices() if devices is None else devices)
    return Mesh(found, (TENSOR_AXIS,), axis_types=(AxisType.Auto,))


def mesh_for_heads(devices: Sequence[Any], kv_heads: int) -> Mesh:
    """A mesh over all of `devices`, with an axis copy behind tp if they are a multiple of the key-value heads."""
    count = len(devices)
    if count <= kv_heads or count % kv_heads:
        return tensor_mesh(devices)
    found = np.array(devices).reshape(kv_heads, count // kv_heads)
    return Mesh(found, (TENSOR_AXIS, COPY_AXIS), axis_types=(AxisType.Auto, AxisType.Auto))


def parameter(
    shape: tuple[int, ...],
    axes: LogicalAxes,
    dtype: jnp.dtype,
    rngs: nnx.Rngs | None,
    initializer: Callable[..., jax.Array] = NORMAL,
) -> nnx.Param[jax.Array]:
    """A parameter that carries its logical axes; zeros without `rngs`, for modules that are loaded or only traced."""
    if len(shape) != len(axes):
        raise ValueError(f"a parameter of shape {shape} needs {len(shape)} logical axes, got {axes}")
    value = jnp.zeros(shape, dtype) if rngs is None else initializer(rngs.params(), shape, dtype)
    return nnx.Param(value, axes=axes)


def partition_spec(name: str, shape: tuple[int, ...], axes: LogicalAxes, mesh: Mesh | AbstractMesh) -> PartitionSpec:
    """Where the axes of one parameter go on `mesh`.

    Raises:
        ValueError: the mesh has an axis tp that does not divide what it must cut.
    """
    parts: list[str | tuple[str, ...] | None] = []
    for size, axis in zip(shape, axes, strict=True):
        mesh_axes = tuple(name for name in RULES.get(axis or "", ()) if name in mesh.shape)
        devices = math.prod(mesh.shape[name] for name in mesh_axes)
        if not mesh_axes:
            parts.append(None)
        elif size % devices == 0:
            parts.append(mesh_axes if len(mesh_axes) > 1 else TENSOR_AXIS)
        elif axis in MAY_STAY_WHOLE:
            parts.append(None)
        else:
            raise ValueError(f"parameter {name}: tp={devices} does not divide its {size} {axis}; choose a tp that does")
    return PartitionSpec(*parts)


def named_parameters(state: Any) -> dict[str, nnx.Variable]:
    """The variables of an nnx state by dotted path (``layers.0.mlp.down.weight``), in the order of its leaves."""
    return {".".join(map(str, path)): variable for path, variable in nnx.to_flat_state(state)}


def param_shardings(state: Any, mesh: Mesh) -> dict[str, NamedSharding]:
    """The sharding of every parameter of an nnx module or (abstract) state, by dotted path.

    Raises:
        ValueError: see `partition_spec`.
    """
    if isinstance(state, nnx.Module):
        state = nnx.state(state)
    return {
        name: NamedSharding(mesh, partition_spec(name, variable.shape, variable.get_metadata("axes"), mesh))
        for name, variable in named_parameters(state).items()
    }

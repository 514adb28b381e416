"""How parameters lie on a mesh: one table from logical axes to mesh axes, and parameters that carry logical axes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

LogicalAxes = tuple[str | None, ...]

# Logical axis -> mesh axis. An axis that is not named here is whole on every device.
RULES: dict[str, str] = {
    "kv_heads": "tp",  # a key-value head with the query heads that read it
    "heads": "tp",  # query heads times head_dim, in the order of kv_heads
    "mlp": "tp",
    "vocab": "tp",
}

# Axes that stay whole where the mesh does not divide them: a vocabulary may have any size.
MAY_STAY_WHOLE = frozenset({"vocab"})

TENSOR_AXIS = "tp"
NORMAL = jax.nn.initializers.normal(0.02)


def tensor_mesh(devices: Sequence[Any] | None = None) -> Mesh:
    """A mesh with the one axis tp over `jax.Device` objects (default: all of the program). Its axes are Auto."""
    found = np.array(jax.devices() if devices is None else devices)
    return Mesh(found, (TENSOR_AXIS,), axis_types=(AxisType.Auto,))


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
    parts: list[str | None] = []
    for size, axis in zip(shape, axes, strict=True):
        mesh_axis = RULES.get(axis) if axis else None
        if mesh_axis is None or mesh_axis not in mesh.shape:
            parts.append(None)
        elif size % mesh.shape[mesh_axis] == 0:
            parts.append(mesh_axis)
        elif axis in MAY_STAY_WHOLE:
            parts.append(None)
        else:
            raise ValueError(
                f"parameter {name}: {mesh_axis}={mesh.shape[mesh_axis]} does not divide its {size} {axis}; "
                f"choose a {mesh_axis} that does"
            )
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

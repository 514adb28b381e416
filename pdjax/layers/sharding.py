"""How arrays lie on a mesh: one table from logical axes to mesh axes, and parameters that carry logical axes.

| mesh axis | cuts                                                                                               |
| --------- | -------------------------------------------------------------------------------------------------- |
| `pp`      | layers: each stage has those layers' weights and their part of the pool; the vocabulary            |
| `dp`      | requests: each rank has pages and decode rows of its own; MLP and vocabulary are cut over it too   |
| `cp`      | the slots of each page, so that the pages of a request lie on its parts in turn; a prompt's tokens |
| `tp`      | heads, MLP and vocabulary                                                                          |
| `copy`    | MLP and vocabulary; in a mesh only where there are more devices than key-value heads, each of which |
|           | is then on so many of them                                                                         |
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

LogicalAxes = tuple[str | None, ...]

# Logical axis -> mesh axes, of which a mesh may lack some. An axis that is not named here is whole on every device.
RULES: dict[str, tuple[str, ...]] = {
    "layers": ("pp",),  # of a pool, or stages of a stacked weight
    "rows": ("dp",),  # the requests of a decode step
    "tokens": ("cp",),  # of a prefill step
    "pages": ("dp",),  # of a pool
    "slots": ("cp",),  # of a page
    "kv_heads": ("tp",),  # a key-value head with the query heads that read it
    "heads": ("tp",),  # query heads times head_dim, in the order of kv_heads
    "mlp": ("dp", "tp", "copy"),
    "vocab": ("pp", "dp", "tp", "copy"),
}

# Of a pool [layer, page, head, K|V, slot in page, head_dim].
POOL_AXES: LogicalAxes = ("layers", "pages", "kv_heads", None, "slots", None)

# Axes that stay whole where the mesh does not divide them: a vocabulary may have any size.
MAY_STAY_WHOLE = frozenset({"vocab"})

PIPELINE_AXIS = "pp"
DATA_AXIS = "dp"
CONTEXT_AXIS = "cp"
TENSOR_AXIS = "tp"
COPY_AXIS = "copy"
NORMAL = jax.nn.initializers.normal(0.02)


def tensor_mesh(devices: Sequence[Any] | None = None) -> Mesh:
    """A mesh with the one axis tp over `jax.Device` objects (default: all of the program). Its axes are Auto."""
    return _mesh(jax.devices() if devices is None else devices, {TENSOR_AXIS: -1})


def instance_mesh(devices: Sequence[Any], kv_heads: int, *, pp: int = 1, dp: int = 1, cp: int = 1) -> Mesh:
    """A mesh over all of `devices`: pp groups of dp groups of cp groups of as many devices, tp innermost.

    Axes of size 1 are left out, but for tp. Where a group has a multiple of the key-value heads, an axis copy stands
    behind tp.

    Raises:
        ValueError: the devices cannot be grouped so.
    """
    group, rest = divmod(len(devices), pp * dp * cp)
    if rest:
        raise ValueError(f"pp x dp x cp is {pp} x {dp} x {cp}, which does not divide {len(devices)} devices")
    tensor = {TENSOR_AXIS: group}
    if group > kv_heads and group % kv_heads == 0:
        tensor = {TENSOR_AXIS: kv_heads, COPY_AXIS: group // kv_heads}
    outer = {PIPELINE_AXIS: pp, DATA_AXIS: dp, CONTEXT_AXIS: cp}
    return _mesh(devices, {name: size for name, size in outer.items() if size > 1} | tensor)


def stage_meshes(mesh: Mesh) -> list[Mesh]:
    """The part of a mesh that each pp stage has; of a mesh without stages, itself."""
    if PIPELINE_AXIS not in mesh.shape:
        return [mesh]
    return [_mesh(stage.ravel(), {name: mesh.shape[name] for name in mesh.axis_names[1:]}) for stage in mesh.devices]


def _mesh(devices: Sequence[Any], sizes: dict[str, int]) -> Mesh:
    found = np.array(devices).reshape(tuple(sizes.values()))
    return Mesh(found, tuple(sizes), axis_types=(AxisType.Auto,) * len(sizes))


def spec_of(shape: Sequence[int], axes: LogicalAxes, mesh: Mesh | AbstractMesh) -> PartitionSpec:
    """Where logical axes go on `mesh`; an axis whose size the mesh does not divide stays whole."""
    parts: list[str | tuple[str, ...] | None] = []
    for size, axis in zip(shape, axes, strict=True):
        names = _mesh_axes(axis, mesh)
        cut = bool(names) and size % math.prod(mesh.shape[name] for name in names) == 0
        parts.append(None if not cut else names[0] if len(names) == 1 else names)
    return PartitionSpec(*parts)


def constrain(x: jax.Array, *axes: str | None) -> jax.Array:
    """Traced: have x lie so on the mesh of the context (`jax.sharding.use_abstract_mesh`), if there is one."""
    mesh = jax.sharding.get_abstract_mesh()
    return x if mesh.empty else lax.with_sharding_constraint(x, spec_of(x.shape, axes, mesh))


def _mesh_axes(axis: str | None, mesh: Mesh | AbstractMesh) -> tuple[str, ...]:
    """Those that are for the compiler to cut: inside of a `jax.shard_map` over pp that axis is none of them."""
    manual = mesh.manual_axes if isinstance(mesh, AbstractMesh) else ()
    return tuple(name for name in RULES.get(axis or "", ()) if name in mesh.shape and name not in manual)


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
        ValueError: the mesh does not divide what it must cut.
    """
    spec = spec_of(shape, axes, mesh)
    for size, axis, part in zip(shape, axes, spec, strict=True):
        names = _mesh_axes(axis, mesh)
        if names and part is None and axis not in MAY_STAY_WHOLE:
            devices = math.prod(mesh.shape[name] for name in names)
            cuts = " x ".join(name for name in names if name != COPY_AXIS)
            raise ValueError(f"parameter {name}: {cuts}={devices} does not divide its {size} {axis}; choose what does")
    return spec


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
    return {name: param_sharding(name, variable, mesh) for name, variable in named_parameters(state).items()}


def param_sharding(name: str, variable: nnx.Variable, mesh: Mesh) -> NamedSharding:
    """The sharding of one parameter. Raises ValueError: see `partition_spec`."""
    return NamedSharding(mesh, partition_spec(name, variable.shape, variable.get_metadata("axes"), mesh))

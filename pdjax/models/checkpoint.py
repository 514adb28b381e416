"""Loads a model folder onto a mesh, in the form that compiled steps take: flat leaves."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh, NamedSharding

from pdjax.layers.sharding import named_parameters, param_sharding, spec_of, stage_meshes
from pdjax.models import weights
from pdjax.models.config import ModelConfig
from pdjax.models.errors import ModelError
from pdjax.models.folder import WEIGHTS, FolderRecord, check_weight_files, model_identity, read_config, read_record
from pdjax.models.leaves import Place, stack_alike
from pdjax.models.llama import Llama
from pdjax.models.registry import model_class

__all__ = ["DTYPES", "LoadedModel", "load_model", "model_identity"]

DTYPES = ("float32", "bfloat16")


@dataclass(frozen=True, eq=False)
class LoadedModel:
    """Weights on devices, and how to make the module of them inside a trace.

    On a mesh with pipeline stages the module has as many layers as one stage, and a leaf of theirs is [stage, ...].

    `leaves` are what a compiled step takes: passing them flat costs 0.2 ms a call, passing the module 9 ms. See
    `pdjax.models.leaves`.
    """

    config: ModelConfig
    leaves: list[jax.Array]
    places: list[Place]  # of the parameters, in the module's order
    graphdef: nnx.GraphDef[Llama]
    treedef: Any

    def merge(self, leaves: list[jax.Array]) -> Llama:
        """The module around `leaves` (arrays or tracers, in the order of `self.leaves`)."""
        parameters = [place.of(leaves) for place in self.places]
        return nnx.merge(self.graphdef, jax.tree.unflatten(self.treedef, parameters))


def load_model(folder: Path, *, dtype: str, mesh: Mesh) -> LoadedModel:
    """Load a model folder, each parameter straight into its shards on `mesh` (see `pdjax.layers.sharding`).

    Args:
        folder: made by ``convert`` or ``fetch``.
        dtype: float32 or bfloat16; weights stored otherwise are cast as they are read. Norms stay float32.
        mesh: with an axis tp, or without (whole copies).

    Raises:
        ModelError: the folder is not a whole model of a known kind, or the mesh does not fit it.
    """
    if dtype not in DTYPES:
        raise ModelError(f"dtype is one of {', '.join(DTYPES)}, not {dtype!r}")
    folder = Path(folder)
    record, config = read_record(folder), read_config(folder)
    kind, stages = model_class(config.model_type), stage_meshes(mesh)
    layers, rest = divmod(config.num_layers, len(stages))
    if rest:
        raise ModelError(
            f"{folder} does not fit the mesh: pp={len(stages)} does not divide its {config.num_layers} layers; choose "
            f"what does"
        )
    stage_config = dataclasses.replace(config, num_layers=layers)
    graphdef, state = nnx.split(nnx.eval_shape(lambda: kind(stage_config, jnp.dtype(dtype))))
    named = named_parameters(state)
    stored = {name: _stored(name, mesh, stages, layers) for name in named}
    _check_record(folder, record, {part: named[name].shape for name, parts in stored.items() for part in parts})
    try:
        wanted = {
            part: jax.ShapeDtypeStruct(variable.shape, variable.dtype, sharding=param_sharding(part, variable, place))
            for name, variable in named.items()
            for part, place in stored[name].items()
            if place.local_devices
        }
    except ValueError as error:
        raise ModelError(f"{folder} does not fit the mesh: {error}") from error
    check_weight_files(folder, record)
    arrays = weights.load(folder / WEIGHTS, wanted)
    leaves, places = stack_alike(
        {
            # What is loaded is let go of leaf by leaf: a device has no room for two copies of its stage.
            name: _leaf(
                variable, [arrays.pop(part) for part in stored[name] if part in arrays], mesh, len(stored[name])
            )
            for name, variable in named.items()
        }
    )
    return LoadedModel(
        config=config,
        leaves=leaves,
        places=places,
        graphdef=graphdef,
        treedef=jax.tree.structure(state),
    )


def _stored(name: str, mesh: Mesh, stages: list[Mesh], layers: int) -> dict[str, Mesh]:
    """What a folder has for one parameter of a stage with so many layers: by name, the mesh that it is loaded onto."""
    head, _, rest = name.partition(".")
    if head != "layers" or len(stages) == 1:
        return {name: mesh}
    index, _, rest = rest.partition(".")
    return {f"layers.{number * layers + int(index)}.{rest}": stage for number, stage in enumerate(stages)}


def _leaf(variable: nnx.Variable, loaded: list[jax.Array], mesh: Mesh, stages: int) -> jax.Array:
    """The loaded array, or of several stages [stage, ...], made of what has been loaded here."""
    if stages == 1:
        return loaded[0]
    shape, axes = (stages, *variable.shape), ("layers", *variable.get_metadata("axes"))
    shards = [shard.data[None] for array in loaded for shard in array.addressable_shards]
    return jax.make_array_from_single_device_arrays(shape, NamedSharding(mesh, spec_of(shape, axes, mesh)), shards)


def _check_record(folder: Path, record: FolderRecord, shapes: dict[str, tuple[int, ...]]) -> None:
    for name, shape in shapes.items():
        stored = record.parameters.get(name)
        if stored is None:
            raise ModelError(f"{folder} has no parameter {name}, which its config.json asks for; convert it again")
        if tuple(stored.shape) != tuple(shape):
            raise ModelError(
                f"{folder}: parameter {name} is stored as {tuple(stored.shape)}, its config.json asks for "
                f"{tuple(shape)}; convert it again"
            )
    unexpected = sorted(set(record.parameters) - set(shapes))
    if unexpected:
        raise ModelError(f"{folder} has parameters that its config.json does not ask for: {unexpected[:5]}")

"""From the sizes that a configuration asks for to a mesh over the devices that there are."""

from __future__ import annotations

import jax
from jax.sharding import Mesh

from pdjax.config import ConfigError, Instance
from pdjax.layers.sharding import CONTEXT_AXIS, COPY_AXIS, DATA_AXIS, PIPELINE_AXIS, TENSOR_AXIS, instance_mesh
from pdjax.transfer.layout.ranks import Layout


def emulated_devices(instance: Instance, processes: int) -> int:
    """CPU devices that each process must have; 0: what JAX has of itself is enough."""
    wanted = -(-instance.groups * max(1, instance.tp) // processes)
    count = max(instance.devices_per_process, wanted)
    return count if count > 1 else 0


def layout_of(mesh: Mesh) -> Layout:
    """How the devices of an instance's mesh, in its order, share a state: to transfers each is a rank."""
    size = mesh.shape.get
    return Layout(
        tp=size(TENSOR_AXIS, 1) * size(COPY_AXIS, 1),
        dp=size(DATA_AXIS, 1),
        cp=size(CONTEXT_AXIS, 1),
        pp=size(PIPELINE_AXIS, 1),
    )


def make_mesh(instance: Instance, kv_heads: int) -> Mesh:
    """The mesh of an instance; see `pdjax.layers.sharding.instance_mesh`. Several processes take part with all devices.

    Raises:
        ConfigError: there are too few devices, or some processes would have none.
    """
    found, processes = jax.device_count(), jax.process_count()
    tp = instance.tp or (1 if processes == 1 else max(1, found // instance.groups))
    needed = instance.groups * tp
    sizes = {"pp": instance.pp, "dp": instance.dp, "cp": instance.cp, "tp": tp}
    asked = {name: size for name, size in sizes.items() if size > 1 or name == "tp"}
    shape = f"Instance.{' x '.join(asked)} is {' x '.join(map(str, asked.values()))}"
    if processes == 1 and needed > found:
        raise ConfigError(f"{shape} and there are {found} devices: lower it, or raise Instance.devices_per_process")
    if processes > 1 and needed != found:
        raise ConfigError(
            f"{shape}, and the {processes} processes have {found} devices, which all must take part: set "
            f"{'it' if instance.groups == 1 else 'tp'} to {found // instance.groups or 1} or 0"
        )
    return instance_mesh(jax.devices()[:needed], kv_heads, pp=instance.pp, dp=instance.dp, cp=instance.cp)

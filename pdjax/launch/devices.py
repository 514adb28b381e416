"""From the sizes that a configuration asks for to a mesh over the devices that there are."""

from __future__ import annotations

import jax
from jax.sharding import Mesh

from pdjax.config import ConfigError, Instance
from pdjax.layers.sharding import instance_mesh


def emulated_devices(instance: Instance, processes: int) -> int:
    """CPU devices that each process must have; 0: what JAX has of itself is enough."""
    wanted = -(-instance.groups * max(1, instance.tp) // processes)
    count = max(instance.devices_per_process, wanted)
    return count if count > 1 else 0


def make_mesh(instance: Instance, kv_heads: int) -> Mesh:
    """The mesh of an instance; see `pdjax.layers.sharding.instance_mesh`. Several processes take part with all devices.

    Raises:
        ConfigError: there are too few devices, or some processes would have none.
    """
    found, processes = jax.device_count(), jax.process_count()
    tp = instance.tp or (1 if processes == 1 else max(1, found // instance.groups))
    needed = instance.groups * tp
    shape = f"Instance.tp is {tp}" if instance.groups == 1 else f"Instance.dp x tp is {instance.dp} x {tp}"
    if processes == 1 and needed > found:
        raise ConfigError(f"{shape} and there are {found} devices: lower it, or raise Instance.devices_per_process")
    if processes > 1 and needed != found:
        raise ConfigError(
            f"{shape}, and the {processes} processes have {found} devices, which all must take part: set "
            f"{'it' if instance.groups == 1 else 'tp'} to {found // instance.groups or 1} or 0"
        )
    return instance_mesh(jax.devices()[:needed], kv_heads, dp=instance.dp)

"""What the configuration says about peers: the backend that moves bytes to them, and the secret shared with them."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from pdjax.config import Config, ConfigError
from pdjax.net import mpi
from pdjax.transfer.backend import BackendOptions, TransferBackend
from pdjax.transfer.device_proof import problem_with_device_memory
from pdjax.transfer.devices import devices_for
from pdjax.transfer.registry import create
from pdjax.transfer.slot_memory import Device, shares_memory


def start_backend(
    config: Config, post: Callable[[object], None], devices: Sequence[Device]
) -> tuple[TransferBackend, str]:
    """The backend that the configuration names, for this rank.

    Args:
        devices: of this process.

    Returns:
        It, and a line about what moves the bytes and where slots are.

    Raises:
        TransferError: it cannot start.
    """
    rank = mpi.load().COMM_WORLD.Get_rank()
    options = BackendOptions(
        mapped=config.transfer.mapped,
        devices=devices_for(config.transfer.ib_device, rank),
        host=config.transfer.host,
        transports=config.transfer.ucx_transports,
    )
    where = ""
    device = devices[0]
    if not shares_memory(device):
        how = config.transfer.device_memory
        problem = "Transfer.device_memory is never"
        if how != "never":
            options = replace(options, gpu=device.local_hardware_id, gpu_over_tcp=how == "always")
            problem = problem_with_device_memory(
                devices, lambda on_event: create(config.transfer.backend, on_event, options)
            )
        where = f"; slots are in the {device.platform}'s memory"
        if problem is not None:
            options = replace(options, gpu=None)
            where = f"; slots are copied between the {device.platform}'s memory and the host's: {problem}"
    backend = create(config.transfer.backend, post, options)
    return backend, backend.summary + where


def read_secret(config: Config) -> bytes | None:
    """The secret that leaders share, from the file or `$PDJAX_SECRET`; None when neither is set.

    Raises:
        ConfigError: the file cannot be read, or is empty.
    """
    file = config.disagg.secret_file
    if not file:
        secret = os.environ.get("PDJAX_SECRET")
        return secret.encode() if secret else None
    try:
        secret = Path(file).read_bytes().strip()
    except OSError as error:
        raise ConfigError(f"Disagg.secret_file: {file} cannot be read: {error.strerror}") from error
    if not secret:
        raise ConfigError(f"Disagg.secret_file: {file} is empty: anybody would know this secret")
    return secret

"""What the configuration says about peers: the backend that moves bytes to them, and the secret shared with them."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from pdjax.config import Config, ConfigError
from pdjax.net import mpi
from pdjax.transfer.backend import BackendOptions, TransferBackend
from pdjax.transfer.devices import devices_for
from pdjax.transfer.registry import create


def start_backend(config: Config, post: Callable[[object], None]) -> TransferBackend:
    """The backend that the configuration names, for this rank. Raises `TransferError`."""
    rank = mpi.load().COMM_WORLD.Get_rank()
    options = BackendOptions(
        mapped=config.transfer.mapped,
        devices=devices_for(config.transfer.ib_device, rank),
        host=config.transfer.host,
        transports=config.transfer.ucx_transports,
    )
    return create(config.transfer.backend, post, options)


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

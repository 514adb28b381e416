"""How each process of an instance comes to know the others."""

from __future__ import annotations

import dataclasses
import faulthandler
import importlib.metadata
import sys
from pathlib import Path

from pdjax.config import Config
from pdjax.net import mpi
from pdjax.net.crew import MEET_SECONDS
from pdjax.net.world import World, WorldError, meet

GRACE_SECONDS = 1.0  # from the news that an instance has broken to the end of its processes, come what may
SLOWEST_START_SECONDS = 60.0  # by which one process of an instance may come to the meeting later than another


def say(who: str, text: str) -> None:
    """One line for whoever watches the instance."""
    print(f"pdjax {who}: {text}", file=sys.stderr, flush=True)


def join(config: Config, folder: Path) -> World:
    """Meet the other processes of this instance, if any. Each of them calls this.

    Raises:
        WorldError: they can't be one instance.
        MPIError: MPI or UCX can't be loaded.
    """
    # One that never comes leaves the others inside MPI, which waits for ever.
    faulthandler.dump_traceback_later(MEET_SECONDS + SLOWEST_START_SECONDS, exit=True)
    try:
        mpi.load(config.transfer.ucx_library or None)
        world = meet(_facts(config, folder))
    finally:
        faulthandler.cancel_dump_traceback_later()
    wanted = config.instance.processes
    if wanted not in (1, world.size):
        raise WorldError(f"Instance.processes is {wanted} and {world.size} processes were started: make them the same")
    return world


def _facts(config: Config, folder: Path) -> dict[str, str]:
    """What all processes of an instance must have alike: they trace and schedule by it."""
    from pdjax.models.folder import model_identity

    options = {
        f"{section}.{option}": repr(value)
        for section, values in dataclasses.asdict(config).items()
        for option, value in values.items()
    }
    versions = {f"the version of {name}": importlib.metadata.version(name) for name in ("jax", "jaxlib")}
    return options | versions | {"the model": model_identity(folder)}

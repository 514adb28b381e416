"""Backends by name. Others plug in through the entry-point group ``pdjax.transfer``."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from importlib.metadata import entry_points

from pdjax.transfer.backend import BackendOptions, EventSink, TransferBackend, TransferError

GROUP = "pdjax.transfer"
_DEFAULTS = BackendOptions()
# Each in a module with `create`, imported only when it is asked for.
OURS = {
    "ucx": "pdjax.transfer.ucx.backend",
    "nixl": "pdjax.transfer.nixl",
    "mooncake": "pdjax.transfer.mooncake",
    "jax": "pdjax.transfer.jax_transfer",
    "fake": "pdjax.transfer.fake",
}


def create(name: str, on_event: EventSink, options: BackendOptions = _DEFAULTS) -> TransferBackend:
    """Start the backend of that name.

    An entry point is a callable that takes `on_event` and `options`. It cannot take a name that is ours.

    Raises:
        TransferError: there is none of that name, or it cannot start.
    """
    theirs = {point.name: point for point in entry_points(group=GROUP)}
    factory: Callable[[EventSink, BackendOptions], TransferBackend]
    if name in OURS:
        factory = import_module(OURS[name]).create
    elif name in theirs:
        factory = theirs[name].load()
    else:
        known = ", ".join(sorted({*OURS, *theirs}))
        raise TransferError(f"there is no transfer backend {name!r}; there are {known}")
    return factory(on_event, options)

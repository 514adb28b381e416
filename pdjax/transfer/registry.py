"""Backends by name. Others plug in through the entry-point group ``pdjax.transfer``."""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import entry_points

from pdjax.transfer.backend import EventSink, TransferBackend, TransferError

GROUP = "pdjax.transfer"


def create(name: str, on_event: EventSink, *, allow_mapped: bool = True) -> TransferBackend:
    """Start the backend of that name.

    An entry point is a callable that takes the same arguments as this function, but for the name. It cannot take a
    name that is ours.

    Raises:
        TransferError: there is none of that name, or it cannot start.
    """
    ours: dict[str, Callable[..., TransferBackend]] = {"ucx": _ucx, "fake": _fake}
    theirs = {point.name: point for point in entry_points(group=GROUP)}
    if name in ours:
        factory = ours[name]
    elif name in theirs:
        factory = theirs[name].load()
    else:
        known = ", ".join(sorted({*ours, *theirs}))
        raise TransferError(f"there is no transfer backend {name!r}; there are {known}")
    return factory(on_event, allow_mapped=allow_mapped)


def _ucx(on_event: EventSink, *, allow_mapped: bool) -> TransferBackend:
    from pdjax.transfer.ucx.backend import UcxBackend

    return UcxBackend(on_event, allow_mapped=allow_mapped)


def _fake(on_event: EventSink, *, allow_mapped: bool) -> TransferBackend:
    from pdjax.transfer.fake import FakeBackend

    return FakeBackend(on_event)

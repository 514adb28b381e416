"""How a model folder appears: written beside its place, then renamed, so that a half-written one is never seen."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pdjax.models.errors import ModelError
from pdjax.models.folder import RECORD


def check_destination(destination: Path, *, force: bool) -> None:
    """Refuse a destination that would lose something.

    Raises:
        ModelError: it exists and `force` is off, or it is no model folder.
    """
    if not destination.exists():
        return
    if not force:
        raise ModelError(f"{destination} exists already; choose another destination, or replace it with --force")
    if not (destination / RECORD).is_file():
        raise ModelError(f"{destination} is not a model folder, so --force does not replace it; remove it yourself")


def partial_folders(destination: Path) -> list[Path]:
    """What writers of `destination` that were killed have left behind; those still at work included."""
    return sorted(destination.parent.glob(f".{destination.name}.*.partial"))


@contextmanager
def published(destination: Path, *, force: bool) -> Iterator[Path]:
    """A folder beside `destination` that becomes it at the end, or vanishes on an error. See `check_destination`."""
    check_destination(destination, force=force)
    destination.parent.mkdir(parents=True, exist_ok=True)
    partial = destination.parent / f".{destination.name}.{os.getpid()}.partial"
    replaced = destination.parent / f".{destination.name}.{os.getpid()}.replaced.partial"
    partial.mkdir()
    try:
        yield partial
        check_destination(destination, force=force)
        if destination.exists():
            destination.rename(replaced)
        partial.rename(destination)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
        shutil.rmtree(replaced, ignore_errors=True)

"""Where pdjax keeps what it fetches and compiles."""

from __future__ import annotations

import os
from pathlib import Path


def cache_root() -> Path:
    """``$PDJAX_CACHE``, else ``$XDG_CACHE_HOME/pdjax``, else ``~/.cache/pdjax``. It need not exist yet."""
    own = os.environ.get("PDJAX_CACHE")
    if own:
        return Path(own).expanduser().absolute()
    shared = os.environ.get("XDG_CACHE_HOME")
    return (Path(shared) if shared else Path.home() / ".cache").absolute() / "pdjax"

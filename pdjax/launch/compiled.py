"""The simulator as machine code: mypyc compiles its modules, and the room protocol's, from the sources that lie here.

They play the same worlds, twice as fast. It takes a minute, once for each state of the sources.
"""

from __future__ import annotations

import hashlib
import importlib.util
import platform
import shutil
import subprocess
import sys
import tempfile
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path

_ROOT = Path(__file__).parents[2]  # that holds the package
# Not among them: messages and other values of msgspec, whose options mypyc would drop, and what runs but once.
_COMPILED = {
    "cache": "allocator prefix radix ranks",
    "disagg": "pieces",
    "disagg/protocol": "actions asks decode_instance decode_links decode_room hosts instance path_tests "
    "prefill_instance prefill_room pulse quarantine room slot_queue timers tombstones turns",
    "disagg/simulate": "books clients decode_life life prefill_life run world",
    "transfer/layout": "plan",
}
_READ = (  # by mypy
    "__init__.py",
    "cache/*.py",
    "disagg/__init__.py",
    "disagg/pieces.py",
    "disagg/protocol/*.py",
    "disagg/simulate/*.py",
    "transfer/__init__.py",
    "transfer/layout/*.py",
)
_MYPY_INI = """
[mypy]
follow_imports = skip
ignore_missing_imports = True
[mypy-msgspec.*,pdjax.cache.*,pdjax.disagg.*,pdjax.transfer.layout.*]
follow_imports = silent
"""
_BUILD = """
import sys
from mypyc.build import mypycify
from setuptools import setup
modules = mypycify(["--config-file", "mypy.ini", *sys.argv[1:]])
setup(name="simulator", packages=[], ext_modules=modules, script_args=["build_ext", "--build-lib", "built"])
"""
_BUILD_SECONDS = 1200.0


class NotCompiled(Exception):
    """The simulator can't be compiled here; the sentence says why."""


def use(folder: Path) -> None:
    """From now on, import the compiled modules, which are in `folder` or are put there. Call it before any of them is
    imported.

    Raises:
        NotCompiled: there is no compiler, or it has failed.
    """
    sys.meta_path.insert(0, _Finder(_build(folder)))


class _Finder:
    """Finds compiled modules, and what they share, before the sources are looked for."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        spec = PathFinder.find_spec(name, [str(self._folder.joinpath(*name.split(".")[:-1]))])
        return spec if spec is not None and spec.loader is not None else None  # a folder is no module


def _build(folder: Path) -> Path:
    """Where the compiled modules of these sources and this Python are."""
    sources = [file for pattern in _READ for file in sorted((_ROOT / "pdjax").glob(pattern))]
    digest = hashlib.sha256(repr((_COMPILED, _MYPY_INI, _BUILD, sys.version, platform.machine())).encode())
    for file in sources:
        digest.update(file.read_bytes())
    built = folder / f"simulator-{digest.hexdigest()[:16]}"
    if built.is_dir():
        return built
    if importlib.util.find_spec("mypyc") is None:
        raise NotCompiled("mypyc is not installed: pip install 'pdjax[simulate]', or play without --compiled")
    if not any(map(shutil.which, ("cc", "gcc", "clang"))):
        raise NotCompiled("there is no C compiler (cc, gcc or clang) on the path: play without --compiled")
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder, prefix="simulator-") as place:
        partial = Path(place)
        for file in sources:
            copy = partial / file.relative_to(_ROOT)
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.write_bytes(file.read_bytes())
        (partial / "mypy.ini").write_text(_MYPY_INI)
        _compile(partial)
        try:
            (partial / "built").rename(built)
        except OSError:
            if not built.is_dir():  # else another process was faster
                raise
    return built


def _compile(partial: Path) -> None:
    print("compiling the simulator, which takes a minute", file=sys.stderr, flush=True)
    modules = [f"pdjax/{package}/{name}.py" for package, names in _COMPILED.items() for name in names.split()]
    try:
        done = subprocess.run(
            [sys.executable, "-c", _BUILD, *modules],
            cwd=partial, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=_BUILD_SECONDS,
        )  # fmt: skip
    except subprocess.TimeoutExpired as error:
        raise NotCompiled(f"mypyc did not end within {_BUILD_SECONDS:.0f} s") from error
    if done.returncode:
        raise NotCompiled(f"mypyc has failed:\n{done.stdout.strip()[-2000:]}")

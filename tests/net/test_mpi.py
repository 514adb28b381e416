"""What happens around MPI's start and end; each in a process of its own, since MPI starts once."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from pdjax.net.mpi import environment
from tests.jobs import REPOSITORY


def run(code: str) -> subprocess.CompletedProcess[str]:
    """Run code in an mpiexec job of one rank."""
    mpiexec = Path(sys.executable).with_name("mpiexec")
    env = environment(dict(os.environ)) | {"PYTHONPATH": str(REPOSITORY)}
    command = [mpiexec, "-n", "1", sys.executable, "-c", "from pdjax.net import mpi\n" + code]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=60, stdin=subprocess.DEVNULL)


def test_what_the_user_has_set_stays() -> None:
    assert environment({"UCX_TLS": "rc,self", "X": "y"}) | {} == environment({}) | {"UCX_TLS": "rc,self", "X": "y"}
    assert "tcp" in environment({})["UCX_TLS"].split(",")


def test_mpi_and_our_transfers_find_one_ucx_in_the_process() -> None:
    ended = run("mpi.load(); print(mpi.libucp_path(), mpi.ucx_version()[0]); mpi.shutdown(0)")
    path, major = ended.stdout.split()
    assert "libucp.so" in path and int(major) >= 1


def test_another_ucx_after_mpi_is_refused_with_the_reason() -> None:
    ended = run(
        "mpi.load()\ntry: mpi.load('/lib/libucp.so.0')\nexcept mpi.MPIError as error: print(error)\nmpi.shutdown(0)"
    )
    assert "is in this process already. Load it before MPI." in ended.stdout


def test_a_ucx_that_is_not_there_is_named() -> None:
    ended = run("try: mpi.load('/nowhere/libucp.so.0')\nexcept mpi.MPIError as error: print(error)")
    assert "the UCX library /nowhere/libucp.so.0 cannot be loaded" in ended.stdout


@pytest.mark.parametrize("code", [0, 3])
def test_shutdown_ends_the_process_with_its_code_and_in_silence(code: int) -> None:
    ended = run(f"mpi.load(); mpi.shutdown({code})")
    assert ended.returncode == code
    assert (ended.stdout + ended.stderr).strip() == ""


def test_a_process_that_is_killed_leaves_nothing_in_shared_memory() -> None:
    ended = run("import os; mpi.load(); print(*mpi._mapped_files(), sep='\\n', flush=True); os.kill(os.getpid(), 9)")
    segments = [line.split(" (deleted)")[0] for line in ended.stdout.splitlines() if line.startswith("/dev/shm/")]
    assert segments
    assert not any(Path(segment).exists() for segment in segments)

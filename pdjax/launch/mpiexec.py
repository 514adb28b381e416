"""Instances run under ``mpiexec``; one that was started without it starts itself again under it."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

from pdjax.net.mpi import environment

UNDER_MPI = ("PMI_RANK", "PMIX_RANK", "OMPI_COMM_WORLD_RANK")  # set by process managers

# Process managers kill a whole job as soon as one of its processes has failed. The leader of an instance needs a moment
# to say which worker it was, and to tell those who wait for an answer; then it ends, and with it the job.
_LAST_WORDS = """trap : TERM INT
"$@"
code=$?
[ $code = 0 ] || [ "${PMI_RANK:-${PMIX_RANK:-${OMPI_COMM_WORLD_RANK:-0}}}" = 0 ] || sleep 3
exit $code
"""


def under_mpi() -> bool:
    """Whether a process manager started this process."""
    return any(name in os.environ for name in UNDER_MPI)


def rank() -> int:
    """This process's number in its job, from the environment: it is needed before MPI is loaded. 0 without a job."""
    return next((int(os.environ[name]) for name in UNDER_MPI if name in os.environ), 0)


def find_mpiexec() -> str:
    """The ``mpiexec`` of this Python's environment, else the one on PATH.

    Raises:
        FileNotFoundError: there is none; the sentence says how to get one.
    """
    beside = Path(sys.executable).parent / "mpiexec"
    found = str(beside) if beside.exists() else shutil.which("mpiexec")
    if found is None:
        raise FileNotFoundError("there is no mpiexec beside this Python or on PATH: pip install mpich brings one")
    return found


def start_again(processes: int, arguments: list[str]) -> None:
    """Replace this process by ``mpiexec -n processes python -m pdjax.launch arguments``."""
    command = [find_mpiexec(), "-n", str(processes), sys.executable, "-m", "pdjax.launch", *arguments]
    if processes > 1:
        command[3:3] = ["/bin/sh", "-c", _LAST_WORDS, "sh"]
    os.execvpe(command[0], command, environment(dict(os.environ)))

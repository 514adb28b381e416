"""Instances run under a process manager: an ``mpiexec`` of their own, or the one that has started them (``srun``, or a
cluster's ``mpiexec``). Either way they start again once, in the environment that MPI needs."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

from pdjax.net.mpi import environment

UNDER_MPI = ("PMI_RANK", "PMIX_RANK", "OMPI_COMM_WORLD_RANK")  # set by process managers

_OF_JOBS = ("PMI_", "PMIX_", "OMPI_")
_PREPARED = "PDJAX_PREPARED_FOR_MPI"
# Where a job scheduler has given several hosts, MPICH's mpiexec would choose among them.
_HERE = {"HYDRA_RMK": "user", "HYDRA_LAUNCHER": "fork"}

# Process managers kill a whole job as soon as one of its processes has failed. The leader of an instance needs a moment
# to say which worker it was, and to tell those who wait for an answer; then it ends, and with it the job.
_LAST_WORDS = """trap : TERM INT
"$@"
code=$?
[ $code = 0 ] || [ "${PMI_RANK:-${PMIX_RANK:-${OMPI_COMM_WORLD_RANK:-0}}}" = 0 ] || sleep 3
exit $code
"""


class StartedApartError(Exception):
    """Processes that were started together and have not been told of each other; the sentence says what to do."""


def is_prepared() -> bool:
    """Whether this process has a process manager and the environment that MPI needs."""
    return _is_managed() and _PREPARED in os.environ


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


def alone_here(env: dict[str, str]) -> dict[str, str]:
    """A copy of `env` for instances on this host alone, whatever job this process itself belongs to."""
    return {name: value for name, value in env.items() if not name.startswith(_OF_JOBS)} | _HERE


def start_again(processes: int, arguments: list[str]) -> None:
    """Replace this process by ``python -m pdjax.launch arguments`` in the environment that MPI needs, and under
    ``mpiexec -n processes`` if it has no process manager.

    Raises:
        FileNotFoundError: there is no mpiexec.
        StartedApartError: srun started several processes, and tells none of them of the others.
    """
    managed = _is_managed()
    command = [sys.executable, "-m", "pdjax.launch", *arguments]
    env = environment(dict(os.environ)) | {_PREPARED: "1"}
    if managed or processes > 1:
        command = ["/bin/sh", "-c", _LAST_WORDS, "sh", *command]
    if not managed:
        tasks = os.environ.get("SLURM_STEP_NUM_TASKS", "1")
        if tasks != "1":
            raise StartedApartError(f"srun started {tasks} processes without MPI: give it --mpi=pmi2")
        command = [find_mpiexec(), "-n", str(processes), *command]
        env |= _HERE if processes == 1 else {}
    os.execvpe(command[0], command, env)


def _is_managed() -> bool:
    return any(name in os.environ for name in UNDER_MPI)

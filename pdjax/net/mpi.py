"""Where MPI and UCX are loaded, and in which order: the one module that imports mpi4py.

MPI and our own transfers share one UCX. Another libucp than the one that MPI brings must be in the process before
MPI is; the other order ends in undefined symbols. And only libucp is loaded by hand: it finds its own siblings.
"""

from __future__ import annotations

import ctypes
import os
import socket
import sys
import threading
import time
from pathlib import Path
from typing import Any

_MPI_ENVIRONMENT = {
    # A peer that is killed while it sends through UCX's shared memory can block the receiver's queue for everybody.
    "UCX_TLS": "tcp,self",
    "UCX_LOG_LEVEL": "error",
    "UCX_WARN_UNUSED_ENV_VARS": "n",
    # JAX has a GPU's memory before any UCX context could take note of it, and what such a note lacks UCX takes for the
    # host's memory. Without notes it asks the driver.
    "UCX_MEMTYPE_CACHE": "n",
    # Bounds a join whose other side has died halfway; the default is 180.
    "MPIR_CVAR_CH4_COMM_CONNECT_TIMEOUT": "10",
}
_TCP_OVER_LO = (1, 22)  # the first UCX that can use tcp over the loopback interface between two processes

_loaded: Any = None
_has_lost_a_peer = False
_lock = threading.Lock()


class MPIError(Exception):
    """MPI or UCX cannot be loaded as asked; the sentence says why."""


def environment(env: dict[str, str]) -> dict[str, str]:
    """A copy of `env` with what must be set before ``mpiexec`` starts. What the user has set stays.

    ``UCX_*`` variables reach every UCX context of a process; ours overrides what it needs in its own configuration.
    """
    return _MPI_ENVIRONMENT | env


def load(ucx_library: str | None = None) -> Any:
    """Load MPI (once), and before it the libucp at `ucx_library`. Returns the module ``mpi4py.MPI``.

    Raises:
        MPIError: a library is missing, or another libucp is in the process already.
    """
    global _loaded
    with _lock:
        if ucx_library is not None:
            _load_ucx(ucx_library)
        if _loaded is None:
            try:
                import mpi4py

                mpi4py.rc.thread_level = "serialized"
                from mpi4py import MPI
            except (ImportError, RuntimeError) as error:
                raise MPIError(f"MPI cannot be loaded: {error}. `pip install mpi4py mpich` brings one.") from error
            if MPI.Query_thread() < MPI.THREAD_SERIALIZED:
                raise MPIError("this MPI grants no more than MPI_THREAD_FUNNELED; MPI_THREAD_SERIALIZED is needed")
            if MPI.COMM_WORLD.Get_size() == 1:
                forget_names()
            _loaded = MPI
        return _loaded


def note_lost_peer() -> None:
    """A process that MPI had a connection with has ended under it. MPI works on for all others, but its own end is no
    longer safe: what UCX has kept for that peer crashes it now and then when its worker is destroyed."""
    global _has_lost_a_peer
    _has_lost_a_peer = True


def forget_names() -> None:
    """Take the names of MPI's segments out of /dev/shm, which a killed process would leave there for good.

    For when nobody will open them by name any more: there is one process in the job, or all have used them together.
    """
    for path in _mapped_files():
        if path.startswith("/dev/shm/mpich_"):
            Path(path).unlink(missing_ok=True)


def _load_ucx(path: str) -> None:
    wanted = os.path.realpath(path)
    present = libucp_path()
    if present is None:
        try:
            ctypes.CDLL(wanted, mode=ctypes.RTLD_GLOBAL)
        except OSError as error:
            raise MPIError(f"the UCX library {path} cannot be loaded: {error}") from error
    elif os.path.realpath(present) != wanted:
        raise MPIError(f"{path} cannot be used: {present} is in this process already. Load it before MPI.")


def libucp_path() -> str | None:
    """The libucp that this process has loaded, or None."""
    return next((path for path in _mapped_files() if Path(path).name.startswith("libucp.so")), None)


def _mapped_files() -> list[str]:
    lines = (line.split(None, 5) for line in Path("/proc/self/maps").read_text().splitlines())
    return [fields[5] for fields in lines if len(fields) == 6]


def ucx_version() -> tuple[int, int, int] | None:
    """Version of the libucp that this process has loaded, or None when it has none."""
    path = libucp_path()
    if path is None:
        return None
    parts = [ctypes.c_uint() for _ in range(3)]
    ctypes.CDLL(path).ucp_get_version(*(ctypes.byref(part) for part in parts))
    return parts[0].value, parts[1].value, parts[2].value


def check_interfaces() -> str | None:
    """A sentence when this machine's network interfaces cannot carry UCX's tcp, else None. Loads MPI."""
    load()
    version = ucx_version()
    if version is None or version[:2] >= _TCP_OVER_LO or any(_is_up(name) for _, name in socket.if_nameindex()):
        return None
    return (
        f"this machine has no network interface but the loopback, and UCX {'.'.join(map(str, version))} cannot use tcp "
        "over it: name a UCX of 1.22 or later (for instance the wheel libucx-cu12's libucp.so.0) as ucx_library, or "
        "add an interface"
    )


def _is_up(name: str) -> bool:
    """Whether an interface other than the loopback is up and has an IPv4 address, which is what UCX looks for."""
    import fcntl
    import struct

    if name == "lo":
        return False
    request = struct.pack("256s", name.encode()[:15])
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            (flags,) = struct.unpack("16xH", fcntl.ioctl(probe, 0x8913, request)[:18])  # SIOCGIFFLAGS
            fcntl.ioctl(probe, 0x8915, request)  # SIOCGIFADDR
        except OSError:
            return False
    return bool(flags & 1)


def shutdown(code: int, *, timeout: float = 5.0) -> None:
    """End this process with an exit code, after all of its job have come here and MPI has been finalized, or `timeout`
    seconds have gone by.

    Call it last, from the thread that may call MPI (with every `Network` stopped). The process manager wants MPI
    finalized; yet links to peers that are dead or stuck may hold that up for ever, hence the bound, and the hard exit:
    at this point nothing is left to run that matters, and MPI's own exit handlers would wait again.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    bound = threading.Timer(timeout, os._exit, (code,))
    bound.daemon = True
    bound.start()
    if _loaded is None or _loaded.Is_finalized():
        os._exit(code)
    alone = _loaded.COMM_WORLD.Get_size() == 1
    # After a failure the others of this job may be dead or stuck, and MPI would wait for them; its process manager
    # ends them when this process ends without having finalized.
    if code == 0 and not alone:
        _meet_others(_loaded.COMM_WORLD)
    if not _has_lost_a_peer and (code == 0 or alone):
        _loaded.Finalize()
        if not alone:
            # MPICH takes its leave of the process manager in C's exit handlers; without it, the others are killed.
            ctypes.CDLL(None).exit(code)
    os._exit(code)


def _meet_others(world: Any) -> None:
    """Until all of this job are here: who ends without having finalized ends the others, too."""
    everyone = world.Ibarrier()
    while not everyone.Test():
        time.sleep(1e-3)

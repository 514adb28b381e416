"""A process that asks UCX whether it moves a device's memory. Prints what it says, as JSON.

Without an argument, of the UCX that MPI brings. With the folder of an emulated GPU, of one with cuda transports: as it
is, where the driver does not know the memory, where something else is moved, and where nothing is. Then it moves bytes
between a GPU's memory and the host's, both ways.
"""

from __future__ import annotations

import ctypes
import json
import queue
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import numpy as np

from pdjax.net import mpi
from pdjax.transfer import cuda, device_proof
from pdjax.transfer.backend import BackendOptions, Notice, Write
from pdjax.transfer.ucx import backend
from pdjax.transfer.ucx.backend import UcxBackend
from pdjax.transfer.ucx.worker import UcxWorker
from tests.transfer import emulated_gpu

NBYTES = 100_000


def ask(*patches: Any) -> str | None:
    with ExitStack() as stack:
        for patch in patches:
            stack.enter_context(patch)
        return device_proof.problem_with_device_memory(
            jax.devices()[:1], lambda on_event: backend.create(on_event, BackendOptions(gpu=0, gpu_over_tcp=True))
        )


def moves_between(gpu: Any) -> dict[str, int]:
    """For each way, how many bytes have come that were sent."""
    events: queue.SimpleQueue[object] = queue.SimpleQueue()
    ucx = backend.create(events.put, BackendOptions(gpu=0, gpu_over_tcp=True))
    sent, received = (np.random.default_rng(seed).integers(0, 256, NBYTES, np.uint8) for seed in range(2))
    gpu.emulated_gpu_has(received.ctypes.data, NBYTES)
    ucx.register(1, sent.ctypes.data, NBYTES)
    ucx.register_device_memory(2, received.ctypes.data, NBYTES, writable=True)
    mapped = ucx.allocate(3, NBYTES)
    ucx.connect("itself", ucx.describe())
    came = {}
    for way, source, target, address in (("to a GPU", 1, 2, received.ctypes.data), ("from a GPU", 2, 3, mapped)):
        ucx.write(Write(1, "itself", source, 0, target, 0, NBYTES, b"", deadline=time.monotonic() + 5))
        while not isinstance(events.get(timeout=6), Notice):
            pass
        landed: Any = (ctypes.c_uint8 * NBYTES).from_address(address)
        came[way] = int(np.sum(np.frombuffer(landed, np.uint8) == sent))
    ucx.close()
    return came


if len(sys.argv) == 1:
    said: dict[str, Any] = {"problem": ask()}
else:
    gpu, library = emulated_gpu.load(Path(sys.argv[1]))
    mpi.load(library)
    put, register = UcxWorker.put, UcxBackend.register_device_memory

    def put_elsewhere(worker, endpoint, source, offset, nbytes, remote, rkey) -> int:
        return put(worker, endpoint, source, offset, nbytes - 4, remote + 4, rkey)

    def register_known(ucx, region, address, nbytes, **how) -> None:
        gpu.emulated_gpu_has(address, nbytes)
        register(ucx, region, address, nbytes, **how)

    known = mock.patch.object(UcxBackend, "register_device_memory", register_known)
    elsewhere = mock.patch.object(UcxWorker, "put", put_elsewhere)
    silent = mock.patch.object(UcxWorker, "notify", lambda *_: 0)
    hurried = mock.patch.object(device_proof, "_BOUND", 0.5)
    said = {
        "unknown": ask(),
        "whole": ask(known),
        "copied": gpu.emulated_gpu_copied(),
        "elsewhere": ask(known, elsewhere),
        "silent": ask(known, silent, hurried),
        **moves_between(gpu),
    }
    flush = cuda.flush_of(0)
    if flush is not None:
        flush()
    said["flushes"] = gpu.emulated_gpu_flushes()
print(json.dumps(said), flush=True)
mpi.shutdown(0)

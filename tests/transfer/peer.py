"""A process with a transfer backend, for tests: see `tests.jobs`. Regions: 1 is a ring for peers, 2 is a source.

Arguments: their size, the mode, and for the mode cuda, in which both are a GPU's memory, the emulated GPU's folder.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
import resource
import sys
import threading
import time
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np

from pdjax.net import mpi
from pdjax.transfer.backend import (
    BackendOptions,
    Drained,
    Notice,
    PeerLost,
    TransferError,
    TransferEvent,
    Write,
    WriteDone,
    WriteFailed,
)
from pdjax.transfer.registry import create
from tests.transfer import emulated_gpu

UCX = {
    "mapped": BackendOptions(),
    "put": BackendOptions(mapped=False),
    "cuda": BackendOptions(gpu=0, gpu_over_tcp=True),
}
output = threading.Lock()
window = threading.Semaphore(0)  # released by each write that ends well
quiet = False
heard: list[bytes] = []


def say(**line: Any) -> None:
    with output:
        os.write(1, f"{json.dumps(line)}\n".encode())  # at once: libraries print too


def digest(piece: Any) -> str:
    return hashlib.sha256(memoryview(piece)).hexdigest()


def on_event(event: TransferEvent) -> None:
    match event:
        case WriteDone(id):
            window.release()
            if not quiet:
                say(event="done", id=id)
        case WriteFailed(id, cause):
            say(event="write_failed", id=id, cause=cause, at=time.monotonic())
        case Notice(payload) if payload[:1] == b"#":  # a range to look at before anything else can happen
            offset, nbytes = map(int, payload[1:].split(b","))
            say(event="landed", digest=digest(ring[offset : offset + nbytes]))
        case Notice(payload):
            heard.append(payload)
            if not quiet:
                say(event="notice", payload=payload.decode(), at=time.monotonic())
        case PeerLost(peer, cause):
            say(event="lost", peer=peer, cause=cause, at=time.monotonic())
        case Drained(id):
            say(event="drained", id=id)


def resident() -> int:
    """Bytes of memory in use."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def write(command: dict[str, Any]) -> None:
    deadline = time.monotonic() + command.get("seconds", 30.0)
    backend.write(
        Write(
            id=command["id"],
            peer=command["peer"],
            region=command.get("region", 2),
            offset=command["offset"],
            peer_region=command.get("peer_region", 1),
            peer_offset=command["peer_offset"],
            nbytes=command["nbytes"],
            notice=command["notice"].encode(),
            deadline=deadline,
        )
    )


def series(command: dict[str, Any]) -> float:
    """Many writes one after the other, `ahead` of them under way at a time. Returns seconds."""
    count, ahead = command["count"], command.get("ahead", 4)
    while window.acquire(blocking=False):
        pass
    start = time.monotonic()
    for i in range(count):
        if i >= ahead:
            assert window.acquire(timeout=30)
        write(command | {"id": i, "peer_offset": (i % ahead) * command["nbytes"], "offset": 0})
    for _ in range(min(ahead, count)):
        assert window.acquire(timeout=30)
    return time.monotonic() - start


size = int(sys.argv[1])
mode = sys.argv[2]
gpu, library = emulated_gpu.load(Path(sys.argv[3])) if mode == "cuda" else (None, None)
mpi.load(library)
backend = create("ucx" if mode in UCX else mode, on_event, UCX.get(mode, BackendOptions()))
source = np.zeros(size, np.uint8)
if gpu is not None:
    ring = np.zeros(size, np.uint8)
    address = ring.ctypes.data
    for array in (ring, source):
        gpu.emulated_gpu_has(array.ctypes.data, size)
    backend.register_device_memory(1, address, size, writable=True)
    backend.register_device_memory(2, source.ctypes.data, size)
else:
    address = backend.allocate(1, size)
    memory: Any = (ctypes.c_uint8 * size).from_address(address)
    ring = np.frombuffer(memory, np.uint8)
    backend.register(2, source.ctypes.data, size)
held: int | None = None
holding: AbstractContextManager[int | None] = nullcontext()
say(pid=os.getpid())
for text in sys.stdin:
    command = json.loads(text)
    match command["op"]:
        case "describe":
            say(answer="describe", description=backend.describe().hex(), zeroed=not ring.any(), address=address)
        case "connect":
            try:
                backend.connect(command["peer"], bytes.fromhex(command["description"]))
                say(answer="connect", path=backend.path(command["peer"]))
            except TransferError as error:
                say(answer="connect", error=str(error))
        case "disconnect":
            backend.disconnect(command["peer"])
        case "fill":
            random = np.random.default_rng(command["seed"])
            piece = source[command["offset"] : command["offset"] + command["nbytes"]]
            piece[:] = np.frombuffer(random.bytes(len(piece)), np.uint8)
            say(answer="fill", digest=digest(piece))
        case "landed":  # what is in the ring
            say(answer="landed", digest=digest(ring))
        case "write":
            write(command)
        case "series":
            quiet = True
            say(answer="series", seconds=series(command))
            quiet = False
        case "quiet":
            quiet = command["quiet"]
            say(answer="quiet", heard=len(heard))
        case "hold":  # memory of a peer, until it is let go
            where = command.get("peer_region", 1), command.get("peer_offset", 0), command.get("nbytes", 5000)
            holding = backend.mapped(command["peer"], *where)
            held = holding.__enter__()
            say(answer="hold", mapped=held is not None)
        case "store":
            assert held is not None
            ctypes.memmove(held, source[command["offset"] :].ctypes.data, command["nbytes"])
            say(answer="store")
        case "let_go":
            holding.__exit__(None, None, None)
            say(answer="let_go")
        case "drain":
            backend.drain(command["id"])
        case "cut_off":
            try:
                backend.cut_off([bytes.fromhex(command["description"])])
                say(answer="cut_off")
            except TransferError as error:
                say(answer="cut_off", error=str(error))
        case "usage":
            say(answer="usage", cpu=time.process_time(), fds=len(os.listdir("/proc/self/fd")), rss=resident())
        case "quit":
            backend.close()
            mpi.shutdown(0)

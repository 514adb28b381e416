"""What a backend tells its peers about itself, and how a peer makes sure that it may be believed."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec

from pdjax.transfer.backend import TransferError
from pdjax.transfer.checks import seal, unseal

VERSION = 3
_MAX_REGIONS = 64
_MAX_ADDRESSES = 256
_MAX_BLOB = 4096
_MIN_KEY = 9  # bytes; UCX reads as many of a key without a look at its length


class Process(msgspec.Struct, frozen=True):
    """Which process this is, among all processes of all hosts.

    A pid means the same process to two others only on one running kernel and in one pid namespace, and only until it
    is given out again, which the start time tells.
    """

    boot_id: str
    pid_namespace: str
    pid: int
    start_ticks: int
    ipc_namespace: str = ""


class Region(msgspec.Struct, frozen=True):
    """Memory that peers may write into: its address in its owner, bytes, UCX's key to it, and whether it is a GPU's."""

    id: int
    base: int
    nbytes: int
    rkey: bytes
    on_device: bool = False


class Description(msgspec.Struct, frozen=True):
    """A backend: its UCX worker's address, its process and its regions, and the IP addresses of its host."""

    version: int
    ucx: tuple[int, int, int]
    worker: bytes
    process: Process
    regions: list[Region]
    addresses: list[str] = []


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Description)


def encode(description: Description) -> bytes:
    """Bytes for the registration record."""
    return seal(_encoder.encode(description))


def decode(data: bytes) -> Description:
    """Parse and validate a peer's description. Raises `TransferError`."""
    try:
        description = _decoder.decode(unseal(data))
    except msgspec.DecodeError as error:
        raise TransferError(f"the peer's transfer description does not parse: {error}") from error
    if description.version != VERSION:
        raise TransferError(f"the peer describes itself in version {description.version}; this is {VERSION}")
    if not 0 < len(description.worker) <= _MAX_BLOB or len(description.regions) > _MAX_REGIONS:
        raise TransferError("the peer's transfer description has no worker address, or too much in it")
    for region in description.regions:
        sane = region.base > 0 and region.nbytes > 0 and region.base + region.nbytes < 1 << 64
        if not sane or not _MIN_KEY <= len(region.rkey) <= _MAX_BLOB:
            raise TransferError(f"the peer's region {region.id} has no memory or no key")
    if len(description.addresses) > _MAX_ADDRESSES or any(len(each) > 64 for each in description.addresses):
        raise TransferError("the peer describes its host by too many addresses, or by what is none")
    if len({region.id for region in description.regions}) != len(description.regions):
        raise TransferError("the peer describes a region twice")
    return description


def own_process() -> Process:
    """This process."""
    return Process(
        boot_id=Path("/proc/sys/kernel/random/boot_id").read_text().strip(),
        pid_namespace=os.readlink("/proc/self/ns/pid"),
        pid=os.getpid(),
        start_ticks=_start_ticks("self"),
        ipc_namespace=os.readlink("/proc/self/ns/ipc"),
    )


def is_neighbour(process: Process) -> bool:
    """Whether a described process is alive on this kernel under the very pid that it states.

    Only then does a key to its shared memory, which names that pid, lead to its memory and not to somebody else's.
    """
    own = own_process()
    if (process.boot_id, process.pid_namespace) != (own.boot_id, own.pid_namespace):
        return False
    try:
        return _start_ticks(str(process.pid)) == process.start_ticks
    except (OSError, ValueError, IndexError):
        return False  # it has ended, or is not ours to see


def may_share_memory(process: Process) -> bool:
    """Whether a described process may reach the memory of this one without a network: it runs on this very kernel, and
    sees this one's shared memory or this process."""
    own = own_process()
    same = process.pid_namespace == own.pid_namespace or process.ipc_namespace == own.ipc_namespace
    return process.boot_id == own.boot_id and same


def is_mapped(address: int, nbytes: int) -> bool:
    """Whether [address, address + nbytes) lies within writable shared mappings of this process.

    UCX computes a mapped address from what the peer stated, without a look at the bounds.
    """
    covered = address
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, permissions = line.split(None, 2)[:2]
        low, high = (int(part, 16) for part in span.split("-"))
        if low <= covered < high and permissions[1] == "w" and permissions[3] == "s":
            covered = high
            if covered >= address + nbytes:
                return True
    return False


def _start_ticks(pid: str) -> int:
    """When a process was started, in clock ticks since boot: field 22, counted after the name, which may hold any."""
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])

"""What a transfer backend does: move bytes from a registered region into a peer's, and tell the peer.

A backend knows no pages, heads or rooms. The life of a transfer is: `register` or `allocate` regions once at start;
`describe` yourself into the registration record; `connect` to a described peer; `write` a range, with a notice that
the peer receives only after the bytes have landed. Every write ends in exactly one `WriteDone` or `WriteFailed`
before its deadline, or shortly after it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True)
class Write:
    """One one-sided write. Offsets and lengths are in bytes, `deadline` in seconds of `time.monotonic`."""

    id: int
    peer: str
    region: int
    offset: int
    peer_region: int
    peer_offset: int
    nbytes: int
    notice: bytes  # handed to the peer as it is; at most MAX_NOTICE bytes
    deadline: float


MAX_NOTICE = 1024


@dataclass(frozen=True)
class WriteDone:
    """The bytes and the notice have left: the source range may be reused."""

    id: int


@dataclass(frozen=True)
class WriteFailed:
    """The write did not happen, or only in part. The source range may be reused."""

    id: int
    cause: str


@dataclass(frozen=True)
class Notice:
    """A peer's bytes have landed in one of our regions, and this is what it says about them."""

    payload: bytes


@dataclass(frozen=True)
class PeerLost:
    """The path to a connected peer has failed; writes to it fail until it is connected again."""

    peer: str
    cause: str


@dataclass(frozen=True)
class Drained:
    """Answer to `drain`."""

    id: int


TransferEvent = WriteDone | WriteFailed | Notice | PeerLost | Drained


@dataclass(frozen=True)
class BackendOptions:
    """What the configuration says to whichever backend is chosen; each takes from it what it knows."""

    mapped: bool = True  # on one host, write straight into a peer's memory where the backend can
    devices: tuple[str, ...] = ()  # network devices to use; none: the backend's own choice
    host: str = "127.0.0.1"  # address at which backends that listen are reached
    transports: str = ""  # UCX's names of the transports that may be used; empty: chosen by what this machine has
    gpu: int | None = None  # the device, as CUDA counts them, whose memory is to be moved, if the backend ever does
    gpu_over_tcp: bool = False  # also where only tcp would move it


class TransferError(Exception):
    """A backend that cannot start, a region that cannot be registered, a peer that cannot be described."""


class TransferBackend(Protocol):
    """See the module's docstring. All methods may be called from any thread and return at once, but for the set-up
    calls (`register`, `allocate`, `connect`), which may take milliseconds. Events come on the backend's own thread:
    `on_event` must only hand them on."""

    name: str
    summary: str  # for one line at start: what moves the bytes, and out of which memory
    device_memory: bool  # whether it moves the memory of the options' GPU, too

    def register(self, region: int, address: int, nbytes: int) -> None:
        """Make [address, address + nbytes) a source of writes. The memory must outlive the backend."""
        ...

    def register_device_memory(self, region: int, address: int, nbytes: int, *, writable: bool = False) -> None:
        """Make memory of a GPU a source of writes and, if `writable`, what peers may write into. Raises `TransferError`
        where there is no `device_memory`."""
        ...

    def allocate(self, region: int, nbytes: int) -> int:
        """Allocate memory that peers may write into, touched, aligned to a memory page. Returns its address."""
        ...

    def describe(self) -> bytes:
        """What a peer needs to reach this backend's allocated regions: opaque, at most a few KiB."""
        ...

    def connect(self, peer: str, description: bytes) -> None:
        """Open the path to a described peer under a name of the caller's. Raises `TransferError`."""
        ...

    def disconnect(self, peer: str) -> None:
        """Close the path; its open writes fail. An unknown peer is ignored."""
        ...

    def write(self, write: Write) -> None:
        """Start a write. Its end comes as an event, failures included."""
        ...

    def mapped(self, peer: str, region: int, offset: int, nbytes: int) -> AbstractContextManager[int | None]:
        """Where a range of a peer's region lies in this process, or None: not at all, or there is no such range. The
        address is good within the context, also if the peer is lost meanwhile. Whoever has filled the range tells the
        peer by a `write` of no bytes."""
        ...

    def drain(self, id: int) -> None:
        """Report `Drained` once everything that peers who are gone by now had sent has landed or is dropped."""
        ...

    def cut_off(self, descriptions: Sequence[bytes]) -> None:
        """See to it that, after the next `drain`, nothing of these peers lands any more, whether they live or not. They
        are on hosts out of reach; other peers there may be cut off, too. Raises `TransferError`: it cannot be done."""
        ...

    def path(self, peer: str) -> str:
        """How bytes reach this peer, in words for a log line (for instance ``tcp/eth0`` or ``mapped``)."""
        ...

    def close(self) -> None:
        """Release everything. Idempotent."""
        ...


EventSink = Callable[[TransferEvent], None]

"""A peer as the UCX thread sees it: its endpoint, its memory, and the writes to it."""

from __future__ import annotations

import ctypes
import threading
from collections import deque
from dataclasses import dataclass, field

from pdjax.transfer.backend import TransferError, Write
from pdjax.transfer.ucx.description import Description, is_mapped, is_neighbour
from pdjax.transfer.ucx.worker import Memory, UcxWorker

_PIECE = 8 << 20  # bytes of one copy or put: a millisecond or two, then the thread looks after everything else
_PUTS_AHEAD = 2  # pieces of a write that are under way at a time
_ADDRESS_VERSION = 0x0F  # where a worker's address has its version; UCX ends the process over one it does not know
MAX_OPEN = 8  # writes to a peer that are under way at a time


class PathFailed(Exception):
    """The path to the peer has failed; the text is UCX's."""


@dataclass(frozen=True)
class Target:
    """Memory of a peer: where it is over there, UCX's handle, and where it is mapped here, if it is."""

    base: int
    nbytes: int
    rkey: int
    mapped: int | None


@dataclass
class OpenWrite:
    """A write under way: first its bytes, then (not when mapped) a flush, then the notice."""

    write: Write
    source: Memory
    target: Target
    started: int = 0  # bytes that have been copied or put
    flushing: bool = False
    notified: bool = False
    requests: list[int] = field(default_factory=list)


@dataclass
class Peer:
    """See the module's docstring."""

    name: str
    endpoint: int
    lanes: str
    targets: dict[int, Target]
    queued: deque[Write] = field(default_factory=deque)
    open: list[OpenWrite] = field(default_factory=list)
    in_use: threading.Lock = field(default_factory=threading.Lock)  # held by whoever writes into what is mapped

    @property
    def writes(self) -> list[Write]:
        """Writes that wait or are under way, oldest first."""
        return [*(item.write for item in self.open), *self.queued]

    @property
    def mapped(self) -> bool:
        """Whether bytes reach all of the peer's memory without a network."""
        return bool(self.targets) and all(target.mapped is not None for target in self.targets.values())


def reach(worker: UcxWorker, name: str, description: Description, *, allow_mapped: bool, device_memory: bool) -> Peer:
    """Open an endpoint to a described peer, and map its memory where that is possible and sound.

    Args:
        device_memory: whether this side moves GPUs' memory. What it writes then is not always the host's to copy, so it
            maps nothing; and only such a side can write into a GPU's.

    Raises:
        TransferError: it cannot be reached.
    """
    if any(region.on_device for region in description.regions) and not device_memory:
        raise TransferError(
            "the peer's slots are in a GPU's memory, into which only a side can write that moves a GPU's memory, too: "
            "set Transfer.device_memory = 'never' over there"
        )
    own = worker.address()
    if (own[0] ^ description.worker[0]) & _ADDRESS_VERSION:
        version = ".".join(map(str, description.ucx))
        raise TransferError(f"the peer's UCX {version} states its address in another form than ours: use one UCX")
    endpoint = worker.open(description.worker)
    neighbour = allow_mapped and not device_memory and is_neighbour(description.process)
    targets: dict[int, Target] = {}
    try:
        for region in description.regions:
            rkey = worker.unpack(endpoint, region.rkey)
            mapped = worker.pointer(rkey, region.base) if neighbour else None
            if mapped is not None and not is_mapped(mapped, region.nbytes):
                mapped = None
            targets[region.id] = Target(region.base, region.nbytes, rkey, mapped)
        lanes = worker.lanes(endpoint)
    except BaseException:
        for target in targets.values():
            worker.release_key(target.rkey)
        worker.close_endpoint(endpoint)
        raise
    return Peer(name, endpoint, lanes, targets)


def advance(worker: UcxWorker, peer: Peer, item: OpenWrite) -> bool:
    """Take a write one step further. Returns whether it is done.

    Raises:
        PathFailed: one of its requests has failed.
    """
    item.requests = [request for request in item.requests if not _ended(worker, request)]
    if item.notified:
        return not item.requests
    if item.started < item.write.nbytes:
        if len(item.requests) < _PUTS_AHEAD:
            _move_piece(worker, peer, item)
        if item.started < item.write.nbytes:
            return False
    if item.target.mapped is None and item.write.nbytes and not item.flushing:
        # A put that has completed proves nothing about the other side; a flush does.
        _track(worker, item, worker.flush(peer.endpoint))
        item.flushing = True
    if not item.requests:
        _track(worker, item, worker.notify(peer.endpoint, item.write.notice))
        item.notified = True
        return not item.requests
    return False


def _move_piece(worker: UcxWorker, peer: Peer, item: OpenWrite) -> None:
    write, target = item.write, item.target
    size = min(_PIECE, write.nbytes - item.started)
    here, there = write.offset + item.started, write.peer_offset + item.started
    if target.mapped is not None:
        # A plain copy by address releases the interpreter lock, and leaves no view behind that could outlive the map.
        ctypes.memmove(target.mapped + there, item.source.address + here, size)
    else:
        _track(worker, item, worker.put(peer.endpoint, item.source, here, size, target.base + there, target.rkey))
    item.started += size


def _track(worker: UcxWorker, item: OpenWrite, request: int) -> None:
    if not _ended(worker, request):
        item.requests.append(request)


def _ended(worker: UcxWorker, request: int) -> bool:
    outcome = worker.outcome(request)
    if outcome:
        raise PathFailed(outcome)
    return outcome is not None

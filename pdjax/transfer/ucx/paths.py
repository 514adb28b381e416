"""All paths of a backend: peers come, are written to, fail and leave. Runs on the UCX thread; nothing waits."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from pdjax.transfer.backend import EventSink, PeerLost, TransferError, Write, WriteDone, WriteFailed
from pdjax.transfer.checks import problem_with
from pdjax.transfer.ucx import description
from pdjax.transfer.ucx.peer import MAX_OPEN, OpenWrite, PathFailed, Peer, advance, reach
from pdjax.transfer.ucx.worker import Memory, UcxWorker

_GOODBYE_BOUND = 2.0  # seconds that a peer has to take what was sent before its path is closed


@dataclass
class _Leaving:
    """A path that is being closed: a flush until `until` at most, then a forced close, then its keys are released."""

    peer: Peer
    requests: list[int]
    until: float
    forced: bool


class Paths:
    """`memory` is the backend's own, by region; it may grow."""

    def __init__(
        self,
        worker: UcxWorker,
        memory: dict[int, Memory],
        on_event: EventSink,
        *,
        allow_mapped: bool,
        device_memory: bool,
    ) -> None:
        self._worker = worker
        self._memory = memory
        self._on_event = on_event
        self._allow_mapped = allow_mapped
        self._device_memory = device_memory
        self._peers: dict[str, Peer] = {}
        self._leaving: list[_Leaving] = []
        self._openings: list[int] = []  # requests that made a connection

    @property
    def leaving(self) -> bool:
        """Whether paths are being closed."""
        return bool(self._leaving)

    def connect(self, name: str, data: bytes) -> None:
        """Open a path to a described peer. Raises `TransferError`."""
        if name in self._peers:
            raise TransferError(f"a peer named {name!r} is connected already")
        described = description.decode(data)
        peer = reach(self._worker, name, described, allow_mapped=self._allow_mapped, device_memory=self._device_memory)
        self._peers[name] = peer
        # UCX connects on first use: use it now, so that the peer's death is noticed from the start.
        self._openings.append(self._worker.flush(peer.endpoint))

    def path(self, name: str) -> str:
        """How bytes reach a peer, in words. May be called from any thread."""
        peer = self._peers.get(name)
        if peer is None:
            return "not connected"
        return f"mapped, notices by {peer.lanes}" if peer.mapped else peer.lanes

    @contextmanager
    def mapped(self, name: str, region: int, offset: int, nbytes: int) -> Iterator[int | None]:
        """Where a range is mapped, or None. Any thread may call; one at a time gets a peer's memory."""
        peer = self._peers.get(name)
        target = peer.targets.get(region) if peer is not None else None
        mapped = target.mapped if target is not None and 0 <= offset <= target.nbytes - nbytes else None
        if peer is None or mapped is None or not peer.in_use.acquire(blocking=False):
            yield None
            return
        try:
            yield mapped + offset
        finally:
            peer.in_use.release()

    def start(self, write: Write) -> None:
        """Queue a write, or fail it at once."""
        peer = self._peers.get(write.peer)
        if peer is None:
            problem = f"no peer named {write.peer!r} is connected"
        else:
            source, target = self._memory.get(write.region), peer.targets.get(write.peer_region)
            problem = problem_with(write, source and source.nbytes, target and target.nbytes)
            if problem is None:
                peer.queued.append(write)
                return
        self._on_event(WriteFailed(write.id, problem))

    def disconnect(self, name: str) -> None:
        """Close a path, after what was sent has left. Open writes fail; an unknown peer is ignored."""
        peer = self._peers.get(name)
        if peer is None:
            return
        if peer.writes:
            self._end(peer, "the peer was disconnected")
            return
        del self._peers[name]
        flush = self._worker.flush(peer.endpoint)
        self._leaving.append(_Leaving(peer, [flush], time.monotonic() + _GOODBYE_BOUND, forced=False))

    def failed(self, endpoint: int, cause: str) -> None:
        """UCX has given up an endpoint."""
        for peer in list(self._peers.values()):
            if peer.endpoint == endpoint:
                self._lose(peer, f"UCX says: {cause}")
        for leaving in self._leaving:
            if leaving.peer.endpoint == endpoint:
                leaving.until = 0.0

    def close(self) -> None:
        """Start closing all paths. Open writes fail."""
        for peer in list(self._peers.values()):
            self._end(peer, "the backend was closed")
        for leaving in self._leaving:
            leaving.until = 0.0

    def advance(self, now: float) -> bool:
        """Take everything one step further. Returns whether anything moved."""
        self._openings = [request for request in self._openings if self._worker.outcome(request) is None]
        moved = False
        for peer in list(self._peers.values()):
            if peer.open or peer.queued:
                moved |= self._serve(peer, now)
        for leaving in list(self._leaving):
            moved |= self._see_off(leaving, now)
        return moved

    def next_deadline(self) -> float | None:
        """The first deadline of an open write."""
        return min((write.deadline for peer in self._peers.values() for write in peer.writes), default=None)

    def _serve(self, peer: Peer, now: float) -> bool:
        late = [write for write in peer.writes if now > write.deadline]
        if late:
            # UCX cannot take a single write back, only close the whole path.
            self._lose(peer, f"write {late[0].id} of {late[0].nbytes} bytes was not done by its deadline")
            return True
        while peer.queued and len(peer.open) < MAX_OPEN:
            write = peer.queued.popleft()
            peer.open.append(OpenWrite(write, self._memory[write.region], peer.targets[write.peer_region]))
        moved = False
        for item in list(peer.open):
            before = (item.started, item.notified)
            try:
                done = advance(self._worker, peer, item)
            except PathFailed as failure:
                self._lose(peer, f"UCX says: {failure}")
                return True
            if done:
                peer.open.remove(item)
                self._on_event(WriteDone(item.write.id))
            moved |= done or before != (item.started, item.notified)
            if item.started < item.write.nbytes:
                break  # one after the other: the first chunk is then unpacked while the second is on its way
        return moved

    def _lose(self, peer: Peer, cause: str) -> None:
        self._end(peer, cause)
        self._on_event(PeerLost(peer.name, cause))

    def _end(self, peer: Peer, cause: str) -> None:
        """Close a path at once, then fail its writes: after a forced close, nothing reads their sources any more."""
        del self._peers[peer.name]
        self._leaving.append(self._force(peer, []))
        for write in peer.writes:
            self._on_event(WriteFailed(write.id, cause))

    def _force(self, peer: Peer, unfinished: list[int]) -> _Leaving:
        requests = [*unfinished, *(request for item in peer.open for request in item.requests)]
        requests.append(self._worker.close_endpoint(peer.endpoint))
        return _Leaving(peer, requests, 0.0, forced=True)

    def _see_off(self, leaving: _Leaving, now: float) -> bool:
        leaving.requests = [request for request in leaving.requests if self._worker.outcome(request) is None]
        if not leaving.forced and (not leaving.requests or now > leaving.until):
            self._leaving.remove(leaving)
            self._leaving.append(self._force(leaving.peer, leaving.requests))
            return True
        # Never released: nobody gets the memory of this peer any more.
        if leaving.forced and not leaving.requests and leaving.peer.in_use.acquire(blocking=False):
            self._leaving.remove(leaving)
            for target in leaving.peer.targets.values():
                self._worker.release_key(target.rkey)
            return True
        return False

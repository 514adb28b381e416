"""The processes of one instance: they meet through MPI, and then its leader reaches each of them over a connection.

MPI says who is there and carries the addresses. What follows goes over connections from every worker to rank 0, Unix
sockets on one host and TCP between hosts, because a frame is then its own doorbell: a worker sleeps in `recv`, where
MPI's waits would spin; the end of a connection tells the death of a process at once; and a plan never queues behind
MPI's join with a peer that has died halfway.
"""

from __future__ import annotations

import hmac
import os
import secrets
import socket
import struct
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from pdjax.net import mpi
from pdjax.net.addresses import address_towards, own_addresses
from pdjax.net.crew import MEET_SECONDS, Crew, Worker, prepare

_CARD = struct.Struct("<32sI")  # by which a worker shows that it is of this instance: the token, and its rank
_CARD_SECONDS = 5.0  # in which whoever connects must have shown one


class WorldError(Exception):
    """The processes that were started together can't be one instance; the sentence says why."""


class _Hello(msgspec.Struct, frozen=True):
    host: str
    addresses: list[str]
    pid: int
    facts: dict[str, str]


class _Meeting(msgspec.Struct, frozen=True):
    """Where the leader is: a Unix socket's path on one host, else (host, port). Workers show the token."""

    address: str | tuple[str, int]
    coordinator: str
    token: bytes


@dataclass(frozen=True)
class World:
    """One process's view of its instance.

    Attributes:
        rank: this process; 0 is the leader.
        size: how many there are.
        local_rank, local_size: its number among those of its host, and how many those are.
        coordinator: where `jax.distributed` of this instance meets, host:port.
        crew: the leader's connections; None with no workers, and on a worker.
        worker: a worker's connection; None on the leader.
    """

    rank: int
    size: int
    local_rank: int
    local_size: int
    coordinator: str
    crew: Crew | None = None
    worker: Worker | None = None


def meet(facts: Mapping[str, str]) -> World:
    """Have all processes of this MPI job meet; each must call this. Loads MPI.

    Args:
        facts: what must be the same in all of them, in words, by name.

    Raises:
        WorldError: a fact differs, or a worker does not connect in time.
    """
    comm = mpi.load().COMM_WORLD
    own = _Hello(socket.gethostname(), sorted(own_addresses()), os.getpid(), dict(facts))
    hellos = [msgspec.msgpack.decode(body, type=_Hello) for body in _exchange(comm, msgspec.msgpack.encode(own))]
    rank, size = comm.Get_rank(), comm.Get_size()
    problem = next((text for other in range(size) if (text := _differs(other, hellos)) is not None), None)
    if problem is not None:
        raise WorldError(problem)
    neighbours = [other for other in range(size) if hellos[other].host == own.host]
    one_host = len(neighbours) == size
    with tempfile.TemporaryDirectory(prefix="pdjax-") as private:  # mode 0700: only this user may connect
        listener, invitation = None, b""
        if rank == 0:
            host = "127.0.0.1" if one_host else _reached_at(own, hellos)
            listener = _listen(f"{private}/leader.sock", size) if one_host else _server(host, size)
            address = listener.getsockname() if one_host else (host, listener.getsockname()[1])
            meeting = _Meeting(address, _joined(host, _free_port(host)), secrets.token_bytes(32))
            invitation = msgspec.msgpack.encode(meeting)
        meeting = msgspec.msgpack.decode(_exchange(comm, invitation)[0], type=_Meeting)
        shared = (rank, size, neighbours.index(rank), len(neighbours), meeting.coordinator)
        mpi.forget_names()
        if listener is None:
            return World(*shared, worker=Worker(_report_in(meeting, rank)))
        with listener:
            names = {each: f"rank {each} (process {hellos[each].pid} on {hellos[each].host})" for each in range(size)}
            crew = Crew(_muster(listener, meeting.token, size), names) if size > 1 else None
        return World(*shared, crew=crew)


def _exchange(comm: Any, body: bytes) -> list[bytes]:
    """What each process has given, by rank."""
    sizes = np.zeros(comm.Get_size(), np.int64)
    comm.Allgather(np.array([len(body)], np.int64), sizes)
    ends = np.cumsum(sizes).tolist()
    everything = bytearray(ends[-1])
    comm.Allgatherv(body, [everything, sizes.tolist(), [0, *ends[:-1]], mpi.load().BYTE])
    return [bytes(everything[end - count : end]) for end, count in zip(ends, sizes.tolist(), strict=True)]


def _differs(rank: int, hellos: list[_Hello]) -> str | None:
    """A sentence if a process says other things of itself than the leader does."""
    first, other = hellos[0].facts, hellos[rank].facts
    for name in first | other:
        if first.get(name) != other.get(name):
            return (
                f"the processes of one instance must agree: {name} is {other.get(name)} in rank {rank} on "
                f"{hellos[rank].host}, and {first.get(name)} in rank 0 on {hellos[0].host}"
            )
    return None


def _reached_at(own: _Hello, hellos: list[_Hello]) -> str:
    """The leader's address for workers on other hosts."""
    others = (hello.addresses for hello in hellos if hello.host != own.host)
    return next((found for each in others if (found := address_towards(each)) is not None), own.host)


def _free_port(host: str) -> int:
    with _server(host) as probe:
        return probe.getsockname()[1]


def _joined(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _server(host: str, backlog: int | None = None) -> socket.socket:
    return socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET, backlog=backlog)


def _listen(path: str, backlog: int) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path)
    listener.listen(backlog)
    return listener


def _report_in(meeting: _Meeting, rank: int) -> socket.socket:
    if isinstance(meeting.address, str):
        connection = socket.socket(socket.AF_UNIX)
        connection.settimeout(MEET_SECONDS)
        connection.connect(meeting.address)
    else:
        connection = socket.create_connection(meeting.address, timeout=MEET_SECONDS)
    connection.sendall(_CARD.pack(meeting.token, rank))
    return prepare(connection)


def _muster(listener: socket.socket, token: bytes, size: int) -> dict[int, socket.socket]:
    """Connections of all workers, by rank. Strangers are turned away."""
    found: dict[int, socket.socket] = {}
    listener.settimeout(MEET_SECONDS)
    while len(found) < size - 1:
        try:
            connection, _ = listener.accept()
        except TimeoutError as error:
            missing = sorted(set(range(1, size)) - set(found))
            raise WorldError(f"ranks {missing} have not connected to their leader in {MEET_SECONDS:g} s") from error
        rank = _admitted(connection, token)
        if rank is None or not 0 < rank < size or rank in found:
            connection.close()
        else:
            found[rank] = prepare(connection)
    return found


def _admitted(connection: socket.socket, token: bytes) -> int | None:
    """The rank of whoever has connected; None if it is a stranger. Nothing is read of what follows the card."""
    connection.settimeout(_CARD_SECONDS)
    card = b""
    try:
        while len(card) < _CARD.size and (part := connection.recv(_CARD.size - len(card))):
            card += part
    except OSError:
        return None
    if len(card) < _CARD.size:
        return None
    shown, rank = _CARD.unpack(card)
    return rank if hmac.compare_digest(shown, token) else None

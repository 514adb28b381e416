"""How the processes of one instance meet, and what each learns of another's end; real ranks under mpiexec."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

from pdjax.launch.mpiexec import find_mpiexec
from pdjax.net.mpi import environment
from tests.hosts import Hosts, needs_hosts
from tests.jobs import REPOSITORY

START = """
import os, sys, time, threading
from pdjax.net import mpi
from pdjax.net.crew import Gone
from pdjax.net.world import WorldError, meet
rank = int(os.environ["PMI_RANK"])
def tell(*words):
    with open(os.environ["TOLD"], "a") as file: file.write(" ".join(map(str, (rank, *words))) + "\\n")
"""


# A process manager kills the others as soon as it sees that one has ended out of turn; an instance's processes, and
# these, are therefore children of a shell that stays a little longer.
MPIEXEC = [find_mpiexec(), "-n"]
LINGER = '"$@"; code=$?; sleep "$LINGER"; exit $code'


def run(code: str, *, start: Sequence[str] = (*MPIEXEC, "3"), linger: float = 0.0) -> tuple[int, list[str]]:
    """Run code in an mpiexec job. Returns its exit code and what it told, in order."""
    command = [*start, "/bin/sh", "-c", LINGER, "sh", sys.executable, "-c", START + code]
    with tempfile.NamedTemporaryFile("r") as told:
        more = {"PYTHONPATH": str(REPOSITORY), "TOLD": told.name, "LINGER": str(linger)}
        env = environment(dict(os.environ)) | more
        ended = subprocess.run(command, env=env, timeout=90, stdin=subprocess.DEVNULL, check=False)
        return ended.returncode, told.read().splitlines()


def test_every_worker_gets_every_frame_in_order_and_is_heard() -> None:
    code, said = run("""
world = meet({"model": "same"})
assert (world.rank, world.size, world.local_rank, world.local_size) == (rank, 3, rank, 3)
if rank == 0:
    heard, lock = [], threading.Event()
    def on_frame(rank, body):
        heard.append((rank, body))
        if len(heard) == 2: lock.set()
    world.crew.watch(on_frame=on_frame, on_lost=lambda *lost: tell("lost", *lost))
    for number in range(50): world.crew.tell(b"%d" % number + bytes(20_000 * (number % 3)))
    lock.wait(30)
    tell(*sorted(heard))
    world.crew.forgive()
else:
    bodies = [world.worker.receive(None) for _ in range(50)]
    assert [int(body.rstrip(bytes(1))) for body in bodies] == list(range(50))
    assert [len(body) > 20_000 for body in bodies] == [number % 3 > 0 for number in range(50)]
    assert world.worker.receive(0.05) is None
    world.worker.send(b"done")
mpi.shutdown(0)
""")
    assert code == 0, said
    assert said == ["0 (1, b'done') (2, b'done')"]


def test_those_of_several_hosts_meet_over_tcp_and_strangers_are_turned_away() -> None:
    code, said = run("""
import socket
from pdjax.net import world as worlds
socket.gethostname = lambda: f"127.0.0.{rank + 1}"
report_in, strangers = worlds._report_in, []
def in_pieces(meeting, rank):
    for words in (b"GET / HTTP/1.1" + bytes(99), b"short", bytes(32) + b"\\1" + bytes(3), b""):
        strangers.append(socket.create_connection(meeting.address))
        strangers[-1].sendall(words)
    strangers[1].close()
    connection = socket.create_connection(meeting.address)
    card = worlds._CARD.pack(meeting.token, rank) + (5).to_bytes(4, "little") + b"early"
    for at in range(0, len(card), 9):
        connection.sendall(card[at:at + 9])
        time.sleep(0.02)
    return worlds.prepare(connection)
if rank == 1: worlds._report_in = in_pieces
world = meet({})
assert (world.rank, world.size, world.local_rank, world.local_size) == (rank, 3, 0, 1)
if rank == 0:
    heard, all_there = [], threading.Event()
    def on_frame(rank, body):
        heard.append((rank, body))
        if len(heard) == 3: all_there.set()
    world.crew.watch(on_frame=on_frame, on_lost=lambda *lost: tell("lost", *lost))
    world.crew.tell(b"hello")
    all_there.wait(30)
    tell(*sorted(heard))
    world.crew.forgive()
else:
    assert world.worker.receive(30) == b"hello"
    world.worker.send(b"done")
mpi.shutdown(0)
""")
    assert code == 0, said
    assert said == ["0 (1, b'done') (1, b'early') (2, b'done')"]


@needs_hosts
def test_a_leader_is_found_from_another_host_whatever_its_name_means_to_itself(tmp_path: Path) -> None:
    with closing(Hosts(2, tmp_path, own_name_is_local=True)) as hosts:
        code, said = run("tell(meet({}).coordinator.split(':')[0])\nmpi.shutdown(0)", start=hosts.mpiexec([1, 2]))
        assert code == 0 and sorted(said) == [f"{rank} {hosts.address(1)}" for rank in (0, 1)]


def test_processes_that_were_started_differently_are_told_in_what() -> None:
    code, said = run(
        """
try: meet({"Cache.pages": "8", "Instance.tp": str(rank // 2)})
except WorldError as error: tell(error)
mpi.shutdown(0)
""",
        linger=2,
    )
    assert len(said) == 3, (code, said)
    assert all("Instance.tp is 1 in rank 2 on " in line and "and 0 in rank 0 on " in line for line in said)


def test_the_leader_hears_at_once_and_by_name_of_a_worker_that_dies() -> None:
    _, said = run(
        """
world = meet({})
if rank == 0:
    lost = threading.Event()
    def on_lost(rank, reason):
        tell(reason)
        lost.set()
    world.crew.watch(on_frame=print, on_lost=on_lost)
    assert lost.wait(30)
    os._exit(0)
if rank == 2:
    tell(os.getpid())
    os._exit(0)  # without a word, and without MPI's end
time.sleep(30)
""",
        linger=2,
    )
    pid = next(line.split()[1] for line in said if line.startswith("2 "))
    assert any(line.startswith(f"0 rank 2 (process {pid} on ") and line.endswith("is gone") for line in said), said


def test_a_worker_hears_at_once_of_its_leaders_death_whatever_it_does() -> None:
    _, said = run(
        """
world = meet({})
if rank == 0:
    time.sleep(0.5)
    os._exit(0)
gone = threading.Event()
world.worker.watch(gone.set)
assert gone.wait(30)
try: world.worker.receive(None)
except Gone as end: tell("its leader", end)
os._exit(0)
""",
        start=(*MPIEXEC, "2"),
        linger=2,
    )
    assert "1 its leader is gone" in said

"""Instances on hosts of their own, one of them perhaps on several."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from halves import Half, Room, open_room
from processes import Part, free_port, instance, wait_all_ready
from tiny_pair import BOUND_SECONDS, CONFIG, START_SECONDS, prompt, until, wait_ended

from tests.hosts import Hosts

SECRET = {"PDJAX_SECRET": "what all of them know", "PYTHONFAULTHANDLER": "1"}
SLOTS = 4
Answer = Callable[[list[int], int], list[int]]


class Far:
    """Two prefill instances and a decode instance; each has a process on each of its hosts, the leader on the first."""

    def __init__(
        self, folder: Path, model: Path, hosts: Hosts, *, prefill: list[int], decode: list[int], other: list[int]
    ) -> None:
        self.hosts, self.bootstrap = hosts, free_port()
        self._folder, self._model = folder, model
        self.prefill, self.decode, self.other = (
            self._start("prefill", prefill),
            self._start("decode", decode),
            self._start("prefill", other),
        )
        wait_all_ready(self.parts, START_SECONDS)

    @property
    def parts(self) -> tuple[Part, Part, Part]:
        return self.prefill, self.decode, self.other

    def _start(self, role: str, hosts: list[int]) -> Part:
        leader = self.hosts.address(hosts[0])
        options = {"config": CONFIG, "Model__folder": self._model, "env": SECRET}
        if role == "prefill":
            options |= {"Disagg__bootstrap_host": leader, "Disagg__bootstrap_port": self.bootstrap}
        before = self.hosts.on(hosts[0])
        if len(hosts) > 1:
            options |= {"Instance__processes": len(hosts), "Instance__tp": len(hosts)}
            before = self.hosts.mpiexec(hosts)
        return instance(self._folder, role, host=leader, before=before, **options)

    def room(self, prefill: Part, length: int, tokens: int = 8, sides: str = "pd") -> Room:
        return open_room(prefill, self.decode, self.bootstrap, prompt(length), tokens, sides=sides)

    def cut_midway(self, slow: int, cut: int) -> list[Room]:
        """Pull a host's cable while the first prefill instance sends, slowly from one of its hosts, with slots out.
        Returns its rooms."""
        with self.hosts.slow(slow, 20):
            rooms = [self.room(self.prefill, 1500) for _ in range(6)]
            until(lambda: self.decode.metrics()["pdjax_staging_slots_free"] < SLOTS, self.decode)
            self.hosts.cut(cut)
        return rooms

    def kill(self) -> None:
        for part in self.parts:
            part.kill()


@contextmanager
def far_apart(folder: Path, model: Path, **hosts: list[int]) -> Iterator[Far]:
    """`Far`, with hosts for it that end with it."""
    with closing(Hosts(max(map(max, hosts.values())), folder)) as made, made.joined():
        far = Far(folder, model, made, **hosts)
        yield far
        far.kill()


def answers_everywhere(far: Far, answer: Answer) -> None:
    """Prompts of every length by both prefill instances, after which all is at rest."""
    rooms = [far.room(prefill, length) for prefill in (far.prefill, far.other) for length in (1, 40, 200, 1500)]
    for room in rooms:
        assert is_right(room, answer), room
    for part in far.parts:
        at_rest(part)


def ended_with(half: Half | None, *words: str) -> bool:
    assert half is not None
    return half.told and any(word in half.error for word in words)


def is_right(room: Room, answer: Answer) -> bool:
    wait_ended([room])
    assert room.decode is not None
    return room.decode.output_ids == answer(room.prompt, room.tokens)


def at_rest(part: Part, seconds: float = BOUND_SECONDS) -> None:
    """Every page and slot is home."""

    def home() -> bool:
        metrics = part.metrics()
        busy = metrics["pdjax_live_requests"] or metrics["pdjax_rooms"]
        all_free = metrics["pdjax_free_pages"] == metrics["pdjax_pages"]
        return not busy and all_free and metrics["pdjax_staging_slots_free"] == SLOTS

    until(home, part, seconds)

"""A pair over a tiny random model whose writes can be held, with rooms in every state at once."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from halves import Room, open_room
from processes import Part, free_port, instance, wait_all_ready

CONFIG = Path(__file__).with_name("tiny.gin")
BACKEND = Path(__file__).with_name("delayed_writes")
START_SECONDS = 300.0
HOLD_SECONDS = 4.0  # of a write; below the transfer timeout
STAGED_SECONDS = 2.0  # of these, that rooms in every state are kept for at least
_STAGINGS = 3
REST_SECONDS = 25.0  # until everything is home again, on a loaded machine
BOUND_SECONDS = 30.0  # in which every request ends, whatever happens
LONG = [7 * token % 250 for token in range(60)], 3000  # a prompt and its tokens: it decodes for some seconds
STATES = ("bootstrapping on prefill", "bootstrapping on decode", "waiting", "transferring", "decoding")


class TinyPair:
    """One prefill and one decode instance, asked directly; a part that was ended can be replaced."""

    def __init__(
        self, folder: Path, model: Path, answer: Callable[[list[int], int], list[int]], **options: Any
    ) -> None:
        self._folder, self._model, self.answer, self._options = folder, model, answer, options
        self._delay = folder / "delay"
        self.bootstrap = free_port()
        self.prefill = self.start("prefill")
        self.decode = self.start("decode")
        wait_all_ready(self.parts, START_SECONDS)
        self.capacity = {part.name: part.metrics()["pdjax_free_pages"] for part in self.parts}

    @property
    def parts(self) -> tuple[Part, Part]:
        return self.prefill, self.decode

    def start(self, role: str, port: int | None = None) -> Part:
        options: dict[str, Any] = {"Model__folder": self._model, "Transfer__backend": "delayed", "Server__port": port}
        options |= self._options
        if role == "prefill":
            # Two rooms whose writes are held keep a third one waiting.
            options |= {"Disagg__bootstrap_port": self.bootstrap, "Engine__max_running_requests": 2}
        return instance(self._folder, role, config=CONFIG, env=delayed_writes(self._delay), **options)

    def replace(self, role: str, *, same_ports: bool) -> None:
        """End what is left of an instance and start its successor."""
        old: Part = getattr(self, role)
        old.kill()
        if role == "prefill" and not same_ports:
            self.bootstrap = free_port()
        setattr(self, role, self.start(role, old.port if same_ports else None))
        getattr(self, role).wait_ready(START_SECONDS)

    def mend(self) -> None:
        """Replace what a test that failed has left broken."""
        self.hold(0)
        for part in self.parts:
            if not part.healthy():
                self.replace(part.name, same_ports=False)
        self.answers_rightly()

    def hold(self, seconds: float = HOLD_SECONDS) -> None:
        """Writes from now on are held for so long, and both sides' steps are slow; 0 lets them go."""
        self._delay.write_text(str(seconds) if seconds else "")

    def slow(self) -> None:
        """What is decoded from now on takes its time; `hold(0)` ends it."""
        self._delay.write_text("slow")

    def drop(self) -> None:
        """Writes from now on are lost, until `hold` says otherwise."""
        self._delay.write_text("drop")

    def held(self) -> int:
        """How many writes have been held so far."""
        return self.prefill.log.read_text(errors="replace").count("is held")

    def room(self, prompt: list[int], tokens: int = 8, sides: str = "pd") -> Room:
        return open_room(self.prefill, self.decode, self.bootstrap, prompt, tokens, sides=sides)

    def is_right(self, room: Room) -> bool:
        """Whether the decode half has got exactly the tokens that a unified engine gives."""
        assert room.decode is not None
        return room.decode.output_ids == self.answer(room.prompt, room.tokens)

    def answers_rightly(self) -> None:
        room = self.room(prompt(40))
        wait_ended([room])
        assert self.is_right(room), room

    def at_rest(self) -> None:
        """Every page and slot is home, and nobody is left waiting for anything."""
        for part in self.parts:
            deadline = time.monotonic() + REST_SECONDS
            while True:
                metrics = part.metrics()
                busy = {
                    name: metrics[name]
                    for name in ("pdjax_live_requests", "pdjax_rooms", "pdjax_writes_in_flight")
                    if metrics.get(name)
                }
                slots, pages = metrics["pdjax_staging_slots_free"], metrics["pdjax_free_pages"]
                if not busy and slots == 4 and pages == self.capacity[part.name]:
                    break
                assert time.monotonic() < deadline, f"{part.name}: {busy}, {pages} pages, {slots} slots\n{part.tail()}"
                time.sleep(0.2)

    def kill(self) -> None:
        for part in self.parts:
            part.kill()


@dataclass
class Staged:
    """Rooms by state."""

    rooms: dict[str, list[Room]] = field(default_factory=dict)

    def all(self, *states: str) -> list[Room]:
        return [room for state in states or STATES for room in self.rooms.get(state, [])]


def stage(pair: TinyPair, states: tuple[str, ...] = STATES) -> Staged:
    """Have rooms in these states, and keep them there for some seconds. On a machine that needs for it all the time for
    which writes are held, it is done anew."""
    for _ in range(_STAGINGS):
        staged = _stage(pair, states)
        if staged is not None:
            return staged
    raise AssertionError(f"writes are held for {HOLD_SECONDS} s, and {_STAGINGS} times that was too short")


def _stage(pair: TinyPair, states: tuple[str, ...]) -> Staged | None:
    """None: it took too long. All rooms have ended then."""
    staged = Staged()
    pair.hold(0)
    if "decoding" in states:
        staged.rooms["decoding"] = [pair.room(*LONG)]
        half = staged.rooms["decoding"][0].decode
        assert half is not None and half.first.wait(30) and not half.ended_at, half
    held, began = pair.held(), time.monotonic()
    pair.hold()
    is_late = lambda: time.monotonic() > began + HOLD_SECONDS - STAGED_SECONDS  # noqa: E731
    # In this order, so that what needs more than one message has gone before the writes are let go again.
    if "bootstrapping on prefill" in states:
        staged.rooms["bootstrapping on prefill"] = [pair.room(prompt(20), sides="p")]
    if "bootstrapping on decode" in states:
        staged.rooms["bootstrapping on decode"] = [pair.room(prompt(20), sides="d")]
    if "transferring" in states:
        staged.rooms["transferring"] = [pair.room(prompt(200)), pair.room(prompt(100))]
        until(lambda: pair.held() >= held + 2 or is_late(), pair.prefill)
    if "waiting" in states:
        staged.rooms["waiting"] = [pair.room(prompt(150))]
        until(lambda: pair.prefill.metrics()["pdjax_waiting_requests"] >= 1 or is_late(), pair.prefill)
    if not is_late():
        return staged
    pair.hold(0)
    wait_ended(staged.all())
    return None


def delayed_writes(delay: Path) -> dict[str, str]:
    """The environment of an instance whose writes are held for as long as the file `delay` says."""
    path = os.pathsep.join([str(BACKEND), *filter(None, [os.environ.get("PYTHONPATH")])])
    return {"PYTHONPATH": path, "PDJAX_TEST_DELAY": str(delay), "PYTHONFAULTHANDLER": "1"}


def prompt(tokens: int) -> list[int]:
    """A prompt that no other request shares."""
    return [random.randrange(250) for _ in range(tokens)]


def until(condition: Callable[[], bool], part: Part, seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"it did not come:\n{part.tail()}"
        time.sleep(0.05)


def wait_ended(rooms: list[Room], seconds: float = BOUND_SECONDS) -> None:
    deadline = time.monotonic() + seconds
    for half in [half for room in rooms for half in room.halves]:
        half.join(max(0.0, deadline - time.monotonic()))
        assert half.ended_at, f"{half!r} has not ended after {seconds} s"


def stop(part: Part) -> Callable[[], None]:
    """SIGSTOP an instance's leader; returns what lets it go on."""
    leader = part.leader()
    leader.send_signal(signal.SIGSTOP)
    return lambda: leader.send_signal(signal.SIGCONT)

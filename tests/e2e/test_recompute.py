"""An instance that ends or hangs loses no request that another can serve: its client gets the right tokens, and hears
nothing of it.
"""

from __future__ import annotations

import contextlib
import importlib.util
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from halves import Half
from processes import Part, free_port, get, instance, router, stream
from tiny_pair import BOUND_SECONDS, CONFIG, HOLD_SECONDS, LONG, START_SECONDS, delayed_writes, prompt, stop, until

pytestmark = pytest.mark.e2e
PROMPTS = (200, 100, 150, 40, 120, 90)


class Fleet:
    """Two prefill and two decode instances of a tiny model, whose writes can be held; a dead one can be replaced."""

    def __init__(self, folder: Path, model: Path) -> None:
        self.folder = folder
        self._options = {"Model__folder": model, "Transfer__backend": "delayed", "config": CONFIG}
        # Whoever waits, waits for the end of an instance. One decode instance has room for all that two have had.
        self._options |= {"Cache__pages": 901}
        self._options |= {"Disagg__transfer_timeout": 60.0, "Disagg__waiting_timeout": 60.0}
        self._bootstraps: dict[int, int] = {}
        self.prefill: list[Part] = []
        self.decode: list[Part] = []
        try:
            self.prefill = [self._start("prefill") for _ in range(2)]
            self.decode = [self._start("decode") for _ in range(2)]
            for part in self.parts:
                part.wait_ready(START_SECONDS)
        except BaseException:
            self.kill()
            raise

    @property
    def parts(self) -> list[Part]:
        return [*self.prefill, *self.decode]

    def bootstrap(self, part: Part) -> int:
        return self._bootstraps[part.port]

    def _start(self, role: str, old: Part | None = None) -> Part:
        options: dict[str, Any] = {"Server__port": old.port if old else None}
        bootstrap = self._bootstraps[old.port] if old and role == "prefill" else free_port()
        if role == "prefill":
            options |= {"Disagg__bootstrap_port": bootstrap, "Engine__max_running_requests": 2}
        port = options["Server__port"] = options["Server__port"] or free_port()
        part = instance(self.folder, role, env=delayed_writes(self._delay(port)), **self._options, **options)
        if role == "prefill":
            self._bootstraps[part.port] = bootstrap
        return part

    def mend(self) -> None:
        """Have all instances sound, whatever the test before has done to them."""
        self.let_go()
        for parts in (self.prefill, self.decode):
            for index, part in enumerate(parts):
                if not part.healthy():
                    part.kill()
                    parts[index] = self._start(part.name, part)
        for part in self.parts:
            part.wait_ready(START_SECONDS)

    def hold(self, part: Part, seconds: float) -> None:
        """Its writes from now on are held for so long."""
        self._delay(part.port).write_text(str(seconds))

    def slow(self, part: Part) -> None:
        """What it decodes from now on takes its time."""
        self._delay(part.port).write_text("slow")

    def let_go(self) -> None:
        """All go on at full speed."""
        for part in self.parts:
            self._delay(part.port).write_text("")

    def _delay(self, port: int) -> Path:
        return self.folder / f"delay-{port}"

    def held(self, part: Part) -> int:
        return part.log.read_text(errors="replace").count("is held")

    def kill(self) -> None:
        for part in self.parts:
            part.kill()


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Iterator[Fleet]:
    fleet = Fleet(tmp_path_factory.mktemp("fleet"), tiny_model)
    try:
        yield fleet
    finally:
        fleet.kill()


@pytest.fixture
def fleet(shared: Fleet) -> Iterator[Fleet]:
    shared.mend()
    yield shared
    shared.let_go()


@contextlib.contextmanager
def routed(fleet: Fleet, prefill: list[Part], decode: list[Part], *options: str, kind: str = "ours") -> Iterator[Part]:
    if kind == "ours":
        part = router(fleet.folder, prefill, decode, *options)
    else:
        part = SGLangRouter(fleet, prefill, decode)
    try:
        part.wait_ready(START_SECONDS)
        until(lambda: get(f"{part.url}/readiness")[0] == 200, part, START_SECONDS)
        if kind == "ours":
            up = len(prefill) + len(decode)
            until(lambda: get(f"{part.url}/metrics")[1].count(b"} 1.0\n") == up, part, START_SECONDS)
        yield part
    finally:
        part.kill()


class SGLangRouter(Part):
    """sglang-router as it is by default, with its retries."""

    def __init__(self, fleet: Fleet, prefill: list[Part], decode: list[Part]) -> None:
        self.name, self.host, self.port = "sglang-router", "127.0.0.1", free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.log = fleet.folder / f"sglang-router-{self.port}.log"
        command = [sys.executable, "-m", "sglang_router.launch_router", "--pd-disaggregation", "--host", "127.0.0.1"]
        command += ["--port", str(self.port), "--prometheus-host", "127.0.0.1", "--prometheus-port", str(free_port())]
        command += ["--policy", "round_robin"]
        for part in prefill:
            command += ["--prefill", part.url, str(fleet.bootstrap(part))]
        for part in decode:
            command += ["--decode", part.url]
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT)


def ask(part: Part, input_ids: list[int], tokens: int, *, stream: bool, rid: str) -> Half:
    body = {"input_ids": input_ids, "stream": stream, "rid": rid}
    return Half(part, body | {"sampling_params": {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}})


def wait_ended(halves: list[Half], seconds: float = BOUND_SECONDS) -> None:
    deadline = time.monotonic() + seconds
    for half in halves:
        half.join(max(0.0, deadline - time.monotonic()))
        assert half.ended_at, f"{half!r} has not ended after {seconds} s"


def recomputed(part: Part) -> float:
    return part.metrics()["pdjax_recomputed_rooms_total"]


def at_rest(parts: list[Part]) -> None:
    """Every page and slot is home."""
    for part in parts:
        deadline = time.monotonic() + BOUND_SECONDS
        while True:
            metrics = part.metrics()
            busy = metrics["pdjax_rooms"] or metrics["pdjax_live_requests"]
            home = metrics["pdjax_free_pages"] == metrics["pdjax_pages"] and metrics["pdjax_staging_slots_free"] == 4
            if home and not busy:
                break
            assert time.monotonic() < deadline, f"{metrics}\n{part.tail()}"
            time.sleep(0.2)


@pytest.mark.parametrize(
    ("kind", "end"),
    [
        ("ours", "leader"),
        pytest.param(
            "SGLang's", "leader",
            marks=pytest.mark.skipif(importlib.util.find_spec("sglang_router") is None, reason="it is not installed"),
        ),
        pytest.param("ours", "all", marks=pytest.mark.soak),
        pytest.param("ours", "stop", marks=pytest.mark.soak),
        pytest.param("ours", "term", marks=pytest.mark.soak),
    ],
)  # fmt: skip
def test_what_a_prefill_instance_has_in_every_state_is_computed_by_the_other(
    fleet: Fleet, tiny_answer: Callable[[list[int], int], list[int]], kind: str, end: str
) -> None:
    victim, decode = fleet.prefill[0], fleet.decode[0]
    with routed(fleet, fleet.prefill, [decode], kind=kind) as front:
        # The victim gets every other request: one that was handed over and decodes, two whose writes are held, and one
        # that waits for these.
        first = [ask(front, *LONG, stream=index < 2, rid=f"long-{index}") for index in range(2)]
        until(lambda: decode.metrics()["pdjax_running_requests"] == 2, decode)
        held = fleet.held(victim)
        fleet.hold(victim, 20.0)  # longer than it takes to find out that an instance hangs
        asked = [prompt(tokens) for tokens in PROMPTS]
        halves = [
            ask(front, input_ids, 8, stream=index in (0, 1, 4), rid=f"r{index}")
            for index, input_ids in enumerate(asked)
        ]
        until(lambda: fleet.held(victim) >= held + 2 and victim.metrics()["pdjax_waiting_requests"] >= 1, victim)
        go_on = finish(victim, end)
        fleet.let_go()
        wait_ended(halves, 2 * BOUND_SECONDS)
        for half, input_ids in zip(halves, asked, strict=True):
            assert half.status == 200 and half.output_ids == tiny_answer(input_ids, 8), (half, front.tail())
        wait_ended(first)
        assert all(half.output_ids == tiny_answer(*LONG) for half in first), "they need no prefill instance any more"
        if kind == "ours":
            assert 3 <= recomputed(front) <= 6
    go_on()
    at_rest([fleet.prefill[1], decode])


@pytest.mark.parametrize("end", ["leader", *(pytest.param(end, marks=pytest.mark.soak) for end in ("all", "stop"))])
def test_what_a_decode_instance_has_is_given_to_the_other_whether_it_was_told_a_token_or_not(
    fleet: Fleet, tiny_answer: Callable[[list[int], int], list[int]], end: str
) -> None:
    prefill, victim = fleet.prefill[0], fleet.decode[0]
    with routed(fleet, [prefill], fleet.decode) as front:
        fleet.slow(victim)
        told = [ask(front, *LONG, stream=True, rid=f"told-{index}") for index in range(2)]
        assert all(half.first.wait(30) for half in told)
        whole = [ask(front, *LONG, stream=False, rid=f"whole-{index}") for index in range(2)]
        until(lambda: victim.metrics()["pdjax_running_requests"] == 2, victim)
        held = fleet.held(prefill)
        fleet.hold(prefill, HOLD_SECONDS)
        asked = [prompt(tokens) for tokens in PROMPTS]
        halves = [
            ask(front, input_ids, 8, stream=index % 3 == 0, rid=f"r{index}") for index, input_ids in enumerate(asked)
        ]
        until(lambda: fleet.held(prefill) >= held + 2, prefill)
        go_on = finish(victim, end)
        fleet.let_go()
        wait_ended([*halves, *whole, *told], 2 * BOUND_SECONDS)
        for half, input_ids in zip(halves, asked, strict=True):
            assert half.status == 200 and half.output_ids == tiny_answer(input_ids, 8), (half, front.tail())
        assert all(half.output_ids == tiny_answer(*LONG) for half in [*whole, *told]), told
        assert recomputed(front) >= 2 and front.metrics()["pdjax_router_resumed_streams_total"] >= 1
    go_on()
    at_rest([prefill, fleet.decode[1]])


class Stream(threading.Thread):
    """What the client of a stream gets: the events of each sample, and the rest."""

    def __init__(self, front: Part, path: str, body: dict[str, Any]) -> None:
        super().__init__(daemon=True)
        self._events = stream(f"{front.url}{path}", body | {"stream": True})
        self.samples: list[list[dict[str, Any]]] = [[], []]
        self.rest: list[dict[str, Any]] = []
        self.error = ""
        self.start()

    def run(self) -> None:
        try:
            for event in self._events:
                assert "error" not in event, event
                if event.get("choices"):
                    self.samples[event["choices"][0]["index"]].append(event)
                elif "choices" in event:
                    self.rest.append(event)
                else:
                    self.samples[0].append(event)
        except (OSError, AssertionError) as problem:
            self.error = repr(problem)

    def outcome(self) -> tuple[Any, list[float]]:
        """What must be the same however often it is asked, and log-probabilities, whose last bits may differ."""
        self.join(60)
        assert not self.is_alive() and not self.error, self.error
        events = [event for sample in self.samples for event in sample]
        if "output_ids" in events[0]:
            # Each event has all text and tokens so far, so that one that is missing or told twice is seen.
            told = [(event["text"], event["output_ids"], event["meta_info"]["completion_tokens"]) for event in events]
            return told, []
        assert len({(event["id"], event["created"]) for event in events}) == 1
        told = [[event["choices"][0] for event in sample] for sample in self.samples]
        tokens = [[choice["logprobs"]["content"] for choice in sample if choice["logprobs"]] for sample in told]
        logprobs = [token.pop("logprob") for sample in tokens for (token,) in sample]
        (last,) = self.rest
        return (told, last["usage"]["total_tokens"]), logprobs


# In so many tokens no two are so close that the last bits of what is computed again decide between them.
CHAT = {
    "messages": [{"role": "user", "content": "hi"}],
    "n": 2, "seed": 3, "max_tokens": 1500, "ignore_eos": True, "logprobs": True, "stop": ["no such text"],
    "frequency_penalty": 0.1, "stream_options": {"include_usage": True},
}  # fmt: skip
GENERATE = {
    "input_ids": LONG[0],
    "sampling_params": {"max_new_tokens": 1500, "temperature": 0.8, "seed": 5, "ignore_eos": True},
}


@pytest.mark.parametrize("end", ["all", "stop"])
def test_streams_go_on_at_the_other_decode_instance_as_if_nothing_had_happened(
    fleet: Fleet, tiny_answer: Callable[[list[int], int], list[int]], end: str
) -> None:
    prefill = fleet.prefill[0]
    with routed(fleet, [prefill], fleet.decode, "--idle-timeout", "3") as front:
        expected = [
            Stream(front, *each).outcome() for each in (("/v1/chat/completions", CHAT), ("/generate", GENERATE))
        ]
        for part in fleet.decode:
            fleet.slow(part)
        one = Stream(front, "/v1/chat/completions", CHAT)
        until(lambda: len(one.samples[1]) > 5, front)
        running = lambda part: part.metrics()["pdjax_running_requests"]  # noqa: E731
        until(lambda: max(map(running, fleet.decode)) == 2, front)  # its two samples, and nothing older
        victim, other = sorted(fleet.decode, key=running, reverse=True)
        ask(front, [1, 2], 1, stream=False, rid="between").join(30)  # instances take turns
        two = Stream(front, "/generate", GENERATE)
        until(lambda: len(two.samples[0]) > 5, front)
        go_on = finish(victim, end)
        fleet.let_go()
        for asked, (told, logprobs) in zip((one, two), expected, strict=True):
            assert asked.outcome() == (told, pytest.approx(logprobs, abs=1e-3))
        assert front.metrics()["pdjax_router_resumed_streams_total"] == 2
        go_on()
        half = ask(front, prompt(40), 8, stream=True, rid="next")
        wait_ended([half])
        assert half.status == 200 and len(half.output_ids) == 8
    at_rest([prefill, other] if end == "all" else [prefill, other, victim])


def finish(part: Part, how: str) -> Callable[[], None]:
    """End an instance, or stop it for as long as the caller likes; returns what sets it right again."""
    if how == "stop":
        return stop(part)
    if how == "leader":
        part.leader().kill()
    elif how == "term":
        part.leader().terminate()
    else:
        part.kill()
    return lambda: None


def test_when_no_instance_is_left_the_reason_is_told(fleet: Fleet) -> None:
    victim, decode = fleet.prefill[0], fleet.decode[0]
    with routed(fleet, [victim], [decode]) as front:
        held = fleet.held(victim)
        fleet.hold(victim, 60.0)
        half = ask(front, prompt(200), 8, stream=True, rid="alone")
        until(lambda: fleet.held(victim) > held, victim)
        victim.kill()
        wait_ended([half])
        assert half.told and half.status in (502, 503) and victim.url in half.error, half
    at_rest([decode])

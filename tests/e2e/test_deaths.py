"""SIGKILL of an instance: who waits for it is told within 2 s, who does not is not hurt, and a new one takes over."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from processes import Deployment, Part, free_port, instance, post, router, stream
from test_answers import RECORDS, assert_as_reference, at_rest, greedy

pytestmark = pytest.mark.e2e

LONG = greedy(RECORDS[0]["input_ids"], 400, stream=True)


@pytest.fixture
def mortal(tmp_path: Path, smollm2: Path) -> Iterator[Deployment]:
    """A deployment of this test's own, on ports that a successor can take again."""
    started: list[Part] = []
    try:
        started.append(instance(tmp_path, "prefill", Disagg__bootstrap_port=free_port()))
        started.append(instance(tmp_path, "decode"))
        prefill, decode = (part.wait_ready() for part in started)
        started.append(router(tmp_path, [prefill], [decode]))
        yield Deployment(prefill, decode, started[-1].wait_ready())
    finally:
        for part in started:
            part.kill()


class Client(threading.Thread):
    """Reads a long stream and notes when it ended and with which error."""

    def __init__(self, url: str, body: dict = LONG) -> None:
        super().__init__(daemon=True)
        self.url, self.body = url, body
        self.started = threading.Event()
        self.events: list[dict] = []
        self.problem: Exception | None = None
        self.ended_at = 0.0
        self.start()

    def run(self) -> None:
        try:
            for event in stream(f"{self.url}/generate", self.body):
                self.events.append(event)
                self.started.set()
        except Exception as problem:  # noqa: BLE001 - the test asserts on it
            self.problem = problem
        self.ended_at = time.monotonic()

    @property
    def error(self) -> str:
        """The sentence of the error event that ended the stream."""
        return self.events[-1].get("error", {}).get("message", "") if self.events else ""


def assert_answers_rightly(url: str) -> None:
    status, answer = post(f"{url}/generate", greedy(RECORDS[1]["input_ids"]))
    assert status == 200, answer
    assert_as_reference(RECORDS[1], answer["output_ids"])


@pytest.mark.parametrize("victim", ["whole instance", "leader only"])
def test_the_decode_instance_is_killed_in_the_middle_of_a_stream(
    mortal: Deployment, tmp_path: Path, victim: str
) -> None:
    client = Client(mortal.router.url)
    assert client.started.wait(30)
    killed = time.monotonic()
    if victim == "leader only":
        mortal.decode.leader().kill()
    else:
        mortal.decode.kill()
    client.join(10)
    assert client.problem is None, client.problem
    assert client.ended_at - killed < 2.0
    assert "decode" in client.error and len(client.error.split()) > 3, client.events[-1]

    metrics = at_rest(mortal.prefill)
    assert metrics["pdjax_free_pages"] == metrics["pdjax_pages"]
    mortal.decode.kill()
    successor = instance(tmp_path, "decode", Server__port=mortal.decode.port)
    try:
        successor.wait_ready()
        mortal.router.wait_ready(10)
        assert_answers_rightly(mortal.router.url)
    finally:
        successor.kill()


def test_the_prefill_instance_is_killed_while_prompts_wait_for_it(mortal: Deployment, tmp_path: Path) -> None:
    established = Client(mortal.router.url)
    assert established.started.wait(30)
    long_prompt = (RECORDS[0]["input_ids"] * 60)[:300]
    waiting = [Client(mortal.router.url, greedy(long_prompt, 8, stream=True)) for _ in range(6)]
    time.sleep(0.2)
    killed = time.monotonic()
    mortal.prefill.kill()
    for client in waiting:
        client.join(10)
        assert client.ended_at - killed < 2.0
        assert client.problem is not None or client.error or len(client.events) == 8
    assert any(client.problem is not None or client.error for client in waiting), "the kill came too late to matter"

    # A request that has its pages does not need the prefill instance any more.
    established.join(200)
    assert established.problem is None and not established.error
    assert len(established.events[-1]["output_ids"]) == 400
    metrics = at_rest(mortal.decode)
    assert metrics["pdjax_free_pages"] == metrics["pdjax_pages"]

    bootstrap = int(next(arg for arg in mortal.prefill.arguments if "bootstrap_port" in arg).partition("=")[2])
    successor = instance(
        tmp_path, "prefill", Server__port=mortal.prefill.port, Disagg__bootstrap_port=bootstrap
    )  # fmt: skip
    try:
        successor.wait_ready()
        mortal.router.wait_ready(10)
        assert_answers_rightly(mortal.router.url)
    finally:
        successor.kill()

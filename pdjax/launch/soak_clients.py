"""The clients of a soak: mixed requests, each compared with what an instance that nobody breaks answers."""

from __future__ import annotations

import contextlib
import http.client
import json
import random
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from pdjax.launch.soak_parts import post

KINDS = {
    "tiny": 4,
    "long": 2,
    "shared prefix": 4,
    "sampled": 3,
    "streamed": 3,
    "disconnect": 2,
    "abort": 2,
    "too long": 1,
}
_OUTPUT_TOKENS = (1, 48)
_STREAMED_TOKENS = 200
_PAUSE_SECONDS = 0.2  # after a failure


@dataclass
class Tally:
    """What has happened. Lists hold sentences about what must not happen."""

    requests: Counter[str] = field(default_factory=Counter)
    answered: int = 0
    told: Counter[str] = field(default_factory=Counter)  # failures with a reason, by HTTP status
    wrong: list[str] = field(default_factory=list)
    untold: list[str] = field(default_factory=list)  # without an answer or a reason
    late: list[str] = field(default_factory=list)
    worst_s: float = 0.0
    lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def total(self) -> int:
        """Requests that have ended."""
        return sum(self.requests.values())


@dataclass(frozen=True)
class World:
    """What clients need to know. `requests` of them at most, until `until` (`time.monotonic`) at most."""

    router: int
    oracle: int
    max_context: int
    vocabulary: int
    bound: float  # seconds in which every request must end
    requests: int
    until: float
    seed: int


class Client(threading.Thread):
    """Asks one thing after the other until told to stop, by `World` or by `stop`."""

    def __init__(self, number: int, world: World, tally: Tally, stop: threading.Event) -> None:
        super().__init__(name=f"client {number}", daemon=True)
        self._number, self._world, self._tally, self._stop_asked = number, world, tally, stop
        self._random = random.Random(f"{world.seed} {number}")
        shared = random.Random(world.seed)
        self._prefixes = [self._ids(48, shared) for _ in range(4)]
        self._asked = 0

    def run(self) -> None:
        """See the class."""
        while not self._stop_asked.is_set() and time.monotonic() < self._world.until:
            with self._tally.lock:
                if self._tally.total >= self._world.requests:
                    return
            kind = self._random.choices(list(KINDS), list(KINDS.values()))[0]
            self._asked += 1
            started = time.monotonic()
            try:
                self._ask(kind)
            except Exception as error:  # noqa: BLE001 - a client that dies must not pass for one that is content
                with self._tally.lock:
                    self._tally.untold.append(f"{self.name}: {kind}: {error!r}")
            seconds = time.monotonic() - started
            with self._tally.lock:
                self._tally.requests[kind] += 1
                self._tally.worst_s = max(self._tally.worst_s, seconds)
                if seconds > self._world.bound:
                    self._tally.late.append(f"{kind} took {seconds:.1f} s")

    def _ask(self, kind: str) -> None:
        body = self._body(kind)
        if kind in ("disconnect", "abort"):
            self._leave(kind, body)
            return
        ask = self._read if kind == "streamed" else self._post
        status, answer = ask(body)
        if status != 200:
            self._failed(kind, status, answer)
            return
        if kind == "too long":
            with self._tally.lock:
                self._tally.wrong.append(f"a prompt of {len(body['input_ids'])} tokens was answered")
            return
        whole = body | {"stream": False}
        expected = post(self._world.oracle, "/generate", whole, 600.0)[1].get("output_ids")
        with self._tally.lock:
            self._tally.answered += 1
            if answer.get("output_ids") != expected:
                self._tally.wrong.append(f"{kind}: {json.dumps(body)}: {answer.get('output_ids')}, not {expected}")

    def _connection(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection("127.0.0.1", self._world.router, timeout=self._world.bound + 30.0)

    def _post(self, body: dict[str, Any]) -> tuple[int, Any]:
        return post(self._world.router, "/generate", body, self._world.bound + 30.0)

    def _read(self, body: dict[str, Any]) -> tuple[int, Any]:
        """Read a stream to its end; returns its last event. Each must have one token more than the one before."""
        with contextlib.closing(self._connection()) as connection:
            _send(connection, body)
            response = connection.getresponse()
            if response.status != 200:
                return response.status, json.loads(response.read())
            last: dict[str, Any] = {"output_ids": []}
            for line in response:
                if line == b"data: [DONE]\n":
                    return 200, last
                if line.startswith(b"data: "):
                    event = json.loads(line.removeprefix(b"data: "))
                    if "error" in event:
                        return event["error"]["code"], event
                    if event["output_ids"][:-1] != last["output_ids"]:
                        with self._tally.lock:
                            self._tally.wrong.append(f"streamed: {event['output_ids']} after {last['output_ids']}")
                    last = event
        return 0, last

    def _failed(self, kind: str, status: int, answer: Any) -> None:
        message = answer.get("error", {}).get("message", "") if isinstance(answer, dict) else ""
        with self._tally.lock:
            if kind == "too long" and status == 400:
                self._tally.answered += 1
            elif 400 <= status < 499:
                self._tally.wrong.append(f"{kind}: refused with {status}, whatever has died: {message!r}")
            elif status and len(message.split()) > 3:
                self._tally.told[str(status)] += 1
            else:
                self._tally.untold.append(f"{kind}: status {status}: {message!r}")
        self._stop_asked.wait(_PAUSE_SECONDS)

    def _leave(self, kind: str, body: dict[str, Any]) -> None:
        """Read a stream for a while, then go: by a request to abort it, or without a word."""
        connection = self._connection()
        patience = self._random.randrange(6)
        response = None
        try:
            _send(connection, body)
            if patience:
                response = connection.getresponse()
                for _ in range(2 * patience):
                    response.readline()
            if kind == "abort":
                post(self._world.router, "/abort_request", {"rid": body["rid"]}, 30.0)
                with contextlib.suppress(OSError, http.client.HTTPException):
                    (response or connection.getresponse()).read()  # it ends, whatever it says
        except (OSError, http.client.HTTPException) as error:
            with self._tally.lock:
                self._tally.untold.append(f"{kind}: {error!r}")
        finally:
            connection.close()

    def _body(self, kind: str) -> dict[str, Any]:
        draw, most = self._random, self._world.max_context
        tokens = draw.randint(*_OUTPUT_TOKENS)
        match kind:
            case "tiny":
                prompt = self._ids(draw.randint(1, 8))
            case "long":
                prompt = self._ids(draw.randint(most // 8, most // 2 - tokens))
            case "shared prefix":
                prompt = draw.choice(self._prefixes) + self._ids(draw.randint(1, 24))
            case "too long":
                prompt = self._ids(most + draw.randint(0, 20))
            case _:
                prompt = self._ids(draw.randint(4, most // 8))
        sampling: dict[str, Any] = {"max_new_tokens": tokens, "temperature": 0, "ignore_eos": True}
        if kind == "sampled":
            sampling |= {"temperature": 0.8, "top_p": 0.9, "top_k": 40, "sampling_seed": draw.randrange(1 << 30)}
        stream = kind in ("streamed", "disconnect", "abort")
        if stream:
            sampling["max_new_tokens"] = min(_STREAMED_TOKENS, most // 2)
        rid = f"soak-{self._number}-{self._asked}"
        return {"input_ids": prompt, "sampling_params": sampling, "rid": rid, "stream": stream}

    def _ids(self, count: int, draw: random.Random | None = None) -> list[int]:
        draw = draw or self._random
        return [draw.randrange(self._world.vocabulary) for _ in range(count)]


def _send(connection: http.client.HTTPConnection, body: dict[str, Any]) -> None:
    connection.request("POST", "/generate", json.dumps(body), {"Content-Type": "application/json"})

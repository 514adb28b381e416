"""The two halves of a room, each sent to its instance by the test itself, as a router would: so one can be left out."""

from __future__ import annotations

import contextlib
import http.client
import itertools
import json
import random
import threading
import time
from dataclasses import dataclass
from typing import Any

from processes import Part

CLIENT_SECONDS = 60.0
_rooms = itertools.count(random.SystemRandom().randrange(1 << 40))


class Half(threading.Thread):
    """One POST to ``/generate``, read as a stream if the instance streams.

    Attributes:
        status: the HTTP status; 0 while there is none, or when the connection broke.
        output_ids: the tokens so far.
        error: the sentence that the client was told, or what broke the connection.
        ended_at: seconds of `time.monotonic`; 0 until it has ended.
    """

    def __init__(self, part: Part, body: dict[str, Any]) -> None:
        super().__init__(daemon=True)
        self.part, self.rid = part, body["rid"]
        self.status = 0
        self.output_ids: list[int] = []
        self.error = ""
        self.broken = False
        self.first = threading.Event()
        self.ended_at = 0.0
        self._body = json.dumps(body).encode()
        self._connection = http.client.HTTPConnection(part.host, part.port, timeout=CLIENT_SECONDS)
        self.start()

    def run(self) -> None:
        try:
            self._connection.request("POST", "/generate", self._body, {"Content-Type": "application/json"})
            response = self._connection.getresponse()
            self.status = response.status
            if "event-stream" not in response.headers.get("content-type", ""):
                self._take(json.loads(response.read()))
            else:
                self.broken = True  # until the end is told
                for line in response:
                    if line.startswith(b"data: [DONE]"):
                        self.broken = False
                    elif line.startswith(b"data: "):
                        self._take(json.loads(line.removeprefix(b"data: ")))
        except (OSError, http.client.HTTPException, ValueError, AttributeError) as problem:
            self.broken = True
            self.error = self.error or repr(problem)
        self.ended_at = time.monotonic()
        self.first.set()

    def _take(self, answer: dict[str, Any]) -> None:
        if "error" in answer:
            self.error = answer["error"]["message"]
            self.broken = False
        else:
            self.output_ids = answer["output_ids"]
            self.first.set()

    def disconnect(self) -> None:
        """The client goes away."""
        if self._connection.sock is not None:
            with contextlib.suppress(OSError):
                self._connection.sock.shutdown(2)

    @property
    def told(self) -> bool:
        """Whether it ended with a reason in words."""
        return bool(self.ended_at) and not self.broken and len(self.error.split()) > 3

    def __repr__(self) -> str:
        return f"{self.part.name} {self.rid}: {self.status} {len(self.output_ids)} tokens {self.error!r}"


@dataclass
class Room:
    """Both halves, or one of them."""

    prompt: list[int]
    tokens: int
    prefill: Half | None
    decode: Half | None

    @property
    def halves(self) -> list[Half]:
        return [half for half in (self.prefill, self.decode) if half is not None]


def open_room(
    prefill: Part, decode: Part, bootstrap: int, prompt: list[int], tokens: int, *, sides: str = "pd"
) -> Room:
    """Send the halves that `sides` names: p, d or both, in its order. Greedy, without an early end."""
    number = next(_rooms)
    body = {
        "input_ids": prompt,
        "sampling_params": {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True},
        "bootstrap_host": prefill.host,
        "bootstrap_port": bootstrap,
        "bootstrap_room": number,
    }
    halves: dict[str, Half] = {}
    for side in sides:
        part, stream = (prefill, False) if side == "p" else (decode, True)
        halves[side] = Half(part, body | {"rid": f"{side}-{number}", "stream": stream})
    return Room(prompt, tokens, halves.get("p"), halves.get("d"))

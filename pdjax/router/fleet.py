"""The instances behind a router: which of them serve now, and which is next."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import aiohttp

from pdjax.web import HttpError, say

POLL_SECONDS = 1.0
# An instance that does not answer for this long is down. A busy one answers between two steps, and says by itself that
# it is not well when one takes longer than 5 s.
PROBE_SECONDS = 6.0
ANSWER_BYTES = 1 << 20  # of an instance's answer about itself, or of its error, that are read
HUNG_PROBES = 2  # as many probes in a row without an answer: it is stopped or stuck, and whoever waits for it is told
_NEVER_ASKED = "not asked yet"
_WILDCARDS = ("", "0.0.0.0", "::", None)


class FleetError(Exception):
    """An instance that can't be named so; the sentence says what is wrong."""


@dataclass
class Instance:
    """One instance, by its URL.

    Attributes:
        role: prefill or decode.
        given_port: bootstrap port from the command line, which goes before what the instance says.
        problem: why it does not serve now; None if it does.
        info: its ``/server_info``, read each time it comes up.
        outstanding: calls in progress.
        turn: when it was last chosen, as a count of choices; 0 if not since it came up.
        silent_probes: how many probes in a row it has not answered, while no stream has come from it either.
        waiting: who waits for its words; each is called with a sentence once it counts as hung.
    """

    url: str
    role: str
    given_port: int | None = None
    problem: str | None = _NEVER_ASKED
    info: dict[str, Any] = field(default_factory=dict)
    outstanding: int = 0
    turn: int = 0
    silent_probes: int = 0
    waiting: set[Callable[[str], None]] = field(default_factory=set)

    @property
    def name(self) -> str:
        """What users know it by."""
        return f"the {self.role} instance {self.url}"

    @property
    def bootstrap_host(self) -> str:
        """Where decode instances reach this prefill instance: what it says, unless it listens everywhere."""
        said = self.info.get("disaggregation_bootstrap_host")
        return (urlsplit(self.url).hostname or "127.0.0.1") if said in _WILDCARDS else str(said)

    @property
    def bootstrap_port(self) -> int | None:
        """The port for it."""
        return self.given_port or self.info.get("disaggregation_bootstrap_port")

    @property
    def dp_size(self) -> int:
        """How many dp ranks it has."""
        said = self.info.get("dp_size")
        return said if type(said) is int and said > 0 else 1


def parse_instance(text: str, role: str) -> Instance:
    """An instance from ``URL`` or ``URL,BOOTSTRAP_PORT``.

    Raises:
        FleetError: it is neither.
    """
    url, _, port = text.partition(",")
    url = url.rstrip("/")
    parts = urlsplit(url)
    if parts.scheme != "http" or not parts.hostname or parts.path:
        raise FleetError(f"--{role} {text}: expected http://HOST:PORT, as in http://127.0.0.1:30000")
    if port and not (port.isdecimal() and 1 <= int(port) <= 65535):
        raise FleetError(f"--{role} {text}: the bootstrap port after the comma must lie in 1..65535, not {port!r}")
    return Instance(url, role, int(port) if port else None)


class Fleet:
    """All instances. `run` watches them; it must run for any to be up."""

    def __init__(self, prefill: Sequence[Instance], decode: Sequence[Instance], session: aiohttp.ClientSession) -> None:
        self.prefill = list(prefill)
        self.decode = list(decode)
        self._session = session
        self._turns = itertools.count(1)

    @property
    def size(self) -> int:
        """How many instances there are."""
        return len(self.prefill) + len(self.decode)

    def choose(self, avoid: Collection[str] = ()) -> tuple[Instance, Instance]:
        """The next prefill and decode instance that serve, and if possible none of the URLs in `avoid`.

        Raises:
            HttpError: 503, there is none, and why.
        """
        missing = self.missing()
        if missing is not None:
            raise HttpError(503, missing)
        return self._next(self.prefill, avoid), self._next(self.decode, avoid)

    def missing(self) -> str | None:
        """What is missing to serve, in words; None if nothing is."""
        sentences = []
        for role, instances in (("prefill", self.prefill), ("decode", self.decode)):
            if all(each.problem is not None for each in instances):
                reasons = ", ".join(f"{each.url}: {each.problem}" for each in instances)
                sentences.append(f"no {role} instance serves now ({reasons})")
        return "; ".join(sentences) or None

    def mark_down(self, instance: Instance, problem: str) -> None:
        """Choose this instance no more until it answers again."""
        if instance.problem is None:
            say("router", f"{instance.name} is down: {problem}")
        elif instance.problem == _NEVER_ASKED:
            say("router", f"waiting for {instance.name}: {problem}")
        instance.problem = problem

    async def run(self) -> str | None:
        """Watch all instances, for ever."""
        await asyncio.gather(*(self._watch(each) for each in (*self.prefill, *self.decode)))
        return None

    def _next(self, instances: Sequence[Instance], avoid: Collection[str]) -> Instance:
        serving = [each for each in instances if each.problem is None]
        others = [each for each in serving if each.url not in avoid]
        chosen = min(others or serving, key=lambda each: (each.turn, each.outstanding))
        chosen.turn = next(self._turns)
        return chosen

    async def _watch(self, instance: Instance) -> None:
        while True:
            problem = await self._probe(instance)
            if problem is not None:
                self.mark_down(instance, problem)
            if instance.silent_probes >= HUNG_PROBES:
                for tell in list(instance.waiting):
                    tell(f"{instance.name} has not answered anything for {HUNG_PROBES * PROBE_SECONDS:g} s")
            await asyncio.sleep(POLL_SECONDS)

    async def _probe(self, instance: Instance) -> str | None:
        """Ask for its health, and who it is if it was down. Returns what is wrong."""
        try:
            async with asyncio.timeout(PROBE_SECONDS):
                status, body = await self._get(f"{instance.url}/health")
                # 504: its frontend lives, and its engine does not answer.
                instance.silent_probes = instance.silent_probes + 1 if status == 504 else 0
                if status != 200:
                    return f"its /health answers {status}: {message_of(body)}"
                if instance.problem is not None:
                    status, body = await self._get(f"{instance.url}/server_info")
                    if status != 200:
                        return f"its /server_info answers {status}: {message_of(body)}"
                    return self._come_up(instance, body)
                return None
        except TimeoutError:
            instance.silent_probes += 1
            return f"it does not answer within {PROBE_SECONDS:g} s"
        except (aiohttp.ClientError, OSError) as error:
            instance.silent_probes = 0  # it is gone, and its connections with it
            return reason_of(error)

    def _come_up(self, instance: Instance, body: bytes) -> str | None:
        try:
            info = json.loads(body)
        except ValueError:
            info = None
        if not isinstance(info, dict):
            return "its /server_info is not a JSON object"
        role = info.get("engine_type", instance.role)
        if role != instance.role:
            return f"it says that it is a {role} instance, not a {instance.role} instance"
        instance.info = info
        if instance.role == "prefill" and not isinstance(instance.bootstrap_port, int):
            return "its /server_info has no disaggregation_bootstrap_port; give it as --prefill URL,PORT"
        instance.problem = None
        instance.turn = 0
        say("router", f"{instance.name} is up")
        return None

    async def _get(self, url: str) -> tuple[int, bytes]:
        async with self._session.get(url) as response:
            return response.status, await body_of(response)


async def body_of(response: aiohttp.ClientResponse, most: int = ANSWER_BYTES) -> bytes:
    """The body of an instance's answer, however many pieces it comes in; cut off after `most` bytes."""
    body = bytearray()
    while len(body) < most and (piece := await response.content.read(most - len(body))):
        body += piece
    return bytes(body)


def reason_of(error: BaseException) -> str:
    """Why a call has failed, in a few words."""
    match error:
        case aiohttp.ClientConnectorError():
            return f"connection failed: {error.os_error.strerror or error.os_error}"
        case TimeoutError():
            return "it did not answer in time"
        case aiohttp.ServerDisconnectedError() | aiohttp.ClientPayloadError() | ConnectionResetError():
            return "it closed the connection"
        case _:
            return str(error) or type(error).__name__


def message_of(body: bytes) -> str:
    """The sentence in an error's body, or the body itself, cut short."""
    try:
        value = json.loads(body)
    except ValueError:
        value = None
    error = value.get("error") if isinstance(value, dict) else None
    message = error.get("message") if isinstance(error, dict) else None
    return message if isinstance(message, str) else " ".join(body[:300].decode(errors="replace").split())

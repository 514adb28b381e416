"""Calls to one instance, or to every one that serves, and what they say to them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp

from pdjax.router.fleet import ANSWER_BYTES, Instance, body_of, message_of, reason_of

ANSWER_SECONDS = 6.0  # a frontend gives its engine 5


@dataclass(frozen=True)
class Reply:
    """What one instance said. `status` is 0 if it said nothing; `words` are then the reason."""

    instance: Instance
    status: int
    body: bytes = b""
    reason: str = ""

    @property
    def words(self) -> str:
        """The sentence in it."""
        return self.reason or message_of(self.body)

    @property
    def json(self) -> Any:
        """The decoded body; None if it is not JSON."""
        try:
            return json.loads(self.body)
        except ValueError:
            return None


async def ask_all(
    session: aiohttp.ClientSession, instances: Sequence[Instance], method: str, path: str, body: bytes = b""
) -> list[Reply]:
    """Ask all at once, each for `ANSWER_SECONDS` at most; replies in their order."""
    return list(await asyncio.gather(*(ask(session, each, method, path, body) for each in instances)))


async def ask(
    session: aiohttp.ClientSession,
    instance: Instance,
    method: str,
    path: str,
    body: bytes = b"",
    *,
    seconds: float = ANSWER_SECONDS,
    most: int = ANSWER_BYTES,
) -> Reply:
    """Ask one, for so many seconds at most, and read so many bytes of its answer."""
    if instance.problem is not None:
        return Reply(instance, 0, reason=f"it does not serve now: {instance.problem}")
    headers = {"content-type": "application/json"} if body else {}
    try:
        async with (
            asyncio.timeout(seconds),
            session.request(method, instance.url + path, data=body or None, headers=headers) as response,
        ):
            return Reply(instance, response.status, await body_of(response, most))
    except (aiohttp.ClientError, OSError, TimeoutError) as error:
        return Reply(instance, 0, reason=reason_of(error))


def tokens_of(reply: Reply) -> int:
    """Tokens in an answer to ``/get_load``, over all schedulers; -1 if it holds none."""
    loads = reply.json if reply.status == 200 else None
    if not isinstance(loads, list) or not all(isinstance(each, dict) for each in loads):
        return -1
    tokens = [each.get("num_tokens") for each in loads]
    return sum(tokens) if tokens and all(isinstance(each, int) for each in tokens) else -1


def aborted_of(reply: Reply) -> int:
    """Samples that an answer to ``/abort_request`` says were stopped."""
    said = reply.json if reply.status == 200 else None
    aborted = said.get("aborted") if isinstance(said, dict) else None
    return aborted if isinstance(aborted, int) else 0

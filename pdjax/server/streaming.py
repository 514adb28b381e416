"""Streams of events, and how one goes on at another instance when the one that has begun it is lost.

A router that asks for it by the header `RESUMABLE` is told more than the client, in blocks that are comments to anybody
else: first what another instance must know to go on with the same stream, then, after all that is said of a frame of
tokens, the frame itself. An instance that gets these back (`Resume`) puts the frames through the same code, drops what
that says, and goes on from there. So it does not matter what the code holds back, or how the tokens came.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import msgspec

from pdjax import wire
from pdjax.web import OPENING, RESUMABLE, TOLD, Exchange, HttpError, encode_json

if TYPE_CHECKING:
    from pdjax.server.output import Delta
    from pdjax.server.run import Run


REPLAYED = 200  # frames in one go, some milliseconds: other streams must not stand still


class Resume(msgspec.Struct):
    """`pdjax_resume`: what a stream has told before, at instances that are lost.

    Attributes:
        id: of the answer.
        began: when the first of them took the request, in seconds since the epoch.
        told: frames of tokens, in order; `rid` is the number of the sample among all of the request's.
    """

    id: str
    began: float
    told: list[wire.Tokens]


class Opening(msgspec.Struct):
    """The first block of a stream that can go on elsewhere. `rid` is what the request's field `rid` must be there."""

    rid: str | list[str]
    id: str
    began: float

    @classmethod
    def of(cls, rid: str | list[str], resume: Resume | None, *, id: str = "") -> Opening:
        """Of a stream that begins here, with this id, or goes on here."""
        return cls(rid, id, time.time()) if resume is None else cls(rid, resume.id, resume.began)


def check_resume(resume: Resume, *, samples: int, vocabulary: int, stream: bool | None) -> None:
    """Raise `HttpError` 400 unless a request of so many samples can go on so. `vocabulary` is its size."""
    if not stream:
        raise HttpError(400, "pdjax_resume: only with stream set to true")
    for frame in resume.told:
        if not (frame.rid.isascii() and frame.rid.isdecimal() and int(frame.rid) < samples):
            raise HttpError(400, f"pdjax_resume: {frame.rid!r} is none of the {samples} samples of this request")
        if len(frame.token_ids) != len(frame.logprobs):
            raise HttpError(400, "pdjax_resume: each token has one log-probability")
        if not all(0 <= token < vocabulary for token in frame.token_ids):
            raise HttpError(400, f"pdjax_resume: a token is not in the vocabulary of {vocabulary} tokens")


async def send_stream(
    exchange: Exchange,
    run: Run,
    opening: Opening,
    *,
    say: Callable[[Delta], bytes],
    close: Callable[[], bytes],
    recall: Callable[[Delta], object] | None = None,
) -> None:
    """Run the samples, and send what `say` makes of each piece, then what `close` adds at the end: events, whole ones.
    `recall` is called with each piece that was told elsewhere, if what follows depends on these.

    Raises:
        HttpError: a sample has failed.
    """
    noted = any(name == RESUMABLE for name, _ in exchange.headers)
    head = OPENING + encode_json(opening) + b"\n\n" if noted else b""
    for count, delta in enumerate(run.replay()):
        if recall is not None:
            recall(delta)
        if count % REPLAYED == REPLAYED - 1:
            await asyncio.sleep(0)
    async with run:
        while not run.done:
            delta = await run.next()
            data = say(delta) + (_told(delta) if noted else b"")
            if not exchange.status:
                await exchange.begin(200)
                data = head + data
            if data:
                await exchange.write(data)
        if not exchange.status:  # nothing was left to run
            await exchange.begin(200)
            await exchange.write(head)
        await exchange.end(close())


def _told(delta: Delta) -> bytes:
    return TOLD + encode_json(msgspec.structs.replace(delta.frame, rid=str(delta.output.index))) + b"\n\n"

"""The frontend's end of the Unix socket to the leader: requests out, tokens in, by request id."""

from __future__ import annotations

import asyncio
import re
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from pdjax import wire
from pdjax.web import HttpError

CONNECT_SECONDS = 10.0
SILENCE_SECONDS = 600.0  # the longest pause in a request's tokens; the engine's own limits are shorter
STATS_SECONDS = 5.0  # a scheduler that has not looped for this long is not healthy
STATS_REUSE_SECONDS = 0.5
FREE_SECONDS = 1.0  # in which an id's last request has ended, if its client has gone


class Inbox:
    """What the leader says about some requests, in order. Closing it aborts those that have not ended."""

    def __init__(self, leader: Leader, rids: Sequence[str]) -> None:
        self._leader = leader
        self._open = set(rids)
        self._frames: asyncio.Queue[wire.Tokens | HttpError] = asyncio.Queue()

    async def next(self) -> wire.Tokens:
        """The next tokens of any of the requests.

        Raises:
            HttpError: one of them has failed, or the engine is silent.
        """
        try:
            async with asyncio.timeout(SILENCE_SECONDS):
                frame = await self._frames.get()
        except TimeoutError as error:
            raise HttpError(504, f"the engine sent no token for {SILENCE_SECONDS:g} s") from error
        if isinstance(frame, HttpError):
            raise frame
        return frame

    def put(self, frame: wire.Tokens | HttpError) -> None:
        """Take what has arrived for one of the requests."""
        self._frames.put_nowait(frame)

    def close(self, rid: str, reason: str | None) -> None:
        """Want nothing more of a request; `reason` is why, if the engine does not know that it has ended."""
        if rid in self._open:
            self._open.remove(rid)
            self._leader.forget(rid, reason)

    def close_all(self, reason: str) -> None:
        """Abort what has not ended."""
        for rid in list(self._open):
            self.close(rid, reason)


class Leader:
    """The connection to the leader. Made by `connect`; `run` reads until the leader ends.

    Attributes:
        info: what the leader said when it became ready; None before.
    """

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.info: dict[str, Any] | None = None
        self._reader = reader
        self._writer = writer
        self._inboxes: dict[str, Inbox] = {}
        self._aborting: Counter[str] = Counter()  # aborts that the leader has not answered, by request id
        self._end: str | None = None
        self._queries = 0
        self._query: asyncio.Future[dict[str, float]] | None = None
        self._stats: tuple[float, dict[str, float]] | None = None
        self._unfit: str | None = None  # why the engine says that it cannot serve
        self._asks = 0
        # By id: flushes and traces, whose answers carry it.
        self._asked: dict[int, asyncio.Future[Any]] = {}

    @classmethod
    async def connect(cls, path: Path) -> Leader:
        """Connect.

        Raises:
            OSError: nobody listens there, or does not answer in time.
        """
        async with asyncio.timeout(CONNECT_SECONDS):
            return cls(*await asyncio.open_unix_connection(path))

    @property
    def role(self) -> str:
        """unified, prefill or decode."""
        return "unified" if self.info is None else str(self.info.get("engine_type", "unified"))

    @property
    def problem(self) -> str | None:
        """Why nothing can be served now, in words; None if it can."""
        if self._end is not None:
            return self._end
        if self.info is None:
            return "the engine is starting: it loads its model and compiles its steps"
        return None

    def check(self) -> None:
        """Raise `HttpError` 503 if nothing can be served now."""
        if self.problem is not None:
            raise HttpError(503, self.problem)

    async def run(self) -> str:
        """Read until the leader ends; returns the reason in words."""
        frames = wire.FrameReader()
        reason = "has ended"
        try:
            while data := await self._reader.read(1 << 16):
                for message in wire.apart(map(wire.decode_to_frontend, frames.feed(data))):
                    self._take(message)
        except (OSError, wire.WireError) as error:
            reason = f"can't be understood any more: {error}"
        return f"the engine process of this {self.role} instance {reason}"

    def abandon(self, reason: str) -> None:
        """Fail all open requests; take no more."""
        self._end = self._end or reason
        for rid, inbox in list(self._inboxes.items()):
            inbox.put(HttpError(503, reason))
            self._send(wire.Abort(rid, reason))
        if self._query is not None and not self._query.done():
            self._query.set_exception(HttpError(503, reason))
            self._query.exception()  # seen here, in case nobody waits for it
        for answer in self._asked.values():
            if not answer.done():
                answer.set_exception(HttpError(503, reason))
        self._writer.close()

    async def until_free(self, rids: Iterable[str]) -> None:
        """Wait a moment for ids that are in use: a router that gives a lost request to another pair uses its id again,
        and may be faster than the end of the first."""
        wanted = list(rids)
        deadline = time.monotonic() + FREE_SECONDS
        while any(rid in self._inboxes for rid in wanted) and time.monotonic() < deadline:
            await asyncio.sleep(0.01)

    def submit(self, requests: Sequence[wire.Generate]) -> Inbox:
        """Send requests to the engine.

        Raises:
            HttpError: 400, an id is in use or two are the same; 503, nothing can be served now.
        """
        self.check()
        rids = [request.rid for request in requests]
        for rid in rids:
            if rid in self._inboxes or rids.count(rid) > 1:
                raise HttpError(400, f"rid: a request with the id {rid!r} is running already")
        try:
            frames = [wire.encode(request) for request in requests]
        except wire.WireError as error:
            raise HttpError(400, f"the request is too long for this instance: {error}") from error
        inbox = Inbox(self, rids)
        for rid in rids:
            self._inboxes[rid] = inbox
        self._writer.write(b"".join(frames))
        return inbox

    def forget(self, rid: str, reason: str | None) -> None:
        """Route nothing more of a request; tell the engine to stop it, if a reason is given."""
        if self._inboxes.pop(rid, None) is not None and reason is not None:
            self._aborting[rid] += 1
            self._send(wire.Abort(rid, reason))

    def abort_matching(self, rid: str | None, reason: str) -> int:
        """Stop the request with this id, or all, on demand of another client; their own clients are told.

        A batch with the id `r` has the ids `r_0`, `r_1`...; several samples of a prompt have `r-0`, `r-1`...

        Returns:
            How many were stopped.
        """
        parts = re.compile(rf"{re.escape(rid or '')}(_\d+)?(-\d+)?")
        rids = [each for each in self._inboxes if rid is None or parts.fullmatch(each)]
        for each in rids:
            inbox = self._inboxes[each]
            inbox.put(wire.Tokens(each, [], [], finish_reason="abort"))
            inbox.close(each, reason)
        return len(rids)

    async def stats(self) -> dict[str, float]:
        """Counters and gauges of the scheduler, at most half a second old.

        Raises:
            HttpError: 503, it is not ready or has ended; 504, it does not answer within `STATS_SECONDS`.
        """
        self.check()
        if self._stats is not None and time.monotonic() - self._stats[0] < STATS_REUSE_SECONDS:
            return self._stats[1]
        if self._query is None or self._query.done():
            self._queries += 1
            self._query = asyncio.get_running_loop().create_future()
            self._send(wire.Query(self._queries))
        try:
            async with asyncio.timeout(STATS_SECONDS):
                return await asyncio.shield(self._query)
        except TimeoutError as error:
            raise HttpError(504, f"the engine's scheduler has not answered for {STATS_SECONDS:g} s") from error

    async def check_health(self) -> None:
        """Raise `HttpError` if the scheduler does not answer (504), or says that it cannot serve (503)."""
        await self.stats()
        if self._unfit is not None:
            raise HttpError(503, self._unfit)

    async def flush(self) -> wire.Flushed:
        """Have the engine drop its prefix cache.

        Raises:
            HttpError: 503, it is not ready or has ended; 504, it does not answer within `STATS_SECONDS`.
        """
        return await self._ask(wire.Flush)

    async def spans(self) -> list[wire.Span]:
        """What the engine did lately.

        Raises:
            HttpError: as `flush`.
        """
        return (await self._ask(wire.TraceQuery)).spans

    async def _ask(self, kind: type[wire.Flush] | type[wire.TraceQuery]) -> Any:
        self.check()
        self._asks += 1
        number = self._asks
        answer = self._asked[number] = asyncio.get_running_loop().create_future()
        self._send(kind(number))
        try:
            async with asyncio.timeout(STATS_SECONDS):
                return await answer
        except TimeoutError as error:
            raise HttpError(504, f"the engine's scheduler has not answered for {STATS_SECONDS:g} s") from error
        finally:
            del self._asked[number]

    def _send(self, message: wire.ToLeader) -> None:
        if not self._writer.is_closing():
            self._writer.write(wire.encode(message))

    def _inbox(self, rid: str) -> Inbox | None:
        """Whose the leader's words of this id are: nobody's while they may be of a request that was aborted."""
        return None if rid in self._aborting else self._inboxes.get(rid)

    def _take(self, message: wire.ToFrontend) -> None:
        match message:
            case wire.Ready():
                self.info = message.info
            case wire.Stats():
                self._stats = (time.monotonic(), message.values)
                self._unfit = message.problem
                if self._query is not None and message.id == self._queries and not self._query.done():
                    self._query.set_result(message.values)
            case wire.Flushed() | wire.Spans():
                answer = self._asked.get(message.id)
                if answer is not None and not answer.done():
                    answer.set_result(message)
            case wire.Aborted():
                if self._aborting[message.rid] > 1:
                    self._aborting[message.rid] -= 1
                else:
                    del self._aborting[message.rid]
            case wire.Tokens():
                inbox = self._inbox(message.rid)
                if inbox is not None:
                    inbox.put(message)
                    if message.finish_reason is not None:
                        inbox.close(message.rid, None)
            case wire.Failed():
                inbox = self._inbox(message.rid)
                if inbox is not None:
                    inbox.put(HttpError(message.status, message.message))
                    inbox.close(message.rid, None)

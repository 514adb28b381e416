"""Sends a request to a prefill and a decode instance at once, and relays what the decode instance says.

The first of the two to fail ends the attempt: whoever waits for the other would wait for nothing. A request that an
instance or the way between two has lost is computed anew, in a new room and by other instances if there are any, while
the client has not got a byte. A stream that has begun goes on there from the last token that the client has got.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import Collection, Coroutine
from typing import Any

import aiohttp

from pdjax.router.fleet import Fleet, Instance, body_of, message_of, reason_of
from pdjax.router.rooms import rooms_wanted, with_rooms
from pdjax.router.streams import StreamSoFar
from pdjax.web import RESUMABLE, Exchange, HttpError, Recorder, decode_object, encode_json, error_payload, say

CONNECT_SECONDS = 2.0
RECOMPUTES = 2
LOST = (502, 503, 504)  # an instance, a link or a transfer has failed, and not the request
RELEASE_SECONDS = 2.0  # for an instance to let go of a request that is sent to it again
PREFILL_REST_SECONDS = 10.0  # for a prefill instance to end its answer after decode has ended its own
_FORWARDED = (b"authorization", b"x-request-id", b"x-correlation-id", b"traceparent", b"tracestate")
_CONNECT_ERRORS = (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError)
_CALL_ERRORS = (aiohttp.ClientError, OSError, TimeoutError)


class _Unreachable(Exception):
    """No connection to an instance: it has not seen the request, so another may."""

    def __init__(self, instance: Instance, reason: str) -> None:
        super().__init__(reason)
        self.instance = instance


class Dispatcher:
    """Dispatches requests to pairs of a fleet.

    Args:
        request_seconds: the longest that a whole request may take, with all that is computed anew.
        idle_seconds: the longest pause between two pieces of a stream.
        recomputes: how often a request that was lost is computed anew before its client is told.

    Attributes:
        retries: requests that were sent to another pair because an instance could not be reached.
        recomputed_rooms: rooms that took the place of lost ones, of requests whose clients had not got a byte.
        resumed_streams: how often a stream that had begun was given to another pair.
    """

    def __init__(
        self,
        fleet: Fleet,
        session: aiohttp.ClientSession,
        *,
        request_seconds: float,
        idle_seconds: float,
        recomputes: int = RECOMPUTES,
    ) -> None:
        self.retries = 0
        self.recomputed_rooms = self.resumed_streams = 0
        self._fleet = fleet
        self._session = session
        self._request_seconds = request_seconds
        self._idle_seconds = idle_seconds
        self._recomputes = recomputes
        self._random = random.SystemRandom()
        self._open: set[asyncio.Task[Any]] = set()
        self._finishing: set[asyncio.Task[Any]] = set()
        self._abandoned: str | None = None

    async def __call__(self, exchange: Exchange, body: bytes) -> None:
        """Answer one request.

        Raises:
            HttpError: it can't be answered.
        """
        task = asyncio.current_task()
        assert task is not None, "a dispatch runs in a task"
        self._open.add(task)
        try:
            await self._with_retries(exchange, decode_object(body))
        except asyncio.CancelledError as error:
            if self._abandoned is None:
                raise
            raise HttpError(503, self._abandoned) from error
        finally:
            self._open.discard(task)

    async def ask(self, path: str, body: dict[str, Any]) -> tuple[int, bytes]:
        """Answer a request of the router's own; returns status and body."""
        answered = Recorder(path)
        try:
            await self(answered, encode_json(body))
        except HttpError as error:
            return error.status, encode_json(error_payload(error.status, error.message))
        return answered.status, bytes(answered.body_sent)

    def abandon(self, reason: str) -> None:
        """End all open requests with an error."""
        self._abandoned = reason
        for task in self._open:
            task.cancel()

    async def _with_retries(self, exchange: Exchange, body: dict[str, Any]) -> None:
        """Each failure to connect takes an instance out, and there are so many recomputes: so this ends."""
        began = time.monotonic()
        lost: HttpError | None = None
        recomputes = unreachable = 0
        sent: set[str] = set()
        tried: set[str] = set()
        stream = StreamSoFar()
        while True:
            try:
                prefill, decode = self._fleet.choose(avoid=tried)
            except HttpError as missing:
                if lost is None:
                    raise
                raise HttpError(lost.status, f"{lost.message}; {missing.message}") from lost
            asked = stream.resumed(_in_time(body, began))
            await self._release(asked, [each for each in (prefill, decode) if each.url in sent])
            sent |= {prefill.url, decode.url}
            stream.begin()
            try:
                return await self._attempt(exchange, asked, prefill, decode, began, stream)
            except _Unreachable as error:
                self._fleet.mark_down(error.instance, str(error))
                if lost is None or not stream.can_go_on:  # why a stream was lost says more than who could not go on
                    lost = HttpError(503, f"{error.instance.name} can't be reached ({error})")
                self.retries += 1
                unreachable += 1
                if unreachable == self._fleet.size:
                    raise lost from error
            except HttpError as error:
                if error.status not in LOST and lost is not None and stream.can_go_on and not stream.accepted:
                    told = f"{lost.message}; the stream could not go on elsewhere: {error.message}"
                    raise HttpError(lost.status, told) from error
                begun = exchange.status and not stream.can_go_on
                if begun or error.status not in LOST or not self._has_time(body, began):
                    raise
                if recomputes == self._recomputes:
                    told = f"{error.message} (computed {recomputes + 1} times, and lost each time)"
                    raise HttpError(error.status, told if recomputes else error.message) from error
                recomputes += 1
                if stream.can_go_on:
                    self.resumed_streams += 1
                    say("router", f"a stream goes on elsewhere: {error.message}")
                else:
                    self.recomputed_rooms += rooms_wanted(exchange.path, body) or 1
                    say("router", f"a request is computed anew: {error.message}")
                lost = error
                tried |= {prefill.url, decode.url}

    def _has_time(self, body: dict[str, Any], began: float) -> bool:
        left = _deadline(_in_time(body, began))
        return time.monotonic() - began < self._request_seconds and (left is None or left > 0)

    async def _release(self, body: dict[str, Any], instances: Collection[Instance]) -> None:
        """See that instances forget a request that has its client's id: they take an id once at a time."""
        rids = body.get("rid")
        rids = [each for each in (rids if isinstance(rids, list) else [rids]) if isinstance(each, str)]
        if rids:
            calls = [self._abort(instance, rid) for instance in instances for rid in rids]
            await asyncio.gather(*calls)

    async def _abort(self, instance: Instance, rid: str) -> None:
        with contextlib.suppress(*_CALL_ERRORS):  # whoever does not answer has forgotten it, or is avoided
            async with (
                asyncio.timeout(RELEASE_SECONDS),
                self._session.post(f"{instance.url}/abort_request", json={"rid": rid}) as response,
            ):
                await response.read()

    async def _attempt(
        self,
        exchange: Exchange,
        body: dict[str, Any],
        prefill: Instance,
        decode: Instance,
        began: float,
        stream: StreamSoFar,
    ) -> None:
        port = prefill.bootstrap_port
        assert port is not None, "a prefill instance without a bootstrap port is not up"
        data = encode_json(
            with_rooms(
                exchange.path,
                body,
                host=prefill.bootstrap_host,
                port=port,
                random_source=self._random,
                dp_sizes=(prefill.dp_size, decode.dp_size),
            )
        )
        headers = {"content-type": "application/json"}
        headers |= {name.decode(): value.decode("latin-1") for name, value in exchange.headers if name in _FORWARDED}
        if self._recomputes and body.get("stream"):
            headers[RESUMABLE.decode()] = "1"
        left = max(0.001, began + self._request_seconds - time.monotonic())
        filling = self._start(prefill, self._prefill(exchange.path, data, headers, prefill, left))
        asking = self._start(decode, self._ask(exchange.path, data, headers, decode, left))
        finished = False
        hung: list[str] = []
        task = asyncio.current_task()
        assert task is not None, "a dispatch runs in a task"

        def give_up(reason: str) -> None:
            if not hung and not stream.writing:  # whoever hangs is told of again
                hung.append(reason)
                task.cancel()

        prefill.waiting.add(give_up)
        decode.waiting.add(give_up)
        try:
            await asyncio.wait({filling, asking}, return_when=asyncio.FIRST_COMPLETED)
            if not asking.done():
                await filling  # an error here ends the request, although decode still waits
            async with await asking as response:
                prefill.waiting.discard(give_up)  # decode speaks: prefill has done its part
                await self._relay(exchange, response, decode, stream)
                finished = response.status < 400
        except asyncio.CancelledError as error:
            if not hung:
                raise
            task.uncancel()
            raise HttpError(504, hung[0]) from error
        finally:
            prefill.waiting.discard(give_up)
            decode.waiting.discard(give_up)
            asking.cancel()
            if not finished:
                filling.cancel()
            await asyncio.wait({asking} if finished else {asking, filling})
            if not asking.cancelled() and asking.exception() is None:
                asking.result().close()
            if not filling.done():
                self._let_finish(filling)
            elif not filling.cancelled():
                filling.exception()  # decode has answered all the same

    def _start(self, instance: Instance, call: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        def ended(_: asyncio.Task[Any]) -> None:
            instance.outstanding -= 1

        instance.outstanding += 1
        task = asyncio.create_task(call)
        task.add_done_callback(ended)
        return task

    async def _prefill(
        self, path: str, data: bytes, headers: dict[str, str], instance: Instance, seconds: float
    ) -> None:
        """The prefill half; its answer is of no interest unless it is an error."""
        response = await self._ask(path, data, headers, instance, seconds)
        async with response:
            try:
                if response.status >= 300:
                    message = message_of(await body_of(response))
                    if 400 <= response.status < 500:  # the client's own fault, whoever sees it first
                        raise HttpError(response.status, message)
                    status = response.status if response.status >= 500 else 502
                    raise HttpError(status, f"{instance.name} answered {response.status}: {message}")
                async for _ in response.content.iter_any():
                    pass
            except _CALL_ERRORS as error:
                raise HttpError(502, f"{instance.name} failed while answering: {reason_of(error)}") from error

    async def _ask(
        self, path: str, data: bytes, headers: dict[str, str], instance: Instance, seconds: float
    ) -> aiohttp.ClientResponse:
        """Send the request; returns once the answer begins. `seconds`: until the answer must have ended."""
        timeout = aiohttp.ClientTimeout(total=seconds, sock_connect=CONNECT_SECONDS)
        try:
            return await self._session.post(instance.url + path, data=data, headers=headers, timeout=timeout)
        except _CONNECT_ERRORS as error:
            raise _Unreachable(instance, reason_of(error)) from error
        except TimeoutError as error:
            raise HttpError(504, f"{instance.name} has not answered within the router's --request-timeout") from error
        except _CALL_ERRORS as error:
            raise HttpError(502, f"{instance.name} failed before it answered: {reason_of(error)}") from error

    async def _relay(
        self, exchange: Exchange, response: aiohttp.ClientResponse, decode: Instance, stream: StreamSoFar
    ) -> None:
        kind = response.headers.get("content-type", "application/json").encode("latin-1")
        if not kind.startswith(b"text/event-stream"):
            try:
                body = await response.read()
            except _CALL_ERRORS as error:
                raise HttpError(502, f"{decode.name} failed while answering: {reason_of(error)}") from error
            if response.status in LOST or stream.can_go_on:
                raise HttpError(response.status, message_of(body))
            await exchange.answer(response.status, body, [(b"content-type", kind)])
            return
        tail = b"\n\n"
        try:
            while chunk := await self._read(response, decode):
                data = stream.take(chunk)
                if data:
                    stream.writing = True
                    if not exchange.status:
                        await exchange.begin(response.status)
                    await exchange.write(data)
                    stream.writing = False
                    tail = data[-2:]
            rest = stream.finish()
        except (HttpError, asyncio.CancelledError):
            if tail != b"\n\n":  # the event that was cut ends here, so that the error is an event of its own
                await exchange.write(b"\n\n")
            raise
        stream.writing = True
        if not exchange.status:
            await exchange.begin(response.status)
        await exchange.end(rest)

    async def _read(self, response: aiohttp.ClientResponse, decode: Instance) -> bytes:
        idle = asyncio.timeout(self._idle_seconds)
        try:
            async with idle:
                data = await response.content.readany()
                decode.silent_probes = 0  # however long its health takes: it does not hang
                return data
        except TimeoutError as error:
            limit = f"sent nothing for {self._idle_seconds:g} s" if idle.expired() else "was over --request-timeout"
            raise HttpError(504, f"{decode.name} {limit}") from error
        except _CALL_ERRORS as error:
            raise HttpError(502, f"{decode.name} ended in the middle of its answer: {reason_of(error)}") from error

    def _let_finish(self, filling: asyncio.Task[Any]) -> None:
        """Let a prefill instance end its answer: closing early would look like a client that left."""
        handle = asyncio.get_running_loop().call_later(PREFILL_REST_SECONDS, filling.cancel)

        def ended(task: asyncio.Task[Any]) -> None:
            handle.cancel()
            self._finishing.discard(task)
            if not task.cancelled():
                task.exception()

        self._finishing.add(filling)
        filling.add_done_callback(ended)


def _deadline(body: dict[str, Any]) -> float | None:
    """Seconds that the client gives its request; None if it does not say, or says what instances refuse."""
    seconds = body.get("deadline_s")
    return seconds if isinstance(seconds, int | float) and not isinstance(seconds, bool) else None


def _in_time(body: dict[str, Any], began: float) -> dict[str, Any]:
    """The body, with what is left of its deadline."""
    seconds = _deadline(body)
    elapsed = time.monotonic() - began
    return body if seconds is None or elapsed < 0.001 else {**body, "deadline_s": seconds - elapsed}

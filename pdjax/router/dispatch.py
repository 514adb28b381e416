"""Sends a request to a prefill and a decode instance at once, and relays what the decode instance says.

The first of the two to fail ends the request: whoever waits for the other would wait for nothing.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Coroutine
from typing import Any

import aiohttp

from pdjax.router.fleet import Fleet, Instance, message_of, reason_of
from pdjax.router.rooms import with_rooms
from pdjax.web import Exchange, HttpError, Recorder, decode_object, encode_json, error_payload

ERROR_BODY = 1 << 20  # bytes of an instance's error that are read
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
        idle_seconds: the longest pause between two pieces of a stream.
    """

    def __init__(self, fleet: Fleet, session: aiohttp.ClientSession, *, idle_seconds: float) -> None:
        self.retries = 0
        self._fleet = fleet
        self._session = session
        self._idle_seconds = idle_seconds
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
        """Each failure to connect takes an instance out, so this ends with a pair that answers or with none left."""
        last: _Unreachable | None = None
        for _ in range(len(self._fleet.prefill) + len(self._fleet.decode)):
            try:
                prefill, decode = self._fleet.choose()
            except HttpError as error:
                if last is None:
                    raise
                raise HttpError(503, f"{last.instance.name} can't be reached, and {error.message}") from error
            try:
                return await self._attempt(exchange, body, prefill, decode)
            except _Unreachable as unreachable:
                self._fleet.mark_down(unreachable.instance, str(unreachable))
                last = unreachable
                self.retries += 1
        assert last is not None, "a fleet has instances"
        raise HttpError(502, f"{last.instance.name} can't be reached ({last}), nor could any other")

    async def _attempt(self, exchange: Exchange, body: dict[str, Any], prefill: Instance, decode: Instance) -> None:
        port = prefill.bootstrap_port
        assert port is not None, "a prefill instance without a bootstrap port is not up"
        data = encode_json(
            with_rooms(exchange.path, body, host=prefill.bootstrap_host, port=port, random_source=self._random)
        )
        headers = {"content-type": "application/json"}
        headers |= {name.decode(): value.decode("latin-1") for name, value in exchange.headers if name in _FORWARDED}
        filling = self._start(prefill, self._prefill(exchange.path, data, headers, prefill))
        asking = self._start(decode, self._ask(exchange.path, data, headers, decode))
        finished = False
        hung: list[str] = []
        task = asyncio.current_task()
        assert task is not None, "a dispatch runs in a task"

        def give_up(reason: str) -> None:
            if not hung:
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
                await self._relay(exchange, response, decode)
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

    async def _prefill(self, path: str, data: bytes, headers: dict[str, str], instance: Instance) -> None:
        """The prefill half; its answer is of no interest unless it is an error."""
        response = await self._ask(path, data, headers, instance)
        async with response:
            try:
                if response.status >= 300:
                    message = message_of(await response.content.read(ERROR_BODY))
                    status = response.status if response.status >= 400 else 502
                    raise HttpError(status, f"{instance.name} answered {response.status}: {message}")
                async for _ in response.content.iter_any():
                    pass
            except _CALL_ERRORS as error:
                raise HttpError(502, f"{instance.name} failed while answering: {reason_of(error)}") from error

    async def _ask(self, path: str, data: bytes, headers: dict[str, str], instance: Instance) -> aiohttp.ClientResponse:
        """Send the request; returns once the answer begins."""
        try:
            return await self._session.post(instance.url + path, data=data, headers=headers)
        except _CONNECT_ERRORS as error:
            raise _Unreachable(instance, reason_of(error)) from error
        except TimeoutError as error:
            raise HttpError(504, f"{instance.name} has not answered within the router's --request-timeout") from error
        except _CALL_ERRORS as error:
            raise HttpError(502, f"{instance.name} failed before it answered: {reason_of(error)}") from error

    async def _relay(self, exchange: Exchange, response: aiohttp.ClientResponse, decode: Instance) -> None:
        kind = response.headers.get("content-type", "application/json").encode("latin-1")
        if not kind.startswith(b"text/event-stream"):
            try:
                body = await response.read()
            except _CALL_ERRORS as error:
                raise HttpError(502, f"{decode.name} failed while answering: {reason_of(error)}") from error
            await exchange.answer(response.status, body, [(b"content-type", kind)])
            return
        await exchange.begin(response.status)
        tail = b"\n\n"
        try:
            while chunk := await self._read(response, decode):
                tail = chunk[-2:]
                await exchange.write(chunk)
        except (HttpError, asyncio.CancelledError):
            if tail != b"\n\n":  # the event that was cut ends here, so that the error is an event of its own
                await exchange.write(b"\n\n")
            raise
        await exchange.end()

    async def _read(self, response: aiohttp.ClientResponse, decode: Instance) -> bytes:
        idle = asyncio.timeout(self._idle_seconds)
        try:
            async with idle:
                return await response.content.readany()
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

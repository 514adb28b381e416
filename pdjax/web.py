"""What a frontend and a router both say to HTTP clients: one exchange at a time over ASGI, errors, server-sent events.

An `Exchange` is a request and its answer. It is used instead of a framework's request and response objects because
the one thing that matters most here, a client that has gone, must be noticed at once, whether or not a stream is open.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
import sys
from collections.abc import Awaitable, Callable, Generator, Iterable, Mapping
from typing import Any, Protocol, TypeVar

import msgspec
import uvicorn

MAX_BODY = 64 << 20  # bytes; a batch of prompts of millions of tokens fits
KEEP_ALIVE_SECONDS = 75  # routers keep idle connections for 50 s; the server must not be the first to close
DRAIN_SECONDS = 3  # for open requests, once told to stop
DONE = b"data: [DONE]\n\n"
RESUMABLE = b"x-pdjax-resumable"  # the header by which a router asks for the two kinds of blocks below
OPENING = b": pdjax opening "  # then JSON: what a stream needs to go on at another instance
TOLD = b": pdjax told "  # then JSON: the tokens that all blocks before it tell of

_TYPES = {404: "not_found_error", 429: "rate_limit_error"}
T = TypeVar("T")
Receive = Callable[[], Awaitable[Mapping[str, Any]]]
Send = Callable[[dict[str, Any]], Awaitable[None]]


class HttpError(Exception):
    """A request that ends in an error; `message` is a sentence for the client."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.message = message


class ClientGone(Exception):
    """The client has closed its connection."""


def error_payload(status: int, message: str) -> dict[str, Any]:
    """The body of an error, in OpenAI's shape."""
    kind = _TYPES.get(status, "invalid_request_error" if 400 <= status < 500 else "server_error")
    return {"error": {"message": message, "type": kind, "code": status}}


def encode_json(value: Any) -> bytes:
    """JSON in UTF-8."""
    return msgspec.json.encode(value)


def event(value: Any) -> bytes:
    """One server-sent event. Routers look for the end mark anywhere in a chunk, so a text that has it is escaped."""
    return b"data: %b\n\n" % encode_json(value).replace(b"data: [DONE]", rb"data: \u005bDONE]")


def decode_object(body: bytes) -> dict[str, Any]:
    """A request body that is a JSON object. Integers stay exact.

    Raises:
        HttpError: 400.
    """
    try:
        value = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise HttpError(400, f"the request body is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise HttpError(400, f"the request body must be a JSON object, not {type(value).__name__}")
    return value


async def read_body(receive: Receive) -> bytes:
    """The whole body of a request.

    Raises:
        ClientGone: the client left while sending.
        HttpError: 400, it is over `MAX_BODY`.
    """
    parts: list[bytes] = []
    size = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        parts.append(message.get("body", b""))
        size += len(parts[-1])
        if size > MAX_BODY:
            raise HttpError(400, f"the request body is over {MAX_BODY} bytes, the most that is taken")
        if not message.get("more_body", False):
            return b"".join(parts)


class Exchange:
    """One HTTP request and its answer.

    Attributes:
        path: of the request.
        status: of the answer, once begun; 0 before.
    """

    def __init__(self, scope: Any, receive: Receive, send: Send) -> None:
        self.path: str = scope["path"]
        self.headers: list[tuple[bytes, bytes]] = scope["headers"]
        self.status = 0
        self._receive = receive
        self._send = send
        self._ended = False

    async def until_gone(self, work: Awaitable[T]) -> T:
        """Do `work`; cancel it when the client leaves.

        Raises:
            ClientGone: it did.
        """
        task = asyncio.ensure_future(work)
        watch = asyncio.ensure_future(self._gone())
        try:
            await asyncio.wait({task, watch}, return_when=asyncio.FIRST_COMPLETED)
            if not task.done() and not self._ended:
                raise ClientGone
            return await task
        finally:
            for each in (task, watch):
                each.cancel()
            await asyncio.gather(task, watch, return_exceptions=True)

    async def answer(self, status: int, body: bytes, headers: Iterable[tuple[bytes, bytes]] | None = None) -> None:
        """Send the whole answer: JSON, unless `headers` say otherwise."""
        headers = list(headers) if headers is not None else [(b"content-type", b"application/json")]
        await self.begin(status, [*headers, (b"content-length", b"%d" % len(body))])
        await self.end(body)

    async def begin(self, status: int, headers: Iterable[tuple[bytes, bytes]] | None = None) -> None:
        """Send the head of an answer: of an event stream, unless `headers` say otherwise."""
        if headers is None:
            headers = [(b"content-type", b"text/event-stream"), (b"cache-control", b"no-cache")]
        self.status = status
        await self._send({"type": "http.response.start", "status": status, "headers": list(headers)})

    async def write(self, data: bytes) -> None:
        """Send a piece of the answer's body at once."""
        await self._send({"type": "http.response.body", "body": data, "more_body": True})

    async def end(self, data: bytes = b"") -> None:
        """Send the last piece of the answer's body."""
        self._ended = True
        await self._send({"type": "http.response.body", "body": data, "more_body": False})

    async def fail(self, error: HttpError) -> None:
        """Answer with an error; as the last event, if a stream is open."""
        payload = error_payload(error.status, error.message)
        if self._ended:
            return
        if self.status:
            await self.end(event(payload))
        else:
            await self.answer(error.status, encode_json(payload))

    async def _gone(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass


class Recorder(Exchange):
    """An exchange without a client: it keeps what would be sent in `body_sent`."""

    def __init__(self, path: str) -> None:
        self.body_sent = bytearray()

        async def receive() -> dict[str, Any]:
            return await asyncio.get_running_loop().create_future()  # nobody leaves

        async def send(message: dict[str, Any]) -> None:
            self.body_sent += message.get("body", b"")

        super().__init__({"path": path, "headers": []}, receive, send)


class ExchangeRoute:
    """An ASGI endpoint made of a coroutine that takes the exchange and its body.

    `observe` is called at the end of each with path and status; 499 stands for a client that left.
    """

    def __init__(
        self, handle: Callable[[Exchange, bytes], Awaitable[None]], observe: Callable[[str, int], None]
    ) -> None:
        self._handle = handle
        self._observe = observe

    async def __call__(self, scope: Any, receive: Receive, send: Send) -> None:
        exchange = Exchange(scope, receive, send)
        status = 500
        try:
            try:
                body = await read_body(receive)
                await exchange.until_gone(self._handle(exchange, body))
                status = exchange.status
            except HttpError as error:
                status = error.status
                await exchange.fail(error)
        except ClientGone:
            status = 499
        finally:
            self._observe(exchange.path, status)


class Stoppable(Protocol):
    """What `serve` asks of the one who owns the exchanges."""

    async def run(self) -> str | None:
        """Work beside the server. Returning ends the server: with a problem in words, or None."""
        ...

    def abandon(self, reason: str) -> None:
        """End all open exchanges with an error."""
        ...


class _Server(uvicorn.Server):
    """Leaves signals to `serve`, and sleeps: uvicorn's own loop wakes ten times a second to look for the end."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self._told = asyncio.Event()

    def stop(self) -> None:
        """Take no more connections and end, once open exchanges have."""
        self.should_exit = True
        self._told.set()

    async def main_loop(self) -> None:
        """Renew the Date header each second, until told to stop."""
        while not self.should_exit:
            await self.on_tick(0)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(1):
                    await self._told.wait()

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield


def bind(host: str, port: int) -> socket.socket:
    """A listening socket.

    Raises:
        OSError: with a sentence.
    """
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host, port), family=family, backlog=2048)
    except OSError as error:
        raise OSError(error.errno, f"cannot listen on {host} port {port}: {error.strerror}; choose another") from error


async def serve(app: Any, listener: socket.socket, owner: Stoppable, *, name: str) -> int:
    """Serve until SIGTERM or SIGINT, or until the owner's `run` returns.

    Once told to stop, no new connection is taken, open exchanges may go on for `DRAIN_SECONDS` and are then ended in
    words.

    Returns:
        The exit code: 0 if it was asked to stop, 1 otherwise.
    """
    config = uvicorn.Config(
        app,
        log_level="warning",
        access_log=False,
        timeout_keep_alive=KEEP_ALIVE_SECONDS,
        timeout_graceful_shutdown=DRAIN_SECONDS + 1,
        lifespan="off",
        ws="none",
        server_header=False,
    )
    server = _Server(config)
    loop = asyncio.get_running_loop()
    told = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, told.set)
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    work = asyncio.create_task(owner.run())
    waiting = asyncio.create_task(told.wait())
    await asyncio.wait({serving, work, waiting}, return_when=asyncio.FIRST_COMPLETED)
    problem = None
    if work.done():
        problem = work.result() or "its work has ended"
        say(name, f"stopping: {problem}")
        owner.abandon(problem)
        await asyncio.sleep(0.2)  # let the errors reach their clients
    server.stop()
    drain = asyncio.create_task(_abandon_later(owner, f"this {name} is stopping"))
    await asyncio.wait({serving}, timeout=0.5 if problem else DRAIN_SECONDS + 2)
    server.force_exit = True
    await asyncio.wait({serving}, timeout=0.3)
    for task in (work, waiting, drain, serving):
        task.cancel()
    await asyncio.wait({work, waiting, drain, serving}, timeout=1)
    return 0 if problem is None else 1


async def _abandon_later(owner: Stoppable, reason: str) -> None:
    await asyncio.sleep(DRAIN_SECONDS)
    owner.abandon(reason)


def say(name: str, text: str) -> None:
    """One line for whoever watches the process."""
    print(f"pdjax {name}: {text}", file=sys.stderr, flush=True)

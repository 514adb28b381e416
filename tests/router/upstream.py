"""Instances as a router sees them, on loopback, that a test can slow down, break and kill; and the router process."""

from __future__ import annotations

import asyncio
import http.client
import json
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Awaitable, Callable
from typing import Any, ClassVar

from aiohttp import web

PATIENCE = 30.0  # seconds; for what takes milliseconds on an idle machine
Handler = Callable[[web.Request, dict[str, Any]], Awaitable[web.StreamResponse]]


async def answer_ok(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    return web.json_response({"text": "fine", "room": body["bootstrap_room"]})


class Upstream:
    """An HTTP server in a thread of its own. `handle` answers all generation routes.

    As with real instances, decode has nothing to answer before a prefill instance has got its part of the request.

    Attributes:
        bodies: of the requests, as they came.
        left: set once a client has closed its connection under a request.
    """

    _rooms_prefilled: ClassVar[set[int]] = set()

    def __init__(self, role: str, *, port: int = 0, **info: Any) -> None:
        self.role = role
        self.handle: Handler = answer_ok
        self.health_status = 200
        self.in_pieces = False  # what it says comes in two, as from afar
        self.hangs = False  # as a stopped process does: connections are taken, and nothing is answered
        self.flush_status = 200
        self.load: int | None = 40
        self.bodies: list[dict[str, Any]] = []
        self.left = threading.Event()
        self._info = {"engine_type": role, "served_model_name": "tiny", "max_context": 200} | info
        if role == "prefill":
            self._info.setdefault("disaggregation_bootstrap_port", 8998)
        self._loop = asyncio.new_event_loop()
        self._runner: web.AppRunner
        self.port = port
        threading.Thread(target=self._loop.run_forever, daemon=True).start()
        self._call(self._start())

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def die(self) -> None:
        """Close everything as a killed process would: the listener, and all connections without a word."""
        self._call(self._die())

    def close(self) -> None:
        self._call(self._die())
        self._loop.call_soon_threadsafe(self._loop.stop)

    def _call(self, work: Any) -> None:
        asyncio.run_coroutine_threadsafe(work, self._loop).result(PATIENCE)

    async def _start(self) -> None:
        app = web.Application(client_max_size=64 << 20, middlewares=[self._cut])
        app.router.add_get("/health", self._health)
        app.router.add_get("/server_info", self._server_info)
        app.router.add_get("/get_load", self._get_load)
        app.router.add_post("/flush_cache", self._flush_cache)
        app.router.add_post("/tokenize", self._echo)
        app.router.add_post("/detokenize", self._echo)
        app.router.add_post("/abort_request", self._abort_request)
        for path in ("/generate", "/v1/completions", "/v1/chat/completions"):
            app.router.add_post(path, self._generate)
        self._runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", self.port)
        await site.start()
        self.port = self._runner.addresses[0][1]

    async def _die(self) -> None:
        server = self._runner.server
        if server is None:  # dead already
            return
        for site in list(self._runner.sites):
            await site.stop()
        for connection in server.connections:
            if connection.transport is not None:
                connection.transport.abort()
        await self._runner.cleanup()

    @web.middleware
    async def _cut(self, request: web.Request, handler: Any) -> web.StreamResponse:
        whole = await handler(request)
        if not self.in_pieces or not isinstance(whole, web.Response):
            return whole
        assert isinstance(whole.body, bytes)
        cut = web.StreamResponse(status=whole.status, headers={"content-type": whole.content_type})
        await cut.prepare(request)
        for piece in (whole.body[:5], whole.body[5:]):
            await cut.write(piece)
            await asyncio.sleep(0.05)
        return cut

    async def _health(self, _: web.Request) -> web.Response:
        if self.hangs:
            await asyncio.sleep(2 * PATIENCE)
        return web.Response(status=self.health_status, text="OK")

    async def _server_info(self, _: web.Request) -> web.Response:
        return web.json_response(self._info)

    async def _get_load(self, _: web.Request) -> web.Response:
        return web.json_response([{"dp_rank": 0, "num_tokens": self.load}] if self.load is not None else {})

    async def _flush_cache(self, _: web.Request) -> web.Response:
        return web.Response(status=self.flush_status, text="flushed")

    async def _echo(self, request: web.Request) -> web.Response:
        body = json.loads(await request.read())
        if "wrong" in body:
            return web.Response(status=400, text="unknown field")
        return web.json_response({"path": request.path, "body": body})

    async def _abort_request(self, request: web.Request) -> web.Response:
        body = json.loads(await request.read())
        self.bodies.append(body)
        if "rid" not in body:
            return web.json_response({"error": {"message": "rid: missing"}}, status=400)
        return web.json_response({"aborted": 1})

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        body = json.loads(await request.read())
        self.bodies.append(body)
        rooms = body.get("bootstrap_room", [])
        rooms = set(rooms) if isinstance(rooms, list) else {rooms}
        try:
            if self.role == "prefill":
                self._rooms_prefilled.update(rooms)
            while not rooms <= self._rooms_prefilled:  # filled by other threads
                await asyncio.sleep(0.001)
            return await self.handle(request, body)
        except asyncio.CancelledError:
            self.left.set()
            raise


class RouterProcess:
    """A router in a process of its own."""

    def __init__(self, prefill: list[str], decode: list[str], **options: Any) -> None:
        code = "import sys, json; from pdjax.router.app import serve; a = json.loads(sys.argv[1]); sys.exit(serve(**a))"
        options = {"prefill_urls": prefill, "decode_urls": decode, "port": 0} | options
        command = [sys.executable, "-c", code, json.dumps(options)]
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        assert self.process.stderr is not None
        line = self.process.stderr.readline()
        self.url = line.split()[-1]
        assert self.url.startswith("http://"), line
        self.lines: list[str] = []
        threading.Thread(target=self._read, daemon=True).start()

    def wait_until_ready(self) -> None:
        self.wait_for_health(200)

    def wait_for_health(self, status: int) -> bytes:
        deadline = time.monotonic() + PATIENCE
        while True:
            got, body = self.request("/health")
            if got == status:
                return body
            assert time.monotonic() < deadline, (got, body)
            time.sleep(0.05)

    def request(self, path: str, body: Any = None) -> tuple[int, bytes]:
        data = None if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, {"content-type": "application/json"})
        try:
            with urllib.request.urlopen(request, timeout=PATIENCE) as response:
                return response.status, response.read()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read()

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.terminate()
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.lines.append(line)


def waits_forever() -> Handler:
    async def handle(request: web.Request, body: dict) -> web.StreamResponse:
        await asyncio.sleep(600)
        raise AssertionError("unreachable")

    return handle


def dies(*, once_asked: Upstream | None = None) -> Handler:
    """Breaks the connection, after another upstream has got its half of the request."""

    async def handle(request: web.Request, body: dict) -> web.StreamResponse:
        await asked(once_asked, body)
        assert request.transport is not None
        request.transport.abort()
        return await waits_forever()(request, body)

    return handle


async def asked(upstream: Upstream | None, body: dict) -> None:
    while upstream is not None and body not in upstream.bodies:  # filled by another thread
        await asyncio.sleep(0.01)


def streams(*events: str, then: Handler | None = None) -> Handler:
    """Sends events one by one, then ends the stream, or goes on with `then`."""

    async def handle(request: web.Request, body: dict) -> web.StreamResponse:
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        for event in events:
            await response.write(event.encode())
            await asyncio.sleep(0.01)
        if then is not None:
            await then(request, body)
        return response

    return handle


def message(body: bytes) -> str:
    return json.loads(body)["error"]["message"]


class Client:
    """A connection that is read as bytes come."""

    def __init__(self, router: RouterProcess, body: dict, path: str = "/generate") -> None:
        host, port = router.url.removeprefix("http://").split(":")
        self.connection = http.client.HTTPConnection(host, int(port), timeout=PATIENCE)
        self.connection.request("POST", path, json.dumps(body), {"content-type": "application/json"})

    def leave(self) -> None:
        if self.connection.sock is not None:
            self.connection.sock.shutdown(socket.SHUT_RDWR)
        self.connection.close()


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)

"""The processes that bench/control.py times: a prefill and a decode leader's control plane, ours and SGLang's way.

Each takes JSON lines and prints JSON lines. In both systems a message crosses the same threads: it arrives on a network
thread, goes through a queue to the main thread (the engine's place), and is answered from there.
"""

from __future__ import annotations

import http.client
import json
import queue
import secrets
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import msgspec

BOUND = 30.0  # seconds to wait for any answer
PAGES = 8  # of a room's prompt
INDICES = struct.pack(f"<{PAGES}i", *range(PAGES))


class PdjaxPrefill:
    """Answers a claim with a slot request, a grant with the handoff."""

    def __init__(self) -> None:
        from pdjax.disagg.protocol import messages
        from pdjax.net.network import Network

        self._messages = messages
        self._inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._network = Network(self._inbox.put, secret=None)
        self._network.set_hello(b"prefill")
        self.info = {"port": self._network.listen("127.0.0.1", 0)}
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        from pdjax.net.events import Frame

        messages = self._messages
        while True:
            event = self._inbox.get()
            if not isinstance(event, Frame):
                continue
            match messages.decode_message(event.body):
                case messages.Claim(room=room, generation=generation):
                    answer = messages.SlotRequest(room, generation, 0)
                case messages.SlotGrant(room=room, generation=generation):
                    answer = messages.Handoff(room, generation, 1, 17, -0.5, 0.001, 0.05)
                case _:
                    continue
            self._network.send(event.link, messages.encode(answer))


class PdjaxDecode:
    """Claims rooms. A room's whole talk: claim, slot_request, slot_grant, handoff, complete."""

    def __init__(self, port: int) -> None:
        from pdjax.disagg.protocol import messages
        from pdjax.net.network import Network

        self._messages = messages
        self._inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._network = Network(self._inbox.put, secret=None)
        self._network.set_hello(b"decode")
        self._port = port
        self._links = 0
        self._rooms = 0
        self.info: dict[str, Any] = {}
        self._link = self._connect()

    def _connect(self) -> str:
        from pdjax.net.events import LinkUp

        self._links += 1
        link = f"link-{self._links}"
        self._network.connect(link, "127.0.0.1", self._port, BOUND)
        event = self._inbox.get(timeout=BOUND)
        if not isinstance(event, LinkUp):
            raise SystemExit(f"no link: {event}")
        return link

    def _claim(self, link: str) -> None:
        self._rooms += 1
        claim = self._messages.Claim(self._rooms, secrets.randbits(63), 128, b"12345678")
        self._network.send(link, self._messages.encode(claim))

    def _next(self) -> Any:
        return self._messages.decode_message(self._inbox.get(timeout=BOUND).body)

    def handshake(self, mode: str) -> None:
        """A claim and its answer."""
        self._claim(self._link)
        self._next()

    def make_link(self) -> None:
        """From no link to a room's first answer."""
        self._network.close(self._link)
        self._link = self._connect()
        self.handshake("")

    def rooms(self, mode: str, count: int, window: int) -> None:
        """`count` whole rooms, `window` at a time."""
        messages = self._messages
        started = ended = 0
        while ended < count:
            while started < count and started - ended < window:
                self._claim(self._link)
                started += 1
            match self._next():
                case messages.SlotRequest(room=room, generation=generation):
                    reply = messages.SlotGrant(room, generation, 0, 3)
                case messages.Handoff(room=room, generation=generation):
                    ended += 1
                    reply = messages.Complete(room, generation)
                case message:
                    raise SystemExit(f"unexpected: {message}")
            self._network.send(self._link, messages.encode(reply))


class ZmqPrefill:
    """Takes metadata on a PULL socket, answers with a status through PUSH sockets that it keeps."""

    def __init__(self) -> None:
        import zmq  # pyright: ignore[reportMissingImports]

        self._zmq = zmq
        self._context = zmq.Context()
        self._pull = self._context.socket(zmq.PULL)
        self.info = {"port": self._pull.bind_to_random_port("tcp://127.0.0.1")}
        self._inbox: queue.SimpleQueue[list[bytes]] = queue.SimpleQueue()
        threading.Thread(target=self._receive, daemon=True).start()
        threading.Thread(target=self._serve, daemon=True).start()

    def _receive(self) -> None:
        while True:
            self._inbox.put(self._pull.recv_multipart())

    def _serve(self) -> None:
        pushes: dict[str, Any] = {}
        while True:
            room, ip, port, *_ = self._inbox.get()
            if room == b"None":
                continue  # a registration: nobody answers it
            endpoint = f"tcp://{ip.decode()}:{port.decode()}"
            if endpoint not in pushes:
                pushes[endpoint] = self._context.socket(self._zmq.PUSH)
                pushes[endpoint].connect(endpoint)
            pushes[endpoint].send_multipart([str(int(room)).encode(), b"4", b"0"])


class ZmqDecode:
    """Sends metadata, awaits the status. A room's whole talk is these two, and the query of its rank if asked for."""

    def __init__(self, port: int, http_port: int) -> None:
        import requests
        import zmq  # pyright: ignore[reportMissingImports]

        self._zmq, self._requests = zmq, requests
        self._context = zmq.Context()
        self._pull = self._context.socket(zmq.PULL)
        self._own_port = str(self._pull.bind_to_random_port("tcp://127.0.0.1")).encode()
        self._port, self._http = port, f"127.0.0.1:{http_port}"
        self._kept = http.client.HTTPConnection("127.0.0.1", http_port, timeout=BOUND)
        self._inbox: queue.SimpleQueue[list[bytes]] = queue.SimpleQueue()
        self._rooms = 0
        self._push: Any = None
        self.info: dict[str, Any] = {}
        threading.Thread(target=self._receive, daemon=True).start()
        self.make_link()

    def _receive(self) -> None:
        while True:
            self._inbox.put(self._pull.recv_multipart())

    def _query(self, mode: str, rooms: list[int]) -> None:
        body = {"bootstrap_rooms": rooms}
        if mode == "http":
            ranks = self._requests.post(f"http://{self._http}/query_dp_ranks", json=body, timeout=5).json()
        else:
            text = json.dumps(body)
            self._kept.request("POST", "/query_dp_ranks", text, {"Content-Type": "application/json"})
            ranks = json.loads(self._kept.getresponse().read())
        if len(ranks) != len(rooms):
            raise SystemExit(f"asked for the ranks of {len(rooms)} rooms, got {len(ranks)}")

    def _claim(self) -> None:
        self._rooms += 1
        room = str(self._rooms).encode()
        frames = [room, b"127.0.0.1", self._own_port, b"session:17000", INDICES, b"3", b"", b"1", b"0"]
        self._push.send_multipart(frames)

    def _next(self) -> None:
        room, status, _ = self._inbox.get(timeout=BOUND)
        if status != b"4" or not 0 < int(room) <= self._rooms:
            raise SystemExit(f"room {room!r} has status {status!r}")

    def handshake(self, mode: str) -> None:
        """Metadata and the status; before it the room's rank, by HTTP unless mode is empty."""
        if mode:
            self._query(mode, [self._rooms + 1])
        self._claim()
        self._next()

    def make_link(self) -> None:
        """Topology and a rank's address by HTTP, a new socket, a registration, and a room's first answer."""
        if self._push is not None:
            self._push.close(0)
        for rank in (-1, 0):
            answer = self._requests.get(f"http://{self._http}/route", params={"rank": rank}, timeout=5)
            answer.json()
        self._push = self._context.socket(self._zmq.PUSH)
        self._push.connect(f"tcp://127.0.0.1:{self._port}")
        pointers = struct.pack("<60Q", *range(60))
        self._push.send_multipart([b"None", b"127.0.0.1", self._own_port, b"session:17000", pointers, pointers, b"0"])
        self.handshake("")

    def rooms(self, mode: str, count: int, window: int) -> None:
        """`count` whole rooms, `window` at a time; ranks are asked for together, for all that start at a time."""
        started = ended = 0
        while ended < count:
            fresh = min(count - started, window - (started - ended))
            if mode and fresh:
                self._query(mode, [self._rooms + 1 + index for index in range(fresh)])
            for _ in range(fresh):
                self._claim()
            started += fresh
            self._next()
            ended += 1
            while not self._inbox.empty():
                self._next()
                ended += 1


class Bootstrap:
    """SGLang's HTTP registry, a process of its own as it is there (the tokenizer's)."""

    def __init__(self) -> None:
        import asyncio

        from aiohttp import web

        topology = {"attn_tp_size": 1, "attn_dp_size": 1, "pp_size": 1, "page_size": 16, "kv_cache_dtype": "auto",
                    "rank_ip": "127.0.0.1", "rank_port": 17000}  # fmt: skip

        async def route(request: web.Request) -> web.Response:
            return web.json_response(topology | {"rank": int(request.query["rank"])})

        async def query(request: web.Request) -> web.Response:
            rooms = (await request.json())["bootstrap_rooms"]
            return web.json_response({str(room): 0 for room in rooms})

        app = web.Application()
        app.add_routes([web.get("/route", route), web.post("/query_dp_ranks", query)])
        listener = socket.create_server(("127.0.0.1", 0))
        self.info = {"port": listener.getsockname()[1]}

        def serve() -> None:
            web.run_app(app, sock=listener, print=None, handle_signals=False, loop=asyncio.new_event_loop())

        threading.Thread(target=serve, daemon=True).start()


def commands() -> Iterator[dict[str, Any]]:
    """What the driver says, a JSON object a line."""
    for line in sys.stdin:
        yield json.loads(line)


def seconds_of(work: Callable[[], None]) -> float:
    """How long a call takes."""
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def obey(side: Any, command: dict[str, Any]) -> Any:
    """Do what the driver asks for: seconds of each, seconds of all, or seconds of processor time."""
    match command["op"]:
        case "handshakes":
            return [seconds_of(lambda: side.handshake(command["mode"])) for _ in range(command["count"])]
        case "links":
            return [seconds_of(side.make_link) for _ in range(command["count"])]
        case "rooms":
            return seconds_of(lambda: side.rooms(command["mode"], command["count"], command["window"]))
        case "cpu":
            return time.process_time()
        case unknown:
            raise SystemExit(f"unknown command {unknown!r}")


def main() -> None:
    """``control_sides.py KIND [PORT...]``."""
    sys.setswitchinterval(1e-4)  # as in an instance
    kind, *ports = sys.argv[1:]
    kinds: dict[str, Callable[..., Any]] = {
        "pdjax-prefill": PdjaxPrefill, "pdjax-decode": PdjaxDecode, "zmq-prefill": ZmqPrefill, "zmq-decode": ZmqDecode,
        "bootstrap": Bootstrap,
    }  # fmt: skip
    side = kinds[kind](*map(int, ports))
    print(json.dumps(side.info), flush=True)
    for command in commands():
        result = obey(side, command)
        print(msgspec.json.encode({"result": result}).decode(), flush=True)


if __name__ == "__main__":
    main()

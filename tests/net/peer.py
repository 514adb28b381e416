"""A process with a Network, for tests: see `tests.jobs`."""

from __future__ import annotations

import hashlib
import json
import os
import random
import sys
import threading
import time
from typing import Any

from pdjax.net import mpi
from pdjax.net import network as network_module
from pdjax.net.events import Frame, LinkDown, LinkFailed, LinkUp, NetEvent
from pdjax.net.network import Network

output = threading.Lock()
pongs = threading.Semaphore(0)
flood_digest: Any = None
flood_left = 0


def say(**line: Any) -> None:
    with output:
        print(json.dumps(line), flush=True)


def on_event(event: NetEvent) -> None:
    global flood_left
    match event:
        case LinkUp(link, hello, incoming):
            say(event="up", link=link, hello=hello.decode(), incoming=incoming)
        case LinkFailed(link, reason):
            say(event="failed", link=link, reason=reason)
        case LinkDown(link, reason):
            say(event="down", link=link, reason=reason, at=time.monotonic())
        case Frame(link, body) if body[:1] == b"P":
            network.send(link, b"p" + body[1:])
        case Frame(_, body) if body[:1] == b"p":
            pongs.release()
        case Frame(_, body) if flood_left:
            flood_digest.update(body)
            flood_left -= 1
            if not flood_left:
                say(event="flooded", digest=flood_digest.hexdigest())
        case Frame(link, body):
            say(event="frame", link=link, body=body.decode())


def flood(seed: int, frames: int, largest: int) -> list[bytes]:
    """Bodies that begin with no letter that means anything here."""
    source = random.Random(seed)
    return [b"f" + source.randbytes(int(source.random() ** 20 * largest)) for _ in range(frames)]


def round_trips(link: str, count: int) -> list[float]:
    times = []
    for _ in range(count):
        start = time.perf_counter()
        network.send(link, b"P" + bytes(200))
        assert pongs.acquire(timeout=10)
        times.append(time.perf_counter() - start)
    return sorted(times)


secret = sys.argv[2].encode() if len(sys.argv) > 2 else None
if sys.argv[1] == "plain":
    network_module._MAX_JOINS_OF_A_PAIR = 0
network = Network(on_event, secret=secret)
say(pid=os.getpid())
for text in sys.stdin:
    command = json.loads(text)
    match command["op"]:
        case "hello":
            network.set_hello(command["text"].encode())
        case "listen":
            say(answer="listen", port=network.listen("127.0.0.1", 0))
        case "connect":
            network.connect(command["link"], "127.0.0.1", command["port"], command.get("timeout", 20.0))
        case "send":
            network.send(command["link"], command["text"].encode())
        case "close":
            network.close(command["link"])
        case "expect_flood":
            flood_digest, flood_left = hashlib.sha256(), command["frames"]
            say(answer="expect_flood")
        case "flood":
            bodies = flood(command["seed"], command["frames"], command["largest"])
            for body in bodies:
                network.send(command["link"], body)
            say(answer="flood", digest=hashlib.sha256(b"".join(bodies)).hexdigest())
        case "round_trips":
            times = round_trips(command["link"], command["count"])
            say(answer="round_trips", p50=times[len(times) // 2], p99=times[len(times) * 99 // 100])
        case "usage":
            say(answer="usage", cpu=time.process_time(), fds=len(os.listdir("/proc/self/fd")))
        case "quit":
            network.stop()
            mpi.shutdown(0)

"""A prefill and a decode role over two engines in this process, stepped by hand: no MPI, and bytes that are copied."""

from __future__ import annotations

import ctypes
import queue
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import msgspec
import numpy as np
from small_engine import EOS, TinyModel

from pdjax.disagg.decode import Decode
from pdjax.disagg.part import Part
from pdjax.disagg.prefill import Prefill
from pdjax.disagg.protocol import messages
from pdjax.disagg.protocol.prefill_room import Timeouts
from pdjax.disagg.protocol.topology import FOLLOW_BOOTSTRAP_ROOM, ranks_of
from pdjax.disagg.receiver import Receiver
from pdjax.disagg.sender import Sender
from pdjax.engine.engine import Engine, Limits
from pdjax.engine.scheduler import Scheduler
from pdjax.launch.devices import layout_of
from pdjax.net.events import Frame, LinkDown, LinkUp
from pdjax.transfer.backend import Drained, Notice, Write, WriteDone
from pdjax.transfer.staging import Slots
from pdjax.wire import Abort, Failed, Flush, Flushed, Generate, Rendezvous, SamplingParams, ToFrontend, Tokens, apart

HOST, PORT = "prefill", 1
SLOTS = 3


class Side:
    """One engine with its inbox, and its ends of the only link there is."""

    def __init__(self) -> None:
        self.inbox: queue.SimpleQueue[object] = queue.SimpleQueue()
        self.emitted: list[ToFrontend] = []
        self.peer: Side = self
        self.hello = b""
        self.regions: dict[int, int] = {}  # addresses
        self.memory: list[np.ndarray] = []
        self.engine: Any = None
        self.links: list[str] = []  # that were asked for

    # A network

    def connect(self, link: str, host: str, port: int, timeout: float) -> None:
        self.links.append(link)
        self.inbox.put(LinkUp(link, self.peer.hello, incoming=False))
        self.peer.inbox.put(LinkUp(link, self.hello, incoming=True))

    def send(self, link: str, body: bytes) -> None:
        self.peer.inbox.put(Frame(link, body))

    def close(self, link: str) -> None:
        self.peer.inbox.put(LinkDown(link, "closed by the peer"))

    # A transfer backend: of the calls for one side, the other makes none

    device_memory = False

    def register(self, region: int, address: int, nbytes: int) -> None:
        self.regions[region] = address

    def register_device_memory(self, region: int, address: int, nbytes: int, *, writable: bool = False) -> None:
        self.regions[region] = address

    def allocate(self, region: int, nbytes: int) -> int:
        self.memory.append(np.zeros(nbytes + 4096, np.uint8))
        self.regions[region] = -(-self.memory[-1].ctypes.data // 4096) * 4096
        return self.regions[region]

    def write(self, write: Write) -> None:
        target = self.peer.regions[write.peer_region] + write.peer_offset
        ctypes.memmove(target, self.regions[write.region] + write.offset, write.nbytes)
        self.peer.inbox.put(Notice(write.notice))
        self.inbox.put(WriteDone(write.id))

    def drain(self, id: int) -> None:
        self.inbox.put(Drained(id))

    def cut_off(self, descriptions: Sequence[bytes]) -> None:
        assert not descriptions

    def disconnect(self, peer: str) -> None:
        return None

    def path(self, peer: str) -> str:
        return "memmove"


class Backend:
    """The part of a side that a role knows as its backend."""

    def __init__(self, side: Side) -> None:
        self._side = side

    def __getattr__(self, name: str) -> Any:
        return getattr(self._side, name)

    def connect(self, peer: str, description: bytes) -> None:
        return None

    def mapped(self, *where: Any) -> AbstractContextManager[None]:
        """Asked where the native kernels are loaded."""
        return nullcontext()


class ClosePair:
    """Both engines, and what a router and a client do. `pages` are those of the decode side's pool."""

    def __init__(
        self,
        prefill_model: TinyModel,
        decode_model: TinyModel,
        *,
        pages: int = 257,
        allocation: str = messages.EARLY,
        overlap: bool = True,
        prefix_cache: bool = True,
        decode_processes: int = 1,
        dp_policy: str = FOLLOW_BOOTSTRAP_ROOM,
        **limits: int,
    ) -> None:
        self.prefill, self.decode = Side(), Side()
        self.prefill.peer, self.decode.peer = self.decode, self.prefill
        self._rooms = 0
        timeouts = Timeouts(bootstrap=1e4, waiting=1e4, transfer=1e4, alloc=1e4, link=1e4, peer=1e4)
        for role, side, tiny in (("prefill", self.prefill, prefill_model), ("decode", self.decode, decode_model)):
            layout = layout_of(tiny.mesh)
            state = layout.state(tiny.spec)
            chunk_pages = tiny.prefill_tokens // state.page_size
            memory: dict[str, Any] = {
                "layout": layout,
                "devices": dict(enumerate(tiny.mesh.devices.flat)),
                "slots": SLOTS,
                "chunk_pages": chunk_pages,
                "backend": Backend(side),
                "verify": True,
            }
            registration = messages.Registration(
                protocol_version=messages.PROTOCOL_VERSION,
                layout_version=messages.LAYOUT_VERSION,
                role=role,
                instance=len(role),
                model="tiny",
                state=state,
                backend="close",
                ranks=ranks_of(layout, [b""] * layout.ranks),
                slots=SLOTS,
                slot_pages=chunk_pages,
                layout=layout,
                allocation=allocation,
            )
            side.hello = messages.encode(registration)
            shared: dict[str, Any] = {"network": side, "registration": registration, "timeouts": timeouts}
            shared |= {"slots": Slots(SLOTS), "processes": decode_processes if role == "decode" else 1}
            shared["dp_policy"] = dp_policy
            if role == "prefill":
                sender = Sender(Part(tiny.runner, **memory))
                make = lambda engine, p=sender, k=shared, post=side.inbox.put: Prefill(  # noqa: E731
                    engine, sender=p, post=post, **k
                )
            else:
                receiver = Receiver(Part(tiny.runner, **memory))
                make = lambda engine, p=receiver, k=shared: Decode(engine, receiver=p, **k)  # noqa: E731
            side.engine = Engine(
                inbox=side.inbox,
                runner=tiny.runner,
                scheduler=Scheduler(prefill_tokens=tiny.prefill_tokens, eos_token_ids=(EOS,)),
                pages=pages if role == "decode" else 257,
                limits=Limits(tiny.max_context, tiny.rows, 10_000, **limits),
                eos_token_ids=(EOS,),
                emit=lambda *messages, side=side: side.emitted.extend(apart(messages)),
                make_role=make,
                overlap=overlap and role == "decode",
                prefix_cache=prefix_cache,
            )

    def send(self, rid: str, ids: Sequence[int], tokens: int = 8, *, sides: str = "pd", **more: Any) -> None:
        """Both halves of a greedy request; takes SamplingParams' and Generate's fields too."""
        sampling = {name: more.pop(name) for name in list(more) if name in SamplingParams.__struct_fields__}
        options: dict[str, Any] = {"temperature": 0.0, "max_new_tokens": tokens, "ignore_eos": True} | sampling
        meeting = Rendezvous(HOST, PORT, self._rooms)
        self._rooms += 1
        wanted = SamplingParams(**options)
        if "p" in sides:
            first = msgspec.structs.replace(wanted, max_new_tokens=1)
            self.prefill.inbox.put(Generate(rid, list(ids), first, meeting, **more))
        if "d" in sides:
            self.decode.inbox.put(Generate(rid, list(ids), wanted, meeting, **more))

    def abort(self, rid: str) -> None:
        for side in (self.prefill, self.decode):
            side.inbox.put(Abort(rid, "the client left"))

    def turn(self) -> None:
        """One turn of each engine's loop."""
        for side in (self.prefill, self.decode):
            assert side.engine._take_messages() is None
            side.engine.role.poll(side.engine.clock())
            side.engine.step()
            side.engine.prefix.check_integrity()

    def run(self, turns: int = 20_000) -> None:
        """Turn until nothing is live, and look whether everything is home."""
        for _ in range(turns):
            self.turn()
            idle = [not side.engine.requests and side.inbox.empty() for side in (self.prefill, self.decode)]
            if all(idle):
                self.at_rest()
                return
        left = {side.engine.role.name: sorted(side.engine.requests) for side in (self.prefill, self.decode)}
        raise AssertionError(f"requests do not end: {left}; {self.stats()}")

    def at_rest(self) -> None:
        """Every page and slot is home."""
        for side in (self.prefill, self.decode):
            side.engine.check_integrity()
            assert side.engine.stats()["staging_slots_free"] == SLOTS

    def stats(self) -> dict[str, float]:
        """Of the decode side."""
        return self.decode.engine.stats()

    def ids(self, rid: str) -> list[int]:
        """The output tokens of a request so far."""
        return [token for frame in self.frames(rid) for token in frame.token_ids]

    def frames(self, rid: str) -> list[Tokens]:
        return [message for message in self.decode.emitted if isinstance(message, Tokens) and message.rid == rid]

    def failure(self, rid: str) -> Failed | None:
        found = [message for message in self.decode.emitted if isinstance(message, Failed) and message.rid == rid]
        assert len(found) < 2
        return found[0] if found else None

    def flush(self) -> list[Flushed]:
        """Of both sides."""
        for side in (self.prefill, self.decode):
            side.inbox.put(Flush(7))
        self.turn()
        found = [
            next(message for message in reversed(side.emitted) if isinstance(message, Flushed))
            for side in (self.prefill, self.decode)
        ]
        return found

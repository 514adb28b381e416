"""What goes over the socket to the leader: one query for many checks, and nothing after a request's end."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable

import pytest

from pdjax import wire
from pdjax.server.leader import Leader
from pdjax.web import HttpError

REQUEST = wire.Generate("a", [1], wire.SamplingParams())


class Peer:
    """The leader's end of the socket."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer, self._frames = reader, writer, wire.FrameReader()
        self.received: list[wire.ToLeader] = []

    def send(self, message: wire.ToFrontend) -> None:
        self._writer.write(wire.encode(message))

    async def receive(self, count: int) -> None:
        """Wait for so many messages in all."""
        async with asyncio.timeout(30):
            while len(self.received) < count:
                data = await self._reader.read(1 << 16)
                assert data, "the frontend has closed the socket"
                self.received += map(wire.decode_to_leader, self._frames.feed(data))


def with_leader(test: Callable[[Leader, Peer], Awaitable[None]]) -> None:
    """Run a test with a connected leader that is ready."""

    async def run() -> None:
        here, there = socket.socketpair()
        leader = Leader(*await asyncio.open_connection(sock=here))
        peer = Peer(*await asyncio.open_connection(sock=there))
        reading = asyncio.create_task(leader.run())
        peer.send(wire.Ready({"engine_type": "decode"}))
        while leader.problem is not None:
            await asyncio.sleep(0.001)
        async with asyncio.timeout(60):
            await test(leader, peer)
        leader.abandon("the test is over")
        reading.cancel()

    asyncio.run(run())


def test_many_health_checks_at_once_are_one_query():
    async def test(leader: Leader, peer: Peer) -> None:
        checks = [asyncio.create_task(leader.stats()) for _ in range(50)]
        await peer.receive(1)
        peer.send(wire.Stats(1, {"steps_total": 3}))
        assert await asyncio.gather(*checks) == [{"steps_total": 3}] * 50
        assert peer.received == [wire.Query(1)]

    with_leader(test)


def test_two_requests_may_not_have_one_id():
    async def test(leader: Leader, peer: Peer) -> None:
        leader.submit([REQUEST])
        with pytest.raises(HttpError, match="'a' is running already"):
            leader.submit([REQUEST])
        with pytest.raises(HttpError, match="'b' is running already"):
            leader.submit([wire.Generate("b", [1], wire.SamplingParams())] * 2)
        await peer.receive(1)
        assert peer.received == [REQUEST]

    with_leader(test)


def test_an_id_is_free_again_after_the_end_and_nothing_that_has_ended_is_aborted():
    async def test(leader: Leader, peer: Peer) -> None:
        inbox = leader.submit([REQUEST])
        peer.send(wire.Tokens("a", [1], [0.0], finish_reason="length"))
        assert (await inbox.next()).token_ids == [1]
        inbox.close_all("no reason")
        again = leader.submit([REQUEST])
        again.close_all("enough")
        await peer.receive(3)
        assert peer.received == [REQUEST, REQUEST, wire.Abort("a", "enough")]

    with_leader(test)


def test_an_id_whose_last_request_is_about_to_end_is_waited_for_and_another_is_not_for_long():
    async def test(leader: Leader, peer: Peer) -> None:
        inbox = leader.submit([REQUEST])
        asyncio.get_running_loop().call_later(0.1, inbox.close_all, "its client has gone")
        await leader.until_free(["a", "b"])
        leader.submit([REQUEST])
        await leader.until_free(["a"])
        with pytest.raises(HttpError, match="running already"):
            leader.submit([REQUEST])

    with_leader(test)


@pytest.mark.parametrize("lives", [1, 2])
def test_what_still_comes_of_an_aborted_request_is_not_told_to_the_next_with_its_id(lives: int):
    async def test(leader: Leader, peer: Peer) -> None:
        for _ in range(lives):
            leader.submit([REQUEST]).close_all("its client has gone")
        inbox = leader.submit([REQUEST])
        for _ in range(lives):
            peer.send(wire.Tokens("a", [1], [0.0]))
            peer.send(wire.MoreTokens(["a"], [1], [0.0]))
            peer.send(wire.Failed("a", 502, "the link is gone"))
            peer.send(wire.Aborted("a"))
        peer.send(wire.Tokens("a", [2], [0.0]))
        assert (await inbox.next()).token_ids == [2]
        with pytest.raises(HttpError, match="running already"):
            leader.submit([REQUEST])

    with_leader(test)


def test_tokens_of_many_requests_in_one_frame_come_to_each_of_them():
    async def test(leader: Leader, peer: Peer) -> None:
        inboxes = [leader.submit([wire.Generate(rid, [1], wire.SamplingParams())]) for rid in "ab"]
        peer.send(wire.MoreTokens(["a", "gone", "b"], [7, 8, 9], [-0.5, -1.0, -1.5]))
        assert [await inbox.next() for inbox in inboxes] == [
            wire.Tokens("a", [7], [-0.5]),
            wire.Tokens("b", [9], [-1.5]),
        ]

    with_leader(test)


def test_tokens_of_a_request_that_nobody_knows_are_dropped():
    async def test(leader: Leader, peer: Peer) -> None:
        peer.send(wire.Tokens("nobody", [1], [0.0]))
        peer.send(wire.Failed("nobody", 500, "words"))
        inbox = leader.submit([REQUEST])
        peer.send(wire.Tokens("a", [2], [0.0]))
        assert (await inbox.next()).token_ids == [2]

    with_leader(test)


def test_after_the_end_every_request_and_check_is_told_why():
    async def test(leader: Leader, peer: Peer) -> None:
        inbox, check = leader.submit([REQUEST]), asyncio.create_task(leader.stats())
        await peer.receive(2)
        leader.abandon("it has ended")
        for work in (inbox.next(), check, leader.stats()):
            with pytest.raises(HttpError, match="it has ended"):
                await work
        with pytest.raises(HttpError, match="it has ended"):
            leader.submit([REQUEST])

    with_leader(test)

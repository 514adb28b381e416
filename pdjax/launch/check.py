"""``check``: test the path to a prefill instance before traffic, and say in words what is wrong with it.

Against a running prefill instance it tests everything up to the open data path. Against a second ``check --serve`` on
the other machine it also moves bytes, both ways, and measures.
"""

from __future__ import annotations

import argparse
import os
import queue
import secrets
import sys
import time

import jax
import msgspec

from pdjax import config as configuration
from pdjax.cache.spec import StateSpec
from pdjax.config import Config
from pdjax.disagg.protocol import messages
from pdjax.disagg.protocol.topology import Rank
from pdjax.launch.check_path import SLOT, SLOTS, Measured, PathFailed, PathSide
from pdjax.launch.data_plane import read_secret
from pdjax.net import mpi
from pdjax.net.events import Frame, LinkDown, LinkFailed, LinkUp
from pdjax.net.network import Network
from pdjax.transfer.backend import TransferError
from pdjax.transfer.slot_memory import Device

MODEL = "pdjax check"  # what the serving side names as its model, by which the other knows it
_PATIENCE = 20.0  # seconds for each step
_SETTLE = 1.0  # seconds in which a prefill instance that does not like us would close the link


class Problem(Exception):
    """What is wrong with the path; the sentence says what to do."""


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    """Serving side to the other: your backend is connected, by this path."""

    path: str


class Write(msgspec.Struct, frozen=True, tag="write"):
    """The other way: write so many pieces of so many bytes into my ring."""

    nbytes: int
    count: int


class Refused(msgspec.Struct, frozen=True, tag="refused"):
    """Serving side: this is what is wrong."""

    problem: str


_decoder = msgspec.msgpack.Decoder(Ready | Write | Refused)


def main_and_exit(args: argparse.Namespace, overrides: list[str]) -> int:
    """`main`, with an end that MPI cannot hold up."""
    sys.setswitchinterval(1e-4)  # as instances have it, for the backend's thread
    code = main(args, overrides)
    mpi.shutdown(code)
    return code


def main(args: argparse.Namespace, overrides: list[str]) -> int:
    """Run one side; returns the exit code: 0 if all is well, 1 if not."""
    try:
        config = configuration.load(args.config, overrides)
        host, port = _address(args.serve or args.prefill)
        mpi.load(config.transfer.ucx_library or None)
        problem = mpi.check_interfaces() if config.transfer.backend == "ucx" else None
        if problem is not None:
            raise Problem(problem)
        inbox: queue.SimpleQueue[object] = queue.SimpleQueue()
        side = PathSide(config, inbox.put, _device())
        _say(f"transfer: {side.summary}")
        network = Network(inbox.put, secret=read_secret(config))
        try:
            if args.serve:
                _serve(config, side, network, inbox, host, port)
            else:
                _check(config, side, network, inbox, host, port)
        finally:
            network.stop()
            side.close()
        return 0
    except (Problem, PathFailed, TransferError, configuration.ConfigError, mpi.MPIError, OSError) as error:
        _say(f"FAILED: {error}")
        return 1


def _check(
    config: Config, side: PathSide, network: Network, inbox: queue.SimpleQueue[object], host: str, port: int
) -> None:
    """Link up twice: first to learn what the other side is, then as what fits it."""
    network.set_hello(messages.encode(_registration(config, side, messages.CHECK)))
    began = time.monotonic()
    network.connect("first", host, port, _PATIENCE)
    peer = messages.decode_registration(_link_up(inbox, "first", host, port).hello)
    _say(f"control link to {host}:{port}: up after {1e3 * (time.monotonic() - began):.0f} ms, secret accepted")
    network.close("first")
    problem = _misfit(config, peer)
    if problem is not None:
        raise Problem(f"the two do not fit together: {problem}")
    ours = _registration(config, side, "decode")
    if peer.model != MODEL:  # a prefill instance takes only what fits its model
        ours = msgspec.structs.replace(
            peer, role="decode", instance=ours.instance, ranks=ours.ranks, layout=ours.layout, slots=SLOTS
        )
    network.set_hello(messages.encode(ours))
    network.connect("second", host, port, _PATIENCE)
    _link_up(inbox, "second", host, port)
    side.backend.connect("peer", peer.ranks[0].transfer)
    _say(f"data path from here to there: {side.backend.path('peer')}")
    if peer.model != MODEL:
        _stays_up(inbox, "second")
        _say(f"the {peer.role} instance has connected to this side; to measure, run `check --serve` in its place")
        _say("OK")
        return
    ready = _frame(inbox, "second")
    if not isinstance(ready, Ready):
        raise Problem(f"the other side says: {ready.problem if isinstance(ready, Refused) else ready}")
    _say(f"data path from there to here: {ready.path}")
    round_trips = side.ping("peer", inbox)
    _say(f"latency of a small write with its notice: {1e6 * round_trips / 2:.0f} us one way (median)")
    for nbytes, count in ((1 << 20, 64), (SLOT, 16)) if side.moves else ():
        network.send("second", msgspec.msgpack.encode(Write(nbytes, count)))
        _report(side.receive(nbytes, count, inbox), "there to here")
        _report(side.send("peer", nbytes, count, inbox), "here to there")
    _say("OK")


def _serve(
    config: Config, side: PathSide, network: Network, inbox: queue.SimpleQueue[object], host: str, port: int
) -> None:
    """Answer checks, one after the other, until stopped."""
    network.set_hello(messages.encode(_registration(config, side, "prefill")))
    _say(f"waiting for checks at {host}:{network.listen(host, port)}; stop with Ctrl-C")
    while True:
        try:
            event = inbox.get()
        except KeyboardInterrupt:
            return
        match event:
            case LinkUp(link, hello):
                peer = messages.decode_registration(hello)
                if peer.role == "decode":
                    _welcome(config, side, network, link, peer)
            case LinkDown(link, _):
                side.backend.disconnect(link)
            case Frame(link, body):
                request = _decoder.decode(body)
                if isinstance(request, Write):
                    try:
                        side.send(link, request.nbytes, request.count, inbox)
                    except PathFailed as error:
                        network.send(link, msgspec.msgpack.encode(Refused(str(error))))
            case _:
                side.answer(event)


def _welcome(config: Config, side: PathSide, network: Network, link: str, peer: messages.Registration) -> None:
    problem = _misfit(config, peer)
    answer: Ready | Refused
    try:
        if problem is not None:
            raise TransferError(problem)
        side.backend.connect(link, peer.ranks[0].transfer)
        side.peer = link
        answer = Ready(side.backend.path(link))
        _say(f"a check has come: {answer.path}")
    except TransferError as error:
        answer = Refused(str(error))
        _say(f"a check was refused: {error}")
    network.send(link, msgspec.msgpack.encode(answer))


def _misfit(config: Config, peer: messages.Registration) -> str | None:
    for field, ours in (
        ("protocol_version", messages.PROTOCOL_VERSION),
        ("layout_version", messages.LAYOUT_VERSION),
        ("backend", config.transfer.backend),
    ):
        theirs = getattr(peer, field)
        if ours != theirs:
            return f"{field} differs: this side has {ours!r}, the other {theirs!r}"
    return None if peer.ranks else "the other side states no rank"


def _registration(config: Config, side: PathSide, role: str) -> messages.Registration:
    return messages.Registration(
        protocol_version=messages.PROTOCOL_VERSION,
        layout_version=messages.LAYOUT_VERSION,
        role=role,
        instance=secrets.randbits(63),
        model=MODEL,
        state=StateSpec("kv", layers=1, heads=1, head_dim=8, page_size=1, dtype="float32"),
        backend=config.transfer.backend,
        ranks=[Rank(side.backend.describe())],
        slots=SLOTS,
        slot_pages=1,
        verify=config.transfer.verify and config.transfer.backend != "fake",
    )


def _link_up(inbox: queue.SimpleQueue[object], link: str, host: str, port: int) -> LinkUp:
    until = time.monotonic() + _PATIENCE + 5
    while True:
        try:
            event = inbox.get(timeout=max(until - time.monotonic(), 0.01))
        except queue.Empty:
            raise Problem(
                f"no link to {host}:{port} within {_PATIENCE:g} s: a firewall, or a peer that hangs?"
            ) from None
        match event:
            case LinkUp(name) if name == link:
                return event
            case LinkFailed(name, reason) if name == link:
                raise Problem(f"no control link: {reason}{_hint(reason)}")


def _hint(reason: str) -> str:
    """What most often is behind a failed link."""
    if "refused" in reason and "it refused" not in reason:
        return ". Nothing listens there: is the instance up, and is this its bootstrap port (Disagg.bootstrap_port)?"
    if "no instance" in reason:
        return ". Is this the bootstrap port (Disagg.bootstrap_port), or the HTTP port?"
    if "secret" in reason:
        return ". Both sides need the same Disagg.secret_file or $PDJAX_SECRET"
    return ""


def _stays_up(inbox: queue.SimpleQueue[object], link: str) -> None:
    until = time.monotonic() + _SETTLE
    while (left := until - time.monotonic()) > 0:
        try:
            event = inbox.get(timeout=left)
        except queue.Empty:
            return
        if isinstance(event, LinkDown) and event.link == link:
            raise Problem(f"the prefill instance closed the link ({event.reason}): its log says why")


def _frame(inbox: queue.SimpleQueue[object], link: str) -> object:
    until = time.monotonic() + _PATIENCE
    while True:
        try:
            event = inbox.get(timeout=max(until - time.monotonic(), 0.01))
        except queue.Empty:
            raise Problem(f"the other side did not answer within {_PATIENCE:g} s") from None
        match event:
            case Frame(name, body) if name == link:
                return _decoder.decode(body)
            case LinkDown(name, reason) if name == link:
                raise Problem(f"the link has ended: {reason}")


def _report(measured: Measured, direction: str) -> None:
    _say(
        f"{measured.nbytes >> 10} KiB pieces, {direction}: {measured.rate / 1e9:.2f} GB/s"
        + (", every byte verified" if measured.verified else "")
    )


def _device() -> Device:
    """The first that JAX has, of whose memory an instance here may hold the most."""
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    try:
        return jax.local_devices()[0]
    except RuntimeError as error:
        raise Problem(f"JAX has no device here: {error}") from error


def _address(text: str) -> tuple[str, int]:
    host, colon, port = text.rpartition(":")
    if not colon or not port.isdigit() or int(port) > 65535:
        raise Problem(f"expected HOST:PORT, not {text!r}")
    return host.strip("[]"), int(port)


def _say(text: str) -> None:
    print(f"pdjax check: {text}", file=sys.stdout, flush=True)

"""What the leader of an instance of several processes has all of them do to their devices, and how that is told.

Orders are numbered, and each frame carries two running digests: one of all orders so far, and one of the tokens that
the leader has read so far. Whoever gets another digest has another past, and must not take part in a collective.
"""

from __future__ import annotations

from typing import Any

import msgspec
import xxhash

from pdjax.engine.plan import DecodeStep, PrefillStep


class SavePages(msgspec.Struct, frozen=True, tag_field="type", tag="save"):
    """Copy pages of a dp rank to host memory, each process its own part, under a number."""

    save: int
    pages: list[int]
    dp_rank: int = 0


class RestorePages(msgspec.Struct, frozen=True, tag_field="type", tag="restore"):
    """Write what was saved under a number into `pages`, from page number `first` on, and forget it."""

    save: int
    pages: list[int]
    first: int


class DropPages(msgspec.Struct, frozen=True, tag_field="type", tag="drop"):
    """Forget what was saved under a number."""

    save: int


class RoleOrder(msgspec.Struct, frozen=True, tag_field="type", tag="role"):
    """What the leader's role has the workers' do, in a form of its own."""

    body: bytes


class Halt(msgspec.Struct, frozen=True, tag_field="type", tag="halt"):
    """End: the instance was asked to stop."""


Order = PrefillStep | DecodeStep | SavePages | RestorePages | DropPages | RoleOrder | Halt


class Frame(msgspec.Struct, frozen=True, array_like=True):
    """An order on its way.

    Attributes:
        number: 0 and on.
        digest: of this order and all before it.
        steps_read: how many steps' tokens the leader has read.
        tokens_digest: of the tokens of those steps.
        order: encoded.
    """

    number: int
    digest: int
    steps_read: int
    tokens_digest: int
    order: msgspec.Raw


class Disagreement(msgspec.Struct, frozen=True, tag_field="type", tag="disagreement"):
    """A worker has another order under a number than its leader says, or has missed some. It does nothing more."""

    number: int
    expected: int
    order: bytes


class OtherTokens(msgspec.Struct, frozen=True, tag_field="type", tag="tokens"):
    """A worker has picked other tokens than its leader. `picked` are its own, by step, since both last agreed."""

    picked: dict[int, list[int]]


class Trouble(msgspec.Struct, frozen=True, tag_field="type", tag="trouble"):
    """A worker can't go on; the sentence says why."""

    reason: str


class Compiled(msgspec.Struct, frozen=True, tag_field="type", tag="compiled"):
    """A worker has compiled so many programs after warm-up, in all."""

    count: int


class AskedToStop(msgspec.Struct, frozen=True, tag_field="type", tag="stop"):
    """A worker was sent SIGTERM or SIGINT: the instance is asked to stop."""


class Reachable(msgspec.Struct, frozen=True, tag_field="type", tag="reachable"):
    """A worker's memory stands ready for other instances, which reach it by this description."""

    transfer: bytes


class RoleReport(msgspec.Struct, frozen=True, tag_field="type", tag="role_report"):
    """What a worker's role tells the leader's, in a form of its own."""

    body: bytes


Report = Disagreement | OtherTokens | Trouble | Compiled | AskedToStop | Reachable | RoleReport

_encoder = msgspec.msgpack.Encoder()
_frames = msgspec.msgpack.Decoder(Frame)
_orders = msgspec.msgpack.Decoder(Order)
_reports = msgspec.msgpack.Decoder(Report)


def encode(message: Order | Frame | Report) -> bytes:
    """MessagePack; the same message makes the same bytes."""
    return _encoder.encode(message)


def decode_frame(body: bytes) -> Frame:
    """Raises msgspec.DecodeError."""
    return _frames.decode(body)


def decode_order(body: bytes | msgspec.Raw) -> Order:
    """Raises msgspec.DecodeError."""
    return _orders.decode(body)


def decode_report(body: bytes) -> Report:
    """Raises msgspec.DecodeError."""
    return _reports.decode(body)


def chain(digest: int, body: bytes) -> int:
    """The running digest after one more piece: 64 bits."""
    return xxhash.xxh3_64_intdigest(digest.to_bytes(8, "little") + body)


def chain_tokens(digest: int, token_ids: list[int]) -> int:
    """The running digest after one more step's tokens."""
    return chain(digest, _encoder.encode(token_ids))


def difference(own: bytes, leaders: bytes) -> str:
    """The first place where two encoded orders differ, in words; of no use if they are the same."""
    return (
        _difference("", msgspec.msgpack.decode(own), msgspec.msgpack.decode(leaders)) or "nothing in the order itself"
    )


def _difference(path: str, own: Any, leaders: Any) -> str | None:
    if own == leaders:
        return None
    found = None
    if isinstance(own, dict) and isinstance(leaders, dict) and own.keys() == leaders.keys():
        found = (_difference(f"{path}.{key}" if path else key, own[key], leaders[key]) for key in own)
    elif isinstance(own, list) and isinstance(leaders, list) and len(own) == len(leaders):
        pairs = enumerate(zip(own, leaders, strict=True))
        found = (_difference(f"{path}[{index}]", left, right) for index, (left, right) in pairs)
    text = next((text for text in found if text is not None), None) if found is not None else None
    return text or f"{path or 'the order'} is {_short(own)}, the leader's is {_short(leaders)}"


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 100 else f"{text[:97]}..."

"""What the leaders of two instances say to each other about rooms: typed MessagePack maps with a ``type`` key.

All but `PieceNotice` travel on the link between the leaders. The notice travels with the bytes, so that it cannot
arrive before them.
"""

from __future__ import annotations

import hashlib
import struct
from typing import Literal

import msgspec

from pdjax.cache.spec import StateSpec
from pdjax.disagg.protocol.topology import Rank, incomplete
from pdjax.transfer.layout import Layout, LayoutError, plan

PROTOCOL_VERSION = 7
LAYOUT_VERSION = 1  # of a staging slot: [head, page, layer, K|V, slot in page, head_dim]
EARLY, PREFILL_COMPLETE = "early", "prefill_complete"
CHECK = "check"  # the role of who only wants to see a prefill instance's registration
MOST_TOKENS = 1_000_000  # of a `Rebootstrap`, to stay under a link's largest message


class Message(msgspec.Struct, frozen=True, tag_field="type"):
    """`generation` is drawn by the decode side for each claim: a room number may be used again, a generation not."""

    room: int
    generation: int


class Claim(Message, frozen=True, tag="claim"):
    """Decode to prefill: the room is mine, my pages are reserved. The digest shows that both have the same prompt.

    `first_page` is the first page of the prompt that is wanted: the decode side has those before it.
    """

    prompt_tokens: int
    prompt_digest: bytes
    first_page: int = 0


class Rebootstrap(Claim, frozen=True, kw_only=True, tag="rebootstrap"):
    """Decode to prefill: a claim that brings its own prompt, of a request that has begun, here or elsewhere, and has no
    pages. Compute these tokens for me; nobody but me waits for them, and I have the token that comes next.

    `tokens` has 4 bytes each, little-endian.
    """

    tokens: bytes
    priority: int = 0


class SlotRequest(Message, frozen=True, tag="slot_request"):
    """Prefill to decode: a chunk is being computed and needs a place to land."""

    chunk: int


class SlotGrant(Message, frozen=True, tag="slot_grant"):
    """Decode to prefill: the chunk may be written into this slot of the staging rings of a dp rank, which has the
    request's pages."""

    chunk: int
    slot: int
    dp_rank: int = 0


class Handoff(Message, frozen=True, tag="handoff"):
    """Prefill to decode, once: the prompt is computed, this is its first token and how many chunks it makes."""

    chunks: int
    first_token: int
    logprob: float
    queue_s: float
    prefill_s: float
    cached_tokens: int = 0  # of the prompt, those that the prefill side's prefix cache had
    top: list[tuple[int, float]] = []  # the best tokens in the first one's place, as many as the request asks for


class PromptLogprobs(Message, frozen=True, tag="prompt_logprobs"):
    """Prefill to decode, before the handoff, if the request asks for them: log-probabilities of the next prompt tokens,
    in order, None for the first of all; and the best tokens in each one's place, if these are asked for too."""

    logprobs: list[float | None]
    top: list[list[tuple[int, float]]] = []


class Complete(Message, frozen=True, tag="complete"):
    """Decode to prefill: everything has landed and is in its pages."""


class Abort(Message, frozen=True, tag="abort"):
    """Either way: the room has failed on my side, with the HTTP status and the sentence for the client."""

    status: int
    reason: str


class AbortAck(Message, frozen=True, tag="abort_ack"):
    """Prefill to decode, after any abort: no write for this generation is or will be on its way."""


class Heartbeat(msgspec.Struct, frozen=True, tag_field="type", tag="heartbeat"):
    """Either way, about every second while the sender has rooms on the link, from its scheduler's loop; and in answer
    to one, if the sender has none. `steps` is how many steps it has run, `rooms` how many rooms it has here."""

    steps: int
    rooms: int


class Refused(msgspec.Struct, frozen=True, tag_field="type", tag="refused"):
    """Either way: a frame of yours was dropped, and why."""

    reason: str


class PathTest(msgspec.Struct, frozen=True, tag_field="type", tag="path_test"):
    """Decode to prefill: send me this test message over the data path, from each of your processes to each of mine."""

    number: int


class PathFailed(msgspec.Struct, frozen=True, tag_field="type", tag="path_failed"):
    """Either way, before the link is given up: a test message did not go, or did not come as it should have."""

    reason: str


RoomMessage = Claim | Rebootstrap | SlotRequest | SlotGrant | PromptLogprobs | Handoff | Complete | Abort | AbortAck
LinkMessage = RoomMessage | Heartbeat | Refused | PathTest | PathFailed


class ChunkNotice(msgspec.Struct, frozen=True):
    """A chunk on its way into a slot: pages [first_page, first_page + pages) of the request's own page order."""

    room: int
    generation: int
    chunk: int
    slot: int
    first_page: int
    pages: int
    nbytes: int  # of the state, however often and in however many pieces it is sent
    source_dp_rank: int = 0
    destination_dp_rank: int = 0


# Of a piece's bytes where its sender has them: how it was made, and 64 bits. See `pdjax.transfer.checksum`.
Checksum = tuple[Literal["xxh3", "mixed_sum"], int]


class PieceNotice(msgspec.Struct, frozen=True, tag_field="type", tag="piece"):
    """Comes with the bytes of one piece of a chunk: what one rank of the prefill side holds for one of the decode side.

    The sender's layout and the receiver's own say which pieces make the chunk; `piece` counts them.
    """

    chunk: ChunkNotice
    prompt_tokens: int
    layout: Layout
    piece: int
    rank: int  # of the decode side
    offset: int  # bytes, in that rank's slot
    nbytes: int
    posted_at: float  # seconds since the epoch by the sender's clock
    checksum: Checksum | None


class PathNotice(msgspec.Struct, frozen=True, tag_field="type", tag="path"):
    """Comes with a test message, of which each of the sender's processes sends one."""

    number: int
    sender: int  # the lowest of the ranks of the process that has sent it
    senders: int


Notice = PieceNotice | PathNotice


class Registration(msgspec.Struct, frozen=True):
    """What an instance says of itself when a link opens. A decode's rings have `slots` slots, each for a chunk of up
    to `slot_pages` pages; `state` says how large a page is, see `Layout.state`.

    `ranks` holds one for each place of the layout.
    """

    protocol_version: int
    layout_version: int
    role: str
    instance: int  # drawn anew in each life of an instance
    model: str
    state: StateSpec
    backend: str
    ranks: list[Rank]
    slots: int = 0
    slot_pages: int = 0
    verify: bool = True  # chunks carry checksums
    layout: Layout = Layout()
    http_port: int = 0
    allocation: str = EARLY  # when decode reserves pages; see `pdjax.config.Disagg.allocation`

    @property
    def processes(self) -> int:
        """How many processes hold the ranks."""
        return len({rank.transfer for rank in self.ranks})


class ProtocolError(Exception):
    """A frame that does not parse, or a peer that does not fit."""


_encoder = msgspec.msgpack.Encoder()
_messages = msgspec.msgpack.Decoder(LinkMessage)
_notices = msgspec.msgpack.Decoder(Notice)
_registrations = msgspec.msgpack.Decoder(Registration)


def encode(message: LinkMessage | Notice | Registration) -> bytes:
    """MessagePack bytes."""
    return _encoder.encode(message)


def decode_message(body: bytes) -> LinkMessage:
    """Parse a frame of the link. Raises `ProtocolError`."""
    return _parse(_messages, body)


def decode_notice(body: bytes) -> Notice:
    """Parse what came with a piece or a test message. Raises `ProtocolError`."""
    return _parse(_notices, body)


def decode_registration(body: bytes) -> Registration:
    """Parse a peer's registration record. Raises `ProtocolError`."""
    return _parse(_registrations, body)


def _parse(decoder: msgspec.msgpack.Decoder, body: bytes):
    try:
        return decoder.decode(body)
    except (msgspec.DecodeError, ValueError) as error:
        raise ProtocolError(f"a frame of {len(body)} bytes does not parse: {error}") from error


def prompt_digest(input_ids: list[int]) -> bytes:
    """8 bytes that differ when two sides have tokenised a prompt differently."""
    return hashlib.blake2b(pack_tokens(input_ids), digest_size=8).digest()


def pack_tokens(token_ids: list[int]) -> bytes:
    """4 bytes each, little-endian."""
    return struct.pack(f"<{len(token_ids)}I", *token_ids)


def unpack_tokens(packed: bytes) -> list[int]:
    """Undo `pack_tokens`; bytes beyond the last whole token are left out."""
    count = len(packed) // 4
    return list(struct.unpack(f"<{count}I", packed[: 4 * count]))


def mismatch(prefill: Registration, decode: Registration) -> str | None:
    """A sentence naming the first thing that keeps two instances from working together, or None."""
    if (prefill.role, decode.role) != ("prefill", "decode"):
        return f"a prefill and a decode instance make a pair, not {prefill.role} and {decode.role}"
    for field in ("protocol_version", "layout_version", "model", "backend", "verify", "allocation"):
        ours, theirs = getattr(prefill, field), getattr(decode, field)
        if ours != theirs:
            return f"{field} differs: prefill has {ours!r}, decode has {theirs!r}"
    for field in StateSpec.__struct_fields__ if prefill.state != decode.state else ():
        ours, theirs = getattr(prefill.state, field), getattr(decode.state, field)
        if ours != theirs:
            return f"{field} of the KV state differs: prefill has {ours!r}, decode has {theirs!r}"
    for side in (prefill, decode):
        absent = incomplete(side.layout, side.ranks)
        if absent is not None:
            return f"{side.role} is not ready: {absent}"
    if decode.slots < 1 or decode.slot_pages < 1:
        return f"decode has no staging ring: {decode.slots} slots of {decode.slot_pages} pages"
    try:
        plan(prefill.state, prefill.layout, decode.layout)
    except LayoutError as error:
        return f"layout: {error}"
    return None

"""The frames between an instance's frontend and its leader: MessagePack over a Unix socket.

Each frame is a 4-byte little-endian length and one MessagePack map with a ``type`` key, so that any ``msgpack``
library can read it. `FrameReader` cuts a byte stream into frames without doing I/O.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator
from typing import Any

import msgspec

MAX_FRAME = 16 << 20  # bytes; a prompt of a million tokens fits
_LENGTH = struct.Struct("<I")


class WireError(Exception):
    """A frame that is too long or does not parse; the sentence says which."""


class Grammar(msgspec.Struct, frozen=True):
    """What an answer must look like: `kind` is json_schema, regex, ebnf (GBNF-like) or json_object (text is empty)."""

    kind: str
    text: str = ""


class SamplingParams(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """How the engine picks tokens. Stop strings are the frontend's: the engine sees token ids only."""

    max_new_tokens: int = 128
    min_new_tokens: int = 0
    temperature: float = 1.0  # 0 is greedy
    top_k: int = 0  # 0 is off
    top_p: float = 1.0
    min_p: float = 0.0
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    seed: int | None = None
    repetition_penalty: float = 1.0  # over prompt and output, as transformers has it
    presence_penalty: float = 0.0  # over the output, as OpenAI has it
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()  # (token, added to its logit)
    grammar: Grammar | None = None


NO_PARTNER = "2.2.2.2"  # SGLang's mark for requests that have no other half


class Rendezvous(msgspec.Struct, frozen=True):
    """Where a request's prefill and decode halves meet: the prefill leader's bootstrap address and the room. The host
    `NO_PARTNER` stands for nowhere: the instance answers alone."""

    host: str
    port: int
    room: int


class Generate(msgspec.Struct, frozen=True, tag_field="type", tag="generate"):
    """Frontend to leader: run this prompt. `rendezvous` is set on prefill and decode instances, never on unified."""

    rid: str
    input_ids: list[int]
    sampling: SamplingParams
    rendezvous: Rendezvous | None = None
    top_logprobs: int = 0  # how many of the best tokens are told at each output position (and prompt position)
    prompt_logprobs: bool = False  # also tell the log-probabilities of the prompt's own tokens
    priority: int = 0  # higher goes first; equals by arrival
    deadline_s: float | None = None  # seconds from arrival until the request fails, wherever it is
    sample_of: str = ""  # another request with the same prompt, of which this is one more sample
    dp_rank: int | None = None  # the dp rank that the client wants it on
    output_ids: list[int] = []  # tokens that another instance has made: this one goes on after them, and tells new ones


class Abort(msgspec.Struct, frozen=True, tag_field="type", tag="abort"):
    """Frontend to leader: nobody waits for this request any more. Unknown ids are ignored."""

    rid: str
    reason: str


class Flush(msgspec.Struct, frozen=True, tag_field="type", tag="flush"):
    """Frontend to leader: drop the prefix cache; answered by `Flushed` with the same id."""

    id: int


class Query(msgspec.Struct, frozen=True, tag_field="type", tag="query"):
    """Frontend to leader: answer `Stats` with the same id, from the scheduler's own loop."""

    id: int


class TraceQuery(msgspec.Struct, frozen=True, tag_field="type", tag="trace_query"):
    """Frontend to leader: answer `Spans` with the same id: what the engine did lately."""

    id: int


class Ready(msgspec.Struct, frozen=True, tag_field="type", tag="ready"):
    """Leader to frontend, first frame: the instance is warm. `info` is what `/server_info` shows."""

    info: dict[str, Any]


class Tokens(msgspec.Struct, frozen=True, tag_field="type", tag="tokens", omit_defaults=True):
    """Leader to frontend: new tokens of a request, in order. `finish_reason` (stop, length) comes with the last.

    `matched` is the stop token that ended the request, which is part of `token_ids`. `timeline` comes with the first
    frame, and whole with the last: named seconds and byte counts of the request's life.
    """

    rid: str
    token_ids: list[int]
    logprobs: list[float]
    finish_reason: str | None = None
    matched: int | None = None
    cached_tokens: int = 0
    timeline: dict[str, float] | None = None
    top_logprobs: list[list[tuple[int, float]]] = []  # a list for each of token_ids, best first; empty if not asked for
    prompt_logprobs: list[float | None] = []  # with the first tokens: one a prompt token, None for the first
    prompt_top_logprobs: list[list[tuple[int, float]]] = []  # as many; the first is empty


class MoreTokens(msgspec.Struct, frozen=True, tag_field="type", tag="more_tokens"):
    """Leader to frontend: one more token of each of some requests, of which nothing else is to say.

    Lists of equal length, since this is most of what a decode step tells; see `apart`.
    """

    rids: list[str]
    token_ids: list[int]
    logprobs: list[float]


class Failed(msgspec.Struct, frozen=True, tag_field="type", tag="failed"):
    """Leader to frontend: the request has ended without an answer. `status` is the HTTP status that fits."""

    rid: str
    status: int
    message: str


class Aborted(msgspec.Struct, frozen=True, tag_field="type", tag="aborted"):
    """Leader to frontend: an `Abort` was taken, whether the request still lived or not.

    An id can be used again at once. What comes of it before this frame is still told of the request that was aborted.
    """

    rid: str


class Stats(msgspec.Struct, frozen=True, tag_field="type", tag="stats"):
    """Leader to frontend: counters and gauges by metric name (without the ``pdjax_`` prefix).

    `problem`: why the instance cannot serve, in words.
    """

    id: int
    values: dict[str, float]
    problem: str | None = None


class Flushed(msgspec.Struct, frozen=True, tag_field="type", tag="flushed"):
    """Leader to frontend: the prefix cache is empty, but for `locked_pages` that running requests hold."""

    id: int
    freed_pages: int
    locked_pages: int


class Span(msgspec.Struct, frozen=True, array_like=True):
    """Something that took time. `start` is in seconds since the epoch; `room` and `rid` say whose it was, if any's."""

    name: str
    start: float
    seconds: float
    rid: str
    room: int | None
    numbers: dict[str, float]


class Spans(msgspec.Struct, frozen=True, tag_field="type", tag="spans"):
    """Leader to frontend: the engine's latest spans, in the order in which they ended."""

    id: int
    spans: list[Span]


ToLeader = Generate | Abort | Query | Flush | TraceQuery
ToFrontend = Ready | Tokens | MoreTokens | Failed | Aborted | Stats | Flushed | Spans

_encoder = msgspec.msgpack.Encoder()
_to_leader = msgspec.msgpack.Decoder(ToLeader)
_to_frontend = msgspec.msgpack.Decoder(ToFrontend)


def apart(messages: Iterable[ToFrontend]) -> Iterator[ToFrontend]:
    """The same, with a `Tokens` for each request in place of `MoreTokens`."""
    for message in messages:
        if isinstance(message, MoreTokens):
            for rid, token_id, logprob in zip(message.rids, message.token_ids, message.logprobs, strict=True):
                yield Tokens(rid, [token_id], [logprob])
        else:
            yield message


def encode(message: ToLeader | ToFrontend) -> bytes:
    """One frame, length first."""
    body = _encoder.encode(message)
    if len(body) > MAX_FRAME:
        raise WireError(f"a frame of {len(body)} bytes is over the limit of {MAX_FRAME}")
    return _LENGTH.pack(len(body)) + body


def decode_to_leader(body: bytes) -> ToLeader:
    """Parse what a frontend sent."""
    return _decode(_to_leader, body)


def decode_to_frontend(body: bytes) -> ToFrontend:
    """Parse what a leader sent."""
    return _decode(_to_frontend, body)


def _decode(decoder: msgspec.msgpack.Decoder, body: bytes) -> Any:
    try:
        return decoder.decode(body)
    except msgspec.DecodeError as error:
        raise WireError(f"a frame of {len(body)} bytes does not parse: {error}") from error


class FrameReader:
    """Cuts a byte stream into frame bodies."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[bytes]:
        """Take received bytes, return the bodies that are now complete. Raises `WireError` on an oversized length."""
        self._buffer += data
        bodies = []
        while len(self._buffer) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._buffer)
            if length > MAX_FRAME:
                raise WireError(f"a frame of {length} bytes is over the limit of {MAX_FRAME}")
            end = _LENGTH.size + length
            if len(self._buffer) < end:
                break
            bodies.append(bytes(self._buffer[_LENGTH.size : end]))
            del self._buffer[:end]
        return bodies

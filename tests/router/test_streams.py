"""What a router lets out of a stream is whole, and what it keeps is what was let out."""

from __future__ import annotations

import itertools
import json

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdjax.router.streams import StreamSoFar
from pdjax.web import HttpError, encode_json

OPENING = b': pdjax opening {"rid":"r","id":"i","began":2.5}\n\n'
DONE = b"data: [DONE]\n\n"


def frame(number: int) -> bytes:
    return b': pdjax told {"token_ids":[%d]}\n\n' % number


def error(code: int) -> bytes:
    return b"data: %b\n\n" % encode_json({"error": {"message": "lost", "type": "server_error", "code": code}})


EVENTS = st.lists(
    st.text(st.characters(codec="utf-8"), max_size=5).map(lambda text: b"data: %b\n\n" % encode_json(text))
)
FRAMES = st.lists(EVENTS, max_size=6)


def cuts(data: bytes, places: list[int]) -> list[bytes]:
    ends = [0, *sorted(place % (len(data) + 1) for place in places), len(data)]
    return [data[start:end] for start, end in itertools.pairwise(ends) if end > start]


def told(stream: StreamSoFar) -> list[int]:
    body = json.loads(encode_json(stream.resumed({"rid": "other"})))
    return [each["token_ids"][0] for each in body.get("pdjax_resume", {}).get("told", [])]


@given(FRAMES, st.lists(st.integers(0, 10_000), max_size=8), st.integers(0, 10_000))
def test_wherever_it_breaks_off_the_client_has_what_the_frames_tell_and_no_more(frames, places, end):
    whole = OPENING + b"".join(b"".join(events) + frame(number) for number, events in enumerate(frames)) + DONE
    whole, stream, out = whole[: end % (len(whole) + 1)], StreamSoFar(), b""
    stream.begin()
    for chunk in cuts(whole, places):
        out += stream.take(chunk)
    known = told(stream)
    assert known == list(range(len(known)))
    assert out == b"".join(b"".join(events) for events in frames[: len(known)])
    assert stream.can_go_on == (OPENING in whole)
    if whole.endswith(DONE):
        assert len(known) == len(frames) and stream.finish() == DONE


@given(st.binary(max_size=40), st.lists(st.integers(0, 100), max_size=4))
def test_a_stream_without_such_blocks_goes_through_as_it_is(data, places):
    stream = StreamSoFar()
    stream.begin()
    out = b"".join(stream.take(chunk) for chunk in cuts(data, places)) + stream.finish()
    assert out == data and not stream.can_go_on
    assert stream.resumed({"text": "x"}) == {"text": "x"}


def test_the_next_instance_is_given_what_all_before_have_told():
    stream = StreamSoFar()
    for first in (0, 2):
        stream.begin()
        stream.take(OPENING + b"data: 1\n\n" + frame(first) + b"data: 2\n\n" + frame(first + 1) + b"data: 3\n\n")
    body = stream.resumed({"text": "x", "stream": True})
    assert body["rid"] == "r" and body["text"] == "x"
    assert (body["pdjax_resume"]["id"], body["pdjax_resume"]["began"]) == ("i", 2.5)
    assert isinstance(body["pdjax_resume"]["told"], msgspec.Raw), "frames are not looked into"
    assert told(stream) == [0, 1, 2, 3]


def test_an_error_is_not_let_out_while_the_stream_may_go_on():
    stream = StreamSoFar()
    stream.begin()
    assert stream.take(OPENING + b"data: 1\n\n" + frame(0) + error(503)) == b"data: 1\n\n"
    with pytest.raises(HttpError) as raised:
        stream.finish()
    assert (raised.value.status, raised.value.message) == (503, "lost")


def test_an_instance_that_would_begin_anew_is_refused():
    stream = StreamSoFar()
    stream.begin()
    stream.take(OPENING + b"data: 1\n\n" + frame(0))
    stream.begin()
    with pytest.raises(HttpError, match="does not go on"):
        stream.take(b'data: {"text": "x"}\n\n')

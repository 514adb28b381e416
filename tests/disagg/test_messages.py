"""What travels on a link is plain MessagePack, checked on arrival."""

from __future__ import annotations

import msgpack
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdjax.cache.spec import StateSpec
from pdjax.disagg.protocol import messages
from pdjax.disagg.protocol.topology import Rank
from pdjax.net.link import MAX_BODY
from pdjax.transfer.layout import Layout

SPEC = StateSpec("kv", 30, 3, 64, 16, "float32")


def registration(role: str = "prefill", **changes: object) -> messages.Registration:
    values = {
        "protocol_version": 1, "layout_version": 1, "role": role, "instance": 5, "model": "m", "state": SPEC,
        "backend": "ucx", "ranks": [Rank(b"")], "slots": 4, "slot_pages": 8,
    }  # fmt: skip
    return messages.Registration(**(values | changes))  # type: ignore[arg-type]


def test_any_msgpack_reads_our_messages() -> None:
    read = msgpack.unpackb(messages.encode(messages.SlotGrant(1 << 62, 7, 3, 2, dp_rank=1)))
    assert read == {"type": "slot_grant", "room": 1 << 62, "generation": 7, "chunk": 3, "slot": 2, "dp_rank": 1}


@given(st.lists(st.integers(0, 2**32 - 1)), st.binary(max_size=3))
def test_tokens_come_as_they_were_packed(token_ids: list[int], more: bytes) -> None:
    packed = messages.pack_tokens(token_ids)
    assert messages.unpack_tokens(packed + more) == token_ids
    assert packed == b"".join(token.to_bytes(4, "little") for token in token_ids)


def test_the_longest_rebootstrap_fits_into_a_message_of_a_link() -> None:
    tokens = bytes(4 * messages.MOST_TOKENS)
    assert len(messages.encode(messages.Rebootstrap(1 << 62, 1 << 62, 1 << 30, bytes(8), tokens=tokens))) <= MAX_BODY


@given(st.binary(max_size=64))
def test_rubbish_is_refused_with_a_sentence(body: bytes) -> None:
    for decode in (messages.decode_message, messages.decode_notice, messages.decode_registration):
        with pytest.raises(messages.ProtocolError, match="does not parse"):
            decode(body)


def test_instances_that_fit_are_a_pair() -> None:
    assert messages.mismatch(registration(), registration("decode")) is None
    three = [Rank(b"one process", tp=0), Rank(b"one process", tp=1), Rank(b"another", tp=2)]
    assert messages.mismatch(registration(), registration("decode", layout=Layout(tp=3), ranks=three)) is None
    two = [Rank(b"one process"), Rank(b"one process", dp=1)]
    assert messages.mismatch(registration(), registration("decode", layout=Layout(dp=2), ranks=two)) is None


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"model": "other"}, "model"),
        ({"backend": "fake"}, "backend"),
        ({"layout_version": 2}, "layout_version"),
        ({"state": msgspec.structs.replace(SPEC, page_size=64)}, "page_size"),
        ({"state": msgspec.structs.replace(SPEC, dtype="bfloat16")}, "dtype"),
        ({"slots": 0}, "staging ring"),
        ({"allocation": "prefill_complete"}, "allocation differs: prefill has 'early', decode has 'prefill_complete'"),
        ({"layout": Layout(tp=3)}, "decode is not ready: 2 of 3 ranks have not registered"),
        ({"layout": Layout(tp=2), "ranks": [Rank(b""), Rank(b"", tp=1)]}, "tp 2 and 3 key-value heads"),
        ({"role": "prefill"}, "prefill and prefill"),
    ],
)
def test_a_mismatch_is_named_with_both_values(changes: dict, named: str) -> None:
    sentence = messages.mismatch(registration(), registration(**{"role": "decode"} | changes))
    assert sentence is not None and named in sentence

"""What the network had said of a link before it was given up is heard after the next one was asked for."""

from __future__ import annotations

import pytest
from close_pair import ClosePair

from pdjax.disagg.protocol import messages
from pdjax.net.events import Frame, LinkDown, LinkFailed, LinkUp

PROMPT = list(range(40))
GIVEN_UP = messages.encode(messages.PathFailed("the path to the decode instance is gone"))


def answer(pair: ClosePair) -> list[int]:
    pair.send("first", PROMPT, 6)
    pair.run()
    return pair.ids("first")


@pytest.mark.parametrize(
    "late",
    [
        lambda old, hello: LinkDown(old, "closed by the peer"),
        lambda old, hello: LinkFailed(old, "connection refused", gone=True),
        lambda old, hello: LinkUp(old, hello, incoming=False),
        lambda old, hello: LinkUp(old, b"no hello", incoming=False),
        lambda old, hello: Frame(old, GIVEN_UP),
        lambda old, hello: Frame(old, b"no frame"),
    ],
    ids=["down", "failed", "up", "misfit", "path failed", "no frame"],
)
def test_words_of_an_old_link_are_not_taken_for_those_of_the_next(models, late) -> None:
    pair = models.pair()
    expected = answer(pair)
    decode = pair.decode
    (old,) = decode.links
    decode.inbox.put(Frame(old, GIVEN_UP))
    pair.send("next", PROMPT, 6)
    event = late(old, pair.prefill.hello)
    decode.inbox.put(event)
    for _ in range(4):
        pair.turn()
        decode.inbox.put(event)
    pair.run()
    assert len(decode.links) == 2 and pair.failure("next") is None
    assert pair.ids("next") == expected
    assert pair.stats()["refused_frames_total"] == 0

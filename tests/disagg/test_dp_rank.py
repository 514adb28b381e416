"""A dp rank that a client names: its room's, or a refusal with the reason."""

from __future__ import annotations

from pdjax.transfer.layout import Layout
from pdjax.wire import Failed


def test_one_that_is_not_the_rooms_is_refused_on_both_sides(models) -> None:
    pair = models.pair()
    for side in (pair.prefill, pair.decode):
        side.engine.role._layout = Layout(dp=2)
    pair.send("room 0", [1, 2, 3], dp_rank=0)
    pair.send("room 1", [1, 2, 3], dp_rank=0)
    pair.turn()
    for side in (pair.prefill, pair.decode):
        (failed,) = [message for message in side.emitted if isinstance(message, Failed)]
        assert (failed.rid, failed.status) == ("room 1", 400)
        assert "room 1 belongs to dp rank 1 of 2" in failed.message and "asks for dp rank 0" in failed.message
        side.engine.role._layout = Layout()
    pair.abort("room 0")
    pair.run()


def test_one_that_is_not_there_is_refused(models) -> None:
    pair = models.pair()
    pair.send("r", [1, 2, 3], dp_rank=1)
    pair.run()
    failed = pair.failure("r")
    assert failed is not None and failed.status == 400
    assert "there is no dp rank 1; this instance has 1, from 0 on" in failed.message
    pair.send("again", [1, 2, 3], dp_rank=0)
    pair.run()
    assert len(pair.ids("again")) == 8

"""What is told of a room once it has ended: to its client, and as metrics."""

from __future__ import annotations

import ctypes

from prometheus_client import CollectorRegistry

from pdjax.server.room_metrics import RoomMetrics
from pdjax.transfer.backend import Write


def test_a_room_tells_how_long_it_took_what_was_moved_and_what_was_sent_again(models) -> None:
    pair = models.pair()
    write, damaged = pair.prefill.write, []

    def damage_the_first(order: Write) -> None:
        write(order)
        if order.peer_region and not damaged:  # region 0 is for test messages
            damaged.append(order)
            first = pair.decode.regions[order.peer_region] + order.peer_offset
            ctypes.memset(first, ctypes.string_at(first, 1)[0] ^ 1, 1)

    pair.prefill.write = damage_the_first  # type: ignore[method-assign]
    pair.send("r", list(range(40)), 4)
    pair.run()
    timeline = pair.frames("r")[-1].timeline
    assert damaged and timeline is not None and timeline["transfer_resends"] == 1
    registry = CollectorRegistry()
    RoomMetrics(registry).finished(timeline)

    def value(name: str) -> float | None:
        return registry.get_sample_value(f"pdjax_room_{name}")

    assert value("resends_total") == 1
    assert value("transfer_bytes_sum") == timeline["transfer_bytes"] > 0
    for phase in ("queue", "handshake", "prefill_queue", "prefill", "transfer"):
        assert value(f"{phase}_seconds_sum") == timeline[f"{phase}_s"]
        assert value(f"{phase}_seconds_count") == 1

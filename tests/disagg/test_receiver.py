"""A decode process's rings, from the moment that peers may know of them."""

from __future__ import annotations

import ctypes

from pdjax.disagg.protocol.topology import region_of


def test_what_lands_while_a_process_still_warms_up_is_not_lost(models) -> None:
    pair = models.pair()
    address = pair.decode.regions[region_of(0)]
    ctypes.memset(address, 7, 64)
    pair.decode.engine.role._receiver.warm_up()
    assert ctypes.string_at(address, 64) == bytes([7]) * 64

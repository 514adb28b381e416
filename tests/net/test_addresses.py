"""By which addresses a host is known."""

from __future__ import annotations

import socket

import psutil

from pdjax.net import addresses


def test_own_addresses_are_those_that_others_may_see() -> None:
    own = addresses.own_addresses()
    assert "127.0.0.1" not in own and "::1" not in own and not any("%" in each for each in own)
    seen = [each.address for each in psutil.net_if_addrs().get("eth0", []) if each.family == socket.AF_INET]
    assert set(seen) <= own


def test_a_host_is_reached_at_the_address_from_which_it_would_speak(monkeypatch) -> None:
    monkeypatch.setattr(addresses, "own_addresses", lambda: {"127.0.0.9"})
    assert addresses.address_towards(["127.0.0.9", "fe80::1", "169.254.3.3", "127.0.0.1"]) is None
    assert addresses.address_towards([]) is None
    eth0 = [each.address for each in psutil.net_if_addrs().get("eth0", []) if each.family == socket.AF_INET]
    for own in eth0:
        assert addresses.address_towards(["fe80::1", own]) == own

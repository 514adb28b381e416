"""Ports that are given to instances."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from pdjax.launch import ports
from pdjax.launch.ports import free_ports


def test_nobody_who_takes_any_port_is_given_one_of_them() -> None:
    first, last = map(int, ports._RANGE.read_text().split())
    found = free_ports(5)
    assert len(set(found)) == 5
    assert first <= ports._LOWEST or not set(found) & set(range(first, last + 1))
    for port in found:
        socket.create_server(("127.0.0.1", port)).close()


@pytest.mark.parametrize("text", ["1024\t65535\n", "10002 65535", ""])
def test_where_the_kernel_gives_out_any_port_there_are_some_all_the_same(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, text: str
) -> None:
    (tmp_path / "range").write_text(text)
    monkeypatch.setattr(ports, "_RANGE", tmp_path / "range")
    found = free_ports(5)
    assert len(set(found)) == 5
    for port in found:
        socket.create_server(("127.0.0.1", port)).close()

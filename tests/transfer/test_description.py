from __future__ import annotations

import ctypes
import mmap
import subprocess
import sys

import msgspec
import pytest

from pdjax.transfer.backend import TransferError
from pdjax.transfer.ucx import description
from pdjax.transfer.ucx.description import Description, Process, Region

KEY = b"a key of 18 bytes."


def described(**changes: object) -> Description:
    whole = Description(
        version=description.VERSION,
        ucx=(1, 20, 1),
        worker=b"address",
        process=description.own_process(),
        regions=[Region(1, 4096, 100, KEY)],
    )
    return msgspec.structs.replace(whole, **changes)


def test_a_description_arrives_as_it_was_sent() -> None:
    assert description.decode(description.encode(described())) == described()


@pytest.mark.parametrize("position", [0, 20, -1])
def test_one_wrong_byte_is_noticed(position: int) -> None:
    data = bytearray(description.encode(described()))
    data[position] ^= 1
    with pytest.raises(TransferError, match="damaged"):
        description.decode(bytes(data))


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"version": 99}, "version 99"),
        ({"worker": b""}, "no worker address"),
        ({"worker": bytes(5000)}, "too much"),
        ({"regions": [Region(1, 4096, 100, b"")]}, "region 1 has no memory or no key"),
        ({"regions": [Region(1, 4096, 100, KEY[:8])]}, "region 1 has no memory or no key"),
        ({"regions": [Region(1, 0, 100, KEY)]}, "region 1 has no memory or no key"),
        ({"regions": [Region(1, 1 << 63, 1 << 63, KEY)]}, "region 1 has no memory or no key"),
        ({"regions": [Region(1, 4096, 1, KEY)] * 2}, "twice"),
        ({"regions": [Region(i, 4096, 1, KEY) for i in range(100)]}, "too much"),
        ({"addresses": ["10.0.0.1"] * 1000}, "too many addresses"),
        ({"addresses": ["x" * 100]}, "what is none"),
    ],
)
def test_what_ucx_would_not_survive_is_refused_with_a_sentence(changes: dict, sentence: str) -> None:
    with pytest.raises(TransferError, match=sentence):
        description.decode(description.encode(described(**changes)))


def test_this_process_is_its_own_neighbour_and_others_that_seem_so_are_not() -> None:
    own = description.own_process()
    assert description.is_neighbour(own)
    replace = msgspec.structs.replace
    assert not description.is_neighbour(replace(own, boot_id="another host's"))
    assert not description.is_neighbour(replace(own, pid_namespace="pid:[1]"))
    assert not description.is_neighbour(replace(own, start_ticks=own.start_ticks + 1))  # the pid was given out again


def test_whoever_sees_this_processs_memory_or_itself_may_share_it_and_others_may_not() -> None:
    own = description.own_process()
    replace = msgspec.structs.replace
    assert description.may_share_memory(replace(own, pid=1, start_ticks=1))
    assert description.may_share_memory(replace(own, pid_namespace="pid:[1]"))
    assert description.may_share_memory(replace(own, ipc_namespace="ipc:[1]"))
    assert not description.may_share_memory(replace(own, pid_namespace="pid:[1]", ipc_namespace="ipc:[1]"))
    assert not description.may_share_memory(replace(own, boot_id="another host's"))


def test_a_process_that_has_ended_is_no_neighbour() -> None:
    script = "from pdjax.transfer.ucx.description import *; print(*msgspec.structs.astuple(own_process()))"
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60)
    boot_id, pid_namespace, pid, start_ticks, _ = ended.stdout.split()
    assert not description.is_neighbour(Process(boot_id, pid_namespace, int(pid), int(start_ticks)))


def test_only_memory_that_is_really_mapped_for_sharing_counts_as_mapped() -> None:
    page = mmap.PAGESIZE
    shared = mmap.mmap(-1, 4 * page)
    address = ctypes.addressof(ctypes.c_char.from_buffer(shared))
    assert description.is_mapped(address, 4 * page)
    assert description.is_mapped(address + 1, 4 * page - 1)
    assert not description.is_mapped(address, 1 << 40)
    assert not description.is_mapped(8, 8)
    private = ctypes.create_string_buffer(page)
    assert not description.is_mapped(ctypes.addressof(private), page)

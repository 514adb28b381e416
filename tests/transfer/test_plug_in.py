"""The plug-in that docs/transfer.md shows is complete."""

from __future__ import annotations

import ctypes
import queue
import re
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pdjax.transfer.backend import BackendOptions, Notice, TransferError, Write, WriteDone, WriteFailed

DOCS = Path(__file__).parents[2] / "docs" / "transfer.md"
PATIENCE = 30
NBYTES = 1 << 20


@pytest.fixture
def create() -> Any:
    found = re.search(r"```python\n(.*?)```", DOCS.read_text(), re.DOTALL)
    assert found is not None
    assert found[1].count("\n") <= 60
    names: dict[str, Any] = {}
    exec(found[1], names)
    return names["create"]


def test_it_moves_bytes_and_its_notice_comes_after_them(create: Any) -> None:
    came: queue.SimpleQueue[Any] = queue.SimpleQueue()
    ended: queue.SimpleQueue[Any] = queue.SimpleQueue()
    target, source = create(came.put, BackendOptions()), create(ended.put, BackendOptions())
    ring = target.allocate(1, NBYTES)
    sent = np.random.default_rng(0).integers(0, 256, NBYTES, np.uint8)
    source.register(2, sent.ctypes.data, NBYTES)
    source.connect("target", target.describe())
    assert source.path("target") == "process_vm_writev"

    def write(id: int, peer_region: int) -> Write:
        return Write(id, "target", 2, 0, peer_region, 0, NBYTES, b"landed", time.monotonic() + PATIENCE)

    source.write(write(1, 1))
    assert came.get(timeout=PATIENCE) == Notice(b"landed")
    assert ended.get(timeout=PATIENCE) == WriteDone(1)
    landed = np.ctypeslib.as_array((ctypes.c_uint8 * NBYTES).from_address(ring))
    assert (landed == sent).all()
    source.write(write(2, 9))
    failed = ended.get(timeout=PATIENCE)
    assert isinstance(failed, WriteFailed) and "no region 9" in failed.cause
    with pytest.raises(TransferError, match="damaged"):
        source.connect("other", b"what")
    for backend in (source, target):
        backend.close()

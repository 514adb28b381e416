"""SmolLM2 over pairs whose sides are cut differently, against the reference's tokens."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from halves import open_room
from processes import Part, get, instance
from test_answers import RECORDS, assert_as_reference, at_rest

pytestmark = pytest.mark.e2e

SHAPE: dict[str, Any] = {  # few compiled steps, and prompts in one chunk or two
    "Cache__pages": 65,
    "Engine__max_context": 128,
    "Engine__max_running_requests": len(RECORDS),
    "Engine__prefill_tokens": 32,
}
LAYOUTS: dict[str, dict[str, Any]] = {"tp1": {}, "tp3": {"tp": 3}, "cp2": {"cp": 2}}  # it has 3 key-value heads
PAIRS = [("tp3", "tp1"), ("tp1", "tp3"), ("cp2", "tp1")]


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory, smollm2: Path) -> Iterator[dict[tuple[str, str], Part]]:
    """By role and layout."""
    folder = tmp_path_factory.mktemp("smollm2")
    found: dict[tuple[str, str], Part] = {}
    try:
        for sides in PAIRS:
            for role, layout in zip(("prefill", "decode"), sides, strict=True):
                if (role, layout) not in found:
                    options = {f"Instance__{axis}": size for axis, size in LAYOUTS[layout].items()}
                    found[role, layout] = instance(folder, role, **SHAPE, **options, Disagg__bootstrap_port=0)
        for part in found.values():
            part.wait_ready()
        yield found
    finally:
        for part in found.values():
            part.kill()


@pytest.mark.parametrize("sides", PAIRS, ids=" to ".join)
def test_prompts_that_come_together_get_the_tokens_of_the_reference(
    parts: dict[tuple[str, str], Part], sides: tuple[str, str]
) -> None:
    prefill, decode = pair = parts["prefill", sides[0]], parts["decode", sides[1]]
    bootstrap = json.loads(get(f"{prefill.url}/server_info")[1])["disaggregation_bootstrap_port"]
    rooms = [open_room(prefill, decode, bootstrap, record["input_ids"], 64) for record in RECORDS]
    for room, record in zip(rooms, RECORDS, strict=True):
        for half in room.halves:
            half.join(60.0)
            assert half.status == 200 and not half.error, half
        assert room.decode is not None
        assert_as_reference(record, room.decode.output_ids)
    for part in pair:
        metrics = at_rest(part)
        assert metrics["pdjax_compiles_after_warmup_total"] == metrics["pdjax_failed_rooms_total"] == 0
        assert metrics["pdjax_free_pages"] == metrics["pdjax_pages"]

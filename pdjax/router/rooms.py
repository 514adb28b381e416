"""Gives a request its room: the fields that let a prefill and a decode instance meet over it."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from typing import Any

MAX_SAMPLES = 128  # of a prompt; instances refuse more
_CHAT = "/v1/chat/completions"
# An instance counts up from a room that stands for several samples, and must not come past 2^63 - 1.
ROOM_END = 2**63 - 2**20


def rooms_wanted(path: str, body: Mapping[str, Any]) -> int | None:
    """Number of rooms, if the body gets a list of them: one a prompt of a list, or one a sample of a chat.

    None if one room stands for all: a list of token ids is one prompt. Where a prompt has several samples, an instance
    counts up from its room. Bodies that make no sense get one room: the instances say what is wrong.
    """
    if path == _CHAT:
        samples = _samples(path, body)
        return samples if samples > 1 else None
    names = {"/generate": ("text", "input_ids"), "/v1/completions": ("prompt",)}.get(path, ())
    for name in names:
        value = body.get(name)
        if isinstance(value, list) and value and all(isinstance(each, str | list) for each in value):
            return len(value)
    return None


def with_rooms(
    path: str,
    body: Mapping[str, Any],
    *,
    host: str,
    port: int,
    random_source: random.Random,
    dp_sizes: Sequence[int] = (1, 1),
) -> dict[str, Any]:
    """The body with `bootstrap_host`, `bootstrap_port` and a new `bootstrap_room`.

    Where several rooms are wanted each is a list. What a client has put there is replaced. A client that names a dp
    rank gets rooms that belong to it on both sides, which have `dp_sizes` ranks; if there is none, instances say so.
    Samples of a prompt get rooms of the same rank, so that they share its pages.
    """
    period, rank = math.lcm(*dp_sizes), _dp_rank(body)
    step, first = (period, rank) if 0 <= rank < period else (1, 0)
    prompts, samples = None if path == _CHAT else rooms_wanted(path, body), _samples(path, body)
    rooms = [random_source.randrange(ROOM_END // step) * step + first for _ in range(prompts or 1)]
    if samples > 1 and (path == _CHAT or period > 1):
        rooms = [room + sample * period for room in rooms for sample in range(samples)]
    elif prompts is None:
        return {**body, "bootstrap_host": host, "bootstrap_port": port, "bootstrap_room": rooms[0]}
    count = len(rooms)
    return {**body, "bootstrap_host": [host] * count, "bootstrap_port": [port] * count, "bootstrap_room": rooms}


def _samples(path: str, body: Mapping[str, Any]) -> int:
    """Samples of each prompt; 1 for what makes no sense, and where prompts may differ in it."""
    params = body.get("sampling_params") if path == "/generate" else body
    samples = params.get("n") if isinstance(params, Mapping) else None
    return samples if type(samples) is int and 1 < samples <= MAX_SAMPLES else 1


def _dp_rank(body: Mapping[str, Any]) -> int:
    """The dp rank that a client names; -1 for none."""
    named = [body.get(name) for name in ("data_parallel_rank", "routed_dp_rank", "disagg_prefill_dp_rank")]
    return next((each for each in named if type(each) is int), -1)

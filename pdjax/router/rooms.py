"""Gives a request its room: the fields that let a prefill and a decode instance meet over it."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

ROOM_BITS = 63


def prompts(path: str, body: Mapping[str, Any]) -> int | None:
    """Number of prompts, if the body holds a list of prompts; None if it holds one prompt.

    A list of token ids is one prompt. Bodies that make no sense count as one: the instances say what is wrong.
    """
    names = {"/generate": ("text", "input_ids"), "/v1/completions": ("prompt",)}.get(path, ())
    for name in names:
        value = body.get(name)
        if isinstance(value, list) and value and all(isinstance(each, str | list) for each in value):
            return len(value)
    return None


def with_rooms(
    path: str, body: Mapping[str, Any], *, host: str, port: int, random_source: random.Random
) -> dict[str, Any]:
    """The body with `bootstrap_host`, `bootstrap_port` and a new `bootstrap_room`.

    For a list of prompts each is a list. What a client has put there is replaced.
    """
    count = prompts(path, body)
    rooms = [random_source.getrandbits(ROOM_BITS) for _ in range(count or 1)]
    if count is None:
        return {**body, "bootstrap_host": host, "bootstrap_port": port, "bootstrap_room": rooms[0]}
    return {**body, "bootstrap_host": [host] * count, "bootstrap_port": [port] * count, "bootstrap_room": rooms}

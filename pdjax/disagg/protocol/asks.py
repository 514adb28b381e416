"""What an instance is asked by its clients, and what it counts."""

from __future__ import annotations

import math

PREFILL_COUNTERS = (
    "sent_bytes",
    "sent_chunks",
    "failed_rooms",
    "bootstrap_failed_rooms",
    "transfer_failed_rooms",
    "refused_frames",
    "frames_refused_by_peers",
    "refused_links",
    "hung_peers",
    "failed_path_tests",
    "rebootstraps",
)

DECODE_COUNTERS = (
    "received_bytes",
    "received_chunks",
    "received_pages",
    "completed_rooms",
    "failed_rooms",
    "bootstrap_failed_rooms",
    "transfer_failed_rooms",
    "damaged_chunks",
    "refused_frames",
    "frames_refused_by_peers",
    "hung_peers",
    "path_tests",
    "failed_path_tests",
)


FIRST_OF_ALL = -math.inf  # `arrived` of a room whose client has had tokens already: it goes before those that have not


class PrefillAsk:
    """The client's half of a room. `arrived` is in seconds of the instance's clock, or `FIRST_OF_ALL`."""

    def __init__(
        self, rid: str, room: int, prompt_tokens: int, prompt_digest: bytes, priority: int = 0, arrived: float = 0.0
    ) -> None:
        self.rid = rid
        self.room = room
        self.prompt_tokens = prompt_tokens
        self.prompt_digest = prompt_digest
        self.priority = priority
        self.arrived = arrived


class DecodeAsk:
    """The client's half of a room. `host` and `port`: where its prefill leader takes links. `pages` hold the prompt.

    `follows` is another request with the same prompt: while that one's is on its way, this one waits to share it.
    `tokens`: the prompt, of a request that is computed again and has no half on the prefill side; see `Rebootstrap`.
    """

    def __init__(
        self,
        rid: str,
        room: int,
        host: str,
        port: int,
        prompt_tokens: int,
        prompt_digest: bytes,
        pages: int,
        priority: int = 0,
        arrived: float = 0.0,
        *,
        follows: str = "",
        tokens: bytes = b"",
    ) -> None:
        self.rid = rid
        self.room = room
        self.host = host
        self.port = port
        self.link = f"{host}:{port}"  # links are named by where their prefill leader listens
        self.prompt_tokens = prompt_tokens
        self.prompt_digest = prompt_digest
        self.pages = pages
        self.priority = priority
        self.arrived = arrived
        self.follows = follows
        self.tokens = tokens

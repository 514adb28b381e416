"""When what happened to a room on its decode side, and what the client is told of it."""

from __future__ import annotations

from dataclasses import dataclass

from pdjax.disagg.protocol.messages import Handoff


@dataclass
class RoomTimeline:
    """Marks in seconds of `time.monotonic`; transfers by the two hosts' clocks, which may differ by milliseconds."""

    arrived: float
    reserved: float = 0.0
    met: float = 0.0  # the prefill side first spoke about the room
    transfer_s: float = 0.0
    transfer_bytes: int = 0
    chunks: int = 0
    resends: int = 0  # of chunks that arrived damaged
    reused_tokens: int = 0  # of the prompt, those that were here already

    def landed(self, seconds: float, nbytes: int) -> None:
        """Add a chunk that was so long on its way."""
        self.transfer_s += seconds
        self.transfer_bytes += nbytes
        self.chunks += 1

    def summary(self, handoff: Handoff) -> dict[str, float]:
        """Named seconds and bytes, as they appear in ``meta_info.timeline``."""
        return {
            "queue_s": self.reserved - self.arrived,
            "handshake_s": max(0.0, self.met - self.reserved - handoff.queue_s),
            "prefill_queue_s": handoff.queue_s,
            "prefill_s": handoff.prefill_s,
            "transfer_s": self.transfer_s,
            "transfer_bytes": self.transfer_bytes,
            "transfer_chunks": self.chunks,
            "transfer_resends": self.resends,
            "reused_tokens": self.reused_tokens,
        }

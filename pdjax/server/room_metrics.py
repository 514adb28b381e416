"""Times and bytes of the rooms that have ended on a decode instance, as `meta_info.timeline` tells them too."""

from __future__ import annotations

from collections.abc import Mapping

from prometheus_client import CollectorRegistry, Counter, Histogram

_SECONDS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60, 300)
_BYTES = tuple(4.0**power for power in range(8, 18))  # 64 KiB to 16 GiB
_SPEED = (0.01, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100, 200)
_PHASES = {
    "queue_s": ("queue_seconds", "until a room had pages on this side"),
    "handshake_s": ("handshake_seconds", "until the two halves of a room had met"),
    "prefill_queue_s": ("prefill_queue_seconds", "until the prefill side had pages"),
    "prefill_s": ("prefill_seconds", "until the prefill side had computed the prompt"),
    "transfer_s": ("transfer_seconds", "that the chunks of a room were on their way, added up"),
}


class RoomMetrics:
    """Histograms, from the first room on: instances of other roles have none."""

    def __init__(self, registry: CollectorRegistry) -> None:
        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(f"pdjax_room_{name}", text, buckets=buckets, registry=registry)

        self._phases = {phase: histogram(name, text, _SECONDS) for phase, (name, text) in _PHASES.items()}
        self._moved = histogram("transfer_bytes", "moved for a room", _BYTES)
        self._speed = histogram("transfer_gb_per_second", "of the chunks of a room", _SPEED)
        self._resends = Counter("pdjax_room_resends", "chunks that arrived damaged", registry=registry)

    def finished(self, timeline: Mapping[str, float]) -> None:
        """A sample has ended whose prompt came through a room."""
        for phase, histogram in self._phases.items():
            histogram.observe(timeline[phase])
        seconds, nbytes = timeline["transfer_s"], timeline["transfer_bytes"]
        self._moved.observe(nbytes)
        self._resends.inc(timeline["transfer_resends"])
        if seconds > 0 and nbytes:
            self._speed.observe(nbytes / seconds / 1e9)

"""What kind of world is played, and what is fixed in all of them."""

from __future__ import annotations

from dataclasses import dataclass

from pdjax.cache.spec import StateSpec
from pdjax.disagg.protocol import messages
from pdjax.disagg.protocol.prefill_room import Timeouts
from pdjax.disagg.protocol.topology import ranks_of
from pdjax.transfer.layout import Layout

SPEC = StateSpec("kv", layers=2, heads=4, head_dim=1, page_size=1, dtype="float32")
ONE_RANK = Layout()
# Of instances with several ranks, each in a process of its own.
LAYOUTS = (
    *(Layout(tp=tp, dp=dp) for tp in (1, 2, 4) for dp in (1, 2)),
    Layout(pp=2),
    Layout(cp=2, tp=2),
)
TIMEOUTS = Timeouts(bootstrap=12, waiting=12, transfer=3, alloc=8, link=1, peer=2.5, heartbeat=0.5, workers_end=4)


@dataclass(frozen=True)
class Settings:
    """One world. Times are simulated seconds, sizes pages."""

    prefill: int = 4
    decode: int = 8
    rooms: int = 200  # requests, without those that show at the end that every pair works again
    faults: int = 12  # kills, stops, cuts...; requests are also aborted, duplicated and so on by themselves
    spares: bool = False  # faults hit nothing but the first prefill instance: there, no request may be lost
    calm_every: int = 10  # one seed in so many has no faults: there, everything must succeed
    ranks_every: int = 4  # in one seed in so many, instances have several ranks, each life another layout
    arrival: float = 0.03  # mean seconds between requests, divided by the number of prefill instances
    prefill_pages: int = 64
    decode_pages: int = 160
    slots: int = 3
    slot_pages: int = 4


def registration(
    role: str, instance: int, settings: Settings, allocation: str, layout: Layout = ONE_RANK
) -> messages.Registration:
    """What a simulated instance says of itself."""
    return messages.Registration(
        protocol_version=messages.PROTOCOL_VERSION,
        layout_version=messages.LAYOUT_VERSION,
        role=role,
        instance=instance,
        model="simulated",
        state=SPEC,
        backend="simulated",
        ranks=ranks_of(layout, [b"%d %d" % (instance, rank) for rank in range(layout.ranks)]),
        layout=layout,
        slots=settings.slots,
        slot_pages=settings.slot_pages,
        allocation=allocation,
    )

"""Which rank of an instance holds what of a state, and what must travel when two instances differ in it.

`plan(spec, source, destination)` is pure arithmetic on `StateSpec` and two `Layout`s: no jax, no I/O. Both sides of a
transfer work it out for themselves and get the same answer. `TransferPlan.transfers` says which bytes of which slot go
where for one chunk, `gathers` and `scatters` which pages a rank copies into and out of its slot.
"""

from pdjax.transfer.layout.plan import Block, Chunk, Piece, Transfer, TransferPlan, block_layers, plan
from pdjax.transfer.layout.ranks import Layout, LayoutError, Place, Span

__all__ = [
    "Block",
    "Chunk",
    "Layout",
    "LayoutError",
    "Piece",
    "Place",
    "Span",
    "Transfer",
    "TransferPlan",
    "block_layers",
    "plan",
]

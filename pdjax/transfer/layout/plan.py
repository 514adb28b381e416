"""The transfer plan: the pieces that turn one layout's part of a request into another's, and their bytes in slots.

A *block* is what one rank of each side has in common: the layers of both their stages, the pages of both their cp
parts. A slot is a row of blocks, each [head, page, layer, K|V, slot in page, head_dim] with the heads of the rank that
owns the slot. Heads are outermost, so that a piece, which is some heads of a block, is one range of bytes in both
slots. Where neither pp nor cp differ, there is one block and the slot is that of a single rank.
"""

from __future__ import annotations

import functools
import math
from collections import defaultdict
from dataclasses import dataclass, field

import msgspec

from pdjax.cache.spec import StateSpec
from pdjax.transfer.layout.ranks import Layout, LayoutError, Place, Span


class Chunk(msgspec.Struct, frozen=True, gc=False):
    """Pages [first_page, first_page + pages) of a request's own page order, of a prompt of `prompt_tokens`."""

    first_page: int
    pages: int
    prompt_tokens: int


@dataclass(frozen=True)
class Piece:
    """Layers and heads, numbered as in the whole state, that `source` sends `destination`, of every page whose number
    in the request is `page_class` modulo the plan's `page_stride`."""

    source: int
    destination: int
    layers: Span
    heads: Span
    page_class: int


@dataclass(frozen=True)
class Block:
    """A part of a rank's slot, filled by one gather or emptied by one scatter.

    `layers` counts from the first layer of the rank's pool; all of the pool's heads are meant. `pages` are the
    request's pages, in the order that they have in the slot; the rank knows page i as its (i // cp)-th of the request.
    """

    offset: int  # bytes from the start of the slot
    nbytes: int
    layers: Span
    pages: range


@dataclass(frozen=True)
class Transfer:
    """One piece of one chunk: `nbytes` at `source_offset` of the source's slot go to `destination_offset` of the
    destination's."""

    piece: Piece
    source_offset: int
    destination_offset: int
    nbytes: int


@dataclass(frozen=True)
class TransferPlan:
    """See `plan`. Pieces are ordered by destination, then by where they lie in the state."""

    spec: StateSpec
    pieces: tuple[Piece, ...]
    page_stride: int
    source_places: dict[int, Place]  # by rank, of the ranks that send
    destination_places: dict[int, Place]
    # By where in the stride a chunk begins, and its pages: all that transfers depend on.
    _transfers: dict[tuple[int, int], list[Transfer]] = field(default_factory=dict, compare=False, repr=False)

    def pages(self, chunk: Chunk, page_class: int) -> range:
        """Which pages of a chunk a piece of this class moves: those of its class that the window still reaches."""
        first = self._first_page(chunk)
        first += (page_class - first) % self.page_stride
        return range(first, max(first, chunk.first_page + chunk.pages), self.page_stride)

    def gathers(self, rank: int, chunk: Chunk) -> list[Block]:
        """What a source rank copies into its slot. None: it is not asked for any of it."""
        sent = [piece for piece in self.pieces if piece.source == rank]
        return self._blocks(self.source_places.get(rank), sent, chunk)

    def scatters(self, rank: int, chunk: Chunk) -> list[Block]:
        """What a destination rank copies out of its slot once `sources(rank, chunk)` have all written."""
        received = [piece for piece in self.pieces if piece.destination == rank]
        return self._blocks(self.destination_places.get(rank), received, chunk)

    def slot_bytes(self, rank: int, chunk: Chunk, *, source: bool) -> int:
        """Bytes that a chunk takes in the slot of a rank of the source, or of the destination."""
        blocks = self.gathers(rank, chunk) if source else self.scatters(rank, chunk)
        return sum(block.nbytes for block in blocks)

    def sources(self, rank: int, chunk: Chunk) -> frozenset[int]:
        """The source ranks that write into a destination rank's slot for this chunk."""
        return frozenset(t.piece.source for t in self.transfers(chunk) if t.piece.destination == rank)

    def transfers(self, chunk: Chunk) -> list[Transfer]:
        """What is written for a chunk: every piece that has a page in it. Two ranks have at most one piece in common,
        and so one write a chunk. The list is the same for many chunks: leave it as it is."""
        first = self._first_page(chunk)
        shape = first % self.page_stride, max(0, chunk.first_page + chunk.pages - first)
        known = self._transfers.get(shape)
        if known is None:
            known = self._transfers[shape] = self._transfers_of(chunk)
        return known

    def _first_page(self, chunk: Chunk) -> int:
        """The first page of a chunk that the window still reaches."""
        return max(chunk.first_page, self.spec.first_page(chunk.prompt_tokens))

    def _transfers_of(self, chunk: Chunk) -> list[Transfer]:
        here = {rank: _by_part(self.gathers(rank, chunk), place) for rank, place in self.source_places.items()}
        there = {rank: _by_part(self.scatters(rank, chunk), p) for rank, p in self.destination_places.items()}
        found = []
        for piece in self.pieces:
            pages = self.pages(chunk, piece.page_class)
            if not pages:
                continue
            part = (piece.layers, pages)
            head_bytes = len(pages) * piece.layers.count * self.spec.run_words * self.spec.word_bytes
            source, destination = self.source_places[piece.source], self.destination_places[piece.destination]
            found.append(
                Transfer(
                    piece=piece,
                    source_offset=here[piece.source][part] + (piece.heads.start - source.heads.start) * head_bytes,
                    destination_offset=there[piece.destination][part]
                    + (piece.heads.start - destination.heads.start) * head_bytes,
                    nbytes=piece.heads.count * head_bytes,
                )
            )
        return found

    def _blocks(self, place: Place | None, pieces: list[Piece], chunk: Chunk) -> list[Block]:
        """Blocks in the order of their layers, then of their first page: every piece of a part is in the same one."""
        if place is None:
            return []
        parts = {(piece.layers, self.pages(chunk, piece.page_class)) for piece in pieces}
        blocks, offset = [], 0
        for layers, pages in sorted(parts, key=lambda part: (part[0].start, part[1].start)):
            if not pages:
                continue
            runs = place.heads.count * len(pages) * layers.count
            nbytes = runs * self.spec.run_words * self.spec.word_bytes
            local = Span(layers.start - place.layers.start, layers.stop - place.layers.start)
            blocks.append(Block(offset, nbytes, local, pages))
            offset += nbytes
        return blocks


@functools.lru_cache(maxsize=1024)  # asked for with every chunk, and the same for all of a pair
def plan(
    spec: StateSpec,
    source: Layout,
    destination: Layout,
    *,
    source_dp_rank: int = 0,
    destination_dp_rank: int = 0,
    turn: int = 0,
) -> TransferPlan:
    """What must travel so that a request of one dp group of `source` can go on in one of `destination`.

    Every layer, head and page of every destination rank is in exactly one piece. Among ranks with copies of it the one
    that has least to send yet is the source; of equals, `turn` (the room's number, say) moves the choice on, so that
    over many requests all of them send the same.

    Raises:
        LayoutError: one of the layouts cannot hold the state, or there is no such dp group.
    """
    sources = _places(spec, source, source_dp_rank, "source")
    destinations = _places(spec, destination, destination_dp_rank, "destination")
    copies: dict[tuple[Span, Span, int], list[Place]] = defaultdict(list)
    for place in sources:
        copies[place.layers, place.heads, place.page_class].append(place)
    load: dict[int, int] = defaultdict(int)
    pieces = []
    stride = math.lcm(source.cp, destination.cp)
    for target in destinations:
        for (layers, heads, held_class), replicas in sorted(copies.items(), key=lambda item: _corner(item[0])):
            common, some = layers.overlap(target.layers), heads.overlap(target.heads)
            classes = _common_class(held_class, source.cp, target.page_class, destination.cp)
            if not common.count or not some.count or classes is None:
                continue
            order = [replicas[(turn + i) % len(replicas)] for i in range(len(replicas))]
            chosen = min(order, key=lambda place: load[place.rank])
            load[chosen.rank] += common.count * some.count
            pieces.append(Piece(chosen.rank, target.rank, common, some, classes))
    return TransferPlan(
        spec=spec,
        pieces=tuple(pieces),
        page_stride=stride,
        source_places={place.rank: place for place in sources if load[place.rank]},
        destination_places={place.rank: place for place in destinations},
    )


def block_layers(spec: StateSpec, place: Place) -> list[int]:
    """How many layers the blocks of a rank have, where the other side has 1, 2, 4 or 8 equal stages: what is compiled
    for a block is for its number of layers."""
    peers = [peer for pp in (1, 2, 4, 8) if spec.layers % pp == 0 for peer in Layout(pp=pp).places(spec, 0)]
    return sorted({peer.layers.overlap(place.layers).count for peer in peers} - {0})


def _places(spec: StateSpec, layout: Layout, dp_rank: int, side: str) -> list[Place]:
    try:
        return layout.places(spec, dp_rank)
    except LayoutError as error:
        raise LayoutError(f"the {side}'s layout cannot be served: {error}") from error


def _corner(part: tuple[Span, Span, int]) -> tuple[int, int, int]:
    layers, heads, page_class = part
    return layers.start, page_class, heads.start


def _common_class(first: int, first_stride: int, second: int, second_stride: int) -> int | None:
    """The x below lcm(strides) that is first modulo first_stride and second modulo second_stride, if there is one."""
    stride = math.lcm(first_stride, second_stride)
    return next((x for x in range(first, stride, first_stride) if x % second_stride == second), None)


def _by_part(blocks: list[Block], place: Place) -> dict[tuple[Span, range], int]:
    return {
        (Span(b.layers.start + place.layers.start, b.layers.stop + place.layers.start), b.pages): b.offset
        for b in blocks
    }

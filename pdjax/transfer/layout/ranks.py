"""Layout: the ranks of an instance, and the part of a state that each of them holds."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

import msgspec

from pdjax.cache.spec import StateSpec


class LayoutError(Exception):
    """A state that a layout cannot hold, or a plan that cannot be made; the sentence says why."""


@dataclass(frozen=True)
class Span:
    """The numbers [start, stop), of layers or of heads."""

    start: int
    stop: int

    @property
    def count(self) -> int:
        """How many numbers; 0 when the span is empty."""
        return max(0, self.stop - self.start)

    def overlap(self, other: Span) -> Span:
        """The numbers in both."""
        return Span(max(self.start, other.start), min(self.stop, other.stop))


@dataclass(frozen=True)
class Place:
    """What one rank holds of the requests of its `dp` group: some layers, some heads, and the pages whose number in
    the request is `page_class` modulo the layout's `cp`. Ranks with equal places hold copies."""

    rank: int
    layers: Span
    heads: Span
    page_class: int

    def slot_bytes(self, spec: StateSpec, pages: int) -> int:
        """Bytes of this rank's staging slot for up to `pages` of its own pages. Enough for every layout of the other
        side: a slot holds each page, layer and head of this rank's once at most."""
        return pages * self.layers.count * self.heads.count * spec.run_words * spec.word_bytes


class Layout(msgspec.Struct, frozen=True, cache_hash=True):
    """How an instance's ranks share a state; the numbers are sizes of mesh axes.

    Ranks count with `pp` outermost, then `dp`, `cp` and, innermost, `tp`. A page is what one rank has of a page of the
    pool: with `cp` the pool's are that many times as large.
    """

    tp: int = 1  # cuts the heads; beyond the number of heads, each is held by several ranks. Within a dp group
    dp: int = 1  # groups of ranks with requests and pages of their own (attention's data parallelism)
    cp: int = 1  # cuts a request's pages: page i of the request is on part i % cp, so that long and short share evenly
    pp: int = 1  # cuts the layers
    stage_layers: tuple[int, ...] = ()  # the state's layers of each pp stage; empty: as even as can be, long ones first

    @property
    def ranks(self) -> int:
        """How many ranks there are."""
        return self.pp * self.dp * self.cp * self.tp

    def check(self, spec: StateSpec) -> None:
        """Raise `LayoutError` unless the state can be held this way."""
        for axis in ("tp", "dp", "cp", "pp"):
            if getattr(self, axis) < 1:
                raise LayoutError(f"{axis} is {getattr(self, axis)}; expected 1 or more")
        if self.tp % spec.heads and spec.heads % self.tp:
            raise LayoutError(
                f"tp {self.tp} and {spec.heads} key-value heads of state {spec.name!r} do not divide each other: use a "
                f"tp that divides {spec.heads}, or a multiple of it"
            )
        stages = self._stages(spec)
        if len(stages) != self.pp:
            raise LayoutError(f"stage_layers names {len(stages)} stages; pp is {self.pp}")
        if min(stages) < 0 or sum(stages) != spec.layers:
            raise LayoutError(
                f"stage_layers is {list(stages)}; expected numbers whose sum is the {spec.layers} layers of state "
                f"{spec.name!r}"
            )

    def state(self, pool: StateSpec) -> StateSpec:
        """The state of a pool of this layout in pages as its ranks, and so plans, count them."""
        return msgspec.structs.replace(pool, page_size=pool.page_size // self.cp)

    def slot_pages(self, pages: int) -> int:
        """Of any `pages` pages of a request in a row, the most that one rank holds."""
        return -(-pages // self.cp)

    def places(self, spec: StateSpec, dp_rank: int) -> list[Place]:
        """The ranks of one dp group and what they hold, by rank.

        Raises:
            LayoutError: the state cannot be held this way, or there is no such group.
        """
        self.check(spec)
        if not 0 <= dp_rank < self.dp:
            raise LayoutError(f"there is no dp rank {dp_rank}; dp is {self.dp}")
        ends = list(accumulate(self._stages(spec)))
        found = []
        for stage, part, t in ((s, c, t) for s in range(self.pp) for c in range(self.cp) for t in range(self.tp)):
            rank = ((stage * self.dp + dp_rank) * self.cp + part) * self.tp + t
            layers = Span(ends[stage] - self._stages(spec)[stage], ends[stage])
            found.append(Place(rank, layers, self._heads(spec, t), part))
        return found

    def place(self, spec: StateSpec, rank: int) -> Place:
        """What one rank holds. Raises `LayoutError`."""
        dp_rank = rank // (self.cp * self.tp) % self.dp
        return next(place for place in self.places(spec, dp_rank) if place.rank == rank)

    def _stages(self, spec: StateSpec) -> tuple[int, ...]:
        if self.stage_layers:
            return self.stage_layers
        whole, more = divmod(spec.layers, self.pp)
        return tuple(whole + (stage < more) for stage in range(self.pp))

    def _heads(self, spec: StateSpec, t: int) -> Span:
        if self.tp > spec.heads:
            head = t * spec.heads // self.tp  # neighbours hold the same head; of a latent state, all hold the one
            return Span(head, head + 1)
        each = spec.heads // self.tp
        return Span(t * each, (t + 1) * each)

"""Whatever two layouts are, the plan between them moves every element once, evenly, and to where it belongs."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from pdjax.cache.spec import StateSpec
from pdjax.transfer.layout import Chunk, Layout, LayoutError, Place, Span, block_layers, plan
from tests.transfer.layout_oracle import move, pools_of, random_state


def spec_of(**fields) -> StateSpec:
    return StateSpec(
        **{"name": "kv", "layers": 4, "heads": 8, "head_dim": 2, "page_size": 2, "dtype": "bfloat16"} | fields
    )


def head_sizes(heads: int) -> list[int]:
    """The tp that fit a number of heads: its divisors, and twice and three times as many as there are."""
    return [tp for tp in range(1, heads + 1) if heads % tp == 0] + [2 * heads, 3 * heads]


@st.composite
def layouts(draw: st.DrawFn, spec: StateSpec, most_ranks: int = 48) -> Layout:
    tp = draw(st.sampled_from([tp for tp in head_sizes(spec.heads) if tp <= most_ranks]))
    cp, pp = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    stages = ()
    if draw(st.booleans()):
        cuts = sorted(draw(st.lists(st.integers(0, spec.layers), min_size=pp - 1, max_size=pp - 1)))
        stages = tuple(stop - start for start, stop in pairwise([0, *cuts, spec.layers]))
    return Layout(tp=tp, dp=draw(st.integers(1, 3)), cp=cp, pp=pp, stage_layers=stages)


@st.composite
def specs(draw: st.DrawFn, most_heads: int = 64) -> StateSpec:
    latent = draw(st.booleans())
    return spec_of(
        layers=draw(st.integers(1, 7)),
        heads=1 if latent else draw(st.integers(1, most_heads)),
        latent=latent,
        window=draw(st.sampled_from([0, 0, 1, 3, 8])),
        dtype=draw(st.sampled_from(["bfloat16", "float32"])),
    )


def held(place: Place) -> set[tuple[int, int]]:
    return {(layer, h) for layer in range(*_ends(place.layers)) for h in range(*_ends(place.heads))}


def _ends(span: Span) -> tuple[int, int]:
    return span.start, span.stop


@settings(max_examples=80, deadline=None)
@given(data=st.data())
def test_every_destination_element_is_in_exactly_one_piece_of_a_rank_that_has_it(data: st.DataObject) -> None:
    spec = data.draw(specs())
    source, destination = data.draw(layouts(spec)), data.draw(layouts(spec))
    dp_rank = data.draw(st.integers(0, destination.dp - 1))
    whole = plan(spec, source, destination, destination_dp_rank=dp_rank, turn=data.draw(st.integers(0, 9)))
    sources = {place.rank: place for place in source.places(spec, 0)}
    got: Counter[tuple[int, int, int, int]] = Counter()
    for piece in whole.pieces:
        elements = {(layer, h) for layer in range(*_ends(piece.layers)) for h in range(*_ends(piece.heads))}
        assert elements <= held(sources[piece.source])
        assert piece.page_class % source.cp == sources[piece.source].page_class
        got.update((piece.destination, piece.page_class, *element) for element in elements)
    wanted = {
        (place.rank, page_class, *element)
        for place in destination.places(spec, dp_rank)
        for element in held(place)
        for page_class in range(place.page_class, whole.page_stride, destination.cp)
    }
    assert got.keys() == wanted and set(got.values()) <= {1}
    pairs = Counter((piece.source, piece.destination) for piece in whole.pieces)
    assert set(pairs.values()) <= {1}, "two ranks have one piece in common, and so one write a chunk"


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_ranks_with_copies_send_the_same_to_within_a_piece(data: st.DataObject) -> None:
    spec = data.draw(specs(most_heads=6))
    source, destination = data.draw(layouts(spec)), data.draw(layouts(spec))
    whole = plan(spec, source, destination, turn=data.draw(st.integers(0, 9)))
    load = Counter({place.rank: 0 for place in source.places(spec, 0)})
    largest: Counter[tuple] = Counter()
    groups: dict[tuple, list[int]] = {}
    for place in source.places(spec, 0):
        groups.setdefault((place.layers, place.heads, place.page_class), []).append(place.rank)
    for piece in whole.pieces:
        load[piece.source] += piece.layers.count * piece.heads.count
    for part, ranks in groups.items():
        sizes = [p.layers.count * p.heads.count for p in whole.pieces if p.source in ranks]
        largest[part] = max(sizes, default=0)
        assert max(load[rank] for rank in ranks) - min(load[rank] for rank in ranks) <= largest[part]


def test_over_many_requests_all_copies_are_asked_alike() -> None:
    latent = spec_of(heads=1, latent=True)
    asked = Counter(plan(latent, Layout(tp=4), Layout(), turn=room).pieces[0].source for room in range(100))
    assert asked == {0: 25, 1: 25, 2: 25, 3: 25}


@settings(max_examples=80, deadline=None)
@given(data=st.data())
def test_carrying_the_plan_out_gives_each_rank_what_a_direct_copy_would(data: st.DataObject) -> None:
    spec = data.draw(specs(most_heads=6))
    source, destination = data.draw(layouts(spec, 12)), data.draw(layouts(spec, 12))
    dp_ranks = data.draw(st.integers(0, source.dp - 1)), data.draw(st.integers(0, destination.dp - 1))
    tokens = data.draw(st.integers(1, 26))
    pages = spec.pages(tokens)
    cuts = sorted({0, pages, *data.draw(st.lists(st.integers(0, pages), max_size=3))})
    chunks = [Chunk(first, stop - first, tokens) for first, stop in pairwise(cuts)]
    state = random_state(spec, pages, seed=data.draw(st.integers(0, 99)))
    before = pools_of(spec, source, dp_ranks[0], state)
    after = pools_of(spec, destination, dp_ranks[1], np.zeros_like(state))
    whole = plan(spec, source, destination, source_dp_rank=dp_ranks[0], destination_dp_rank=dp_ranks[1])
    for chunk in chunks:
        move(whole, chunk, before, after)
    state[:, : spec.first_page(tokens)] = 0  # what the window has left behind does not travel
    for rank, expected in pools_of(spec, destination, dp_ranks[1], state).items():
        np.testing.assert_array_equal(after[rank].pool, expected.pool)


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_the_ranges_of_a_slot_do_not_overlap_and_leave_no_gap(data: st.DataObject) -> None:
    spec = data.draw(specs(most_heads=8))
    source, destination = data.draw(layouts(spec)), data.draw(layouts(spec))
    whole = plan(spec, source, destination)
    chunk = Chunk(data.draw(st.integers(0, 5)), data.draw(st.integers(0, 9)), 40)
    transfers = whole.transfers(chunk)
    for rank in whole.destination_places:
        received = sorted(
            (t.destination_offset, t.destination_offset + t.nbytes) for t in transfers if t.piece.destination == rank
        )
        ends = [0, *(stop for _, stop in received)]
        assert [start for start, _ in received] == ends[:-1] and ends[-1] == whole.slot_bytes(rank, chunk, source=False)
        assert whole.sources(rank, chunk) == {t.piece.source for t in transfers if t.piece.destination == rank}
    for rank in whole.source_places:
        size = whole.slot_bytes(rank, chunk, source=True)
        assert all(0 <= t.source_offset <= size - t.nbytes for t in transfers if t.piece.source == rank)


@pytest.mark.parametrize(
    ("source", "destination", "writes"),
    [
        (Layout(tp=4), Layout(), [(0, 0, 2), (1, 0, 2), (2, 0, 2), (3, 0, 2)]),
        (Layout(), Layout(tp=4), [(0, 0, 2), (0, 1, 2), (0, 2, 2), (0, 3, 2)]),
        (Layout(tp=2), Layout(tp=2), [(0, 0, 4), (1, 1, 4)]),
        (Layout(tp=16), Layout(tp=2), [(0, 0, 1), (2, 0, 1), (4, 0, 1), (6, 0, 1), (8, 1, 1), (10, 1, 1)]),
        (Layout(tp=2), Layout(tp=16), [(0, 0, 1), (0, 1, 1), (0, 2, 1)]),
    ],
)
def test_each_pair_of_ranks_with_heads_in_common_has_one_write(
    source: Layout, destination: Layout, writes: list[tuple[int, int, int]]
) -> None:
    whole = plan(spec_of(), source, destination)
    assert [(p.source, p.destination, p.heads.count) for p in whole.pieces][: len(writes)] == writes


def test_dp_attention_gets_all_heads_on_the_requests_own_rank_and_asks_no_other() -> None:
    whole = plan(spec_of(), Layout(tp=4), Layout(dp=4), destination_dp_rank=2)
    assert [(piece.source, piece.destination) for piece in whole.pieces] == [(0, 2), (1, 2), (2, 2), (3, 2)]


def test_equal_layouts_move_one_whole_slot_a_rank() -> None:
    spec, chunk = spec_of(), Chunk(3, 5, 16)
    whole = plan(spec, Layout(), Layout())
    (transfer,) = whole.transfers(chunk)
    assert (transfer.source_offset, transfer.destination_offset) == (0, 0)
    assert transfer.nbytes == 5 * spec.page_bytes == whole.slot_bytes(0, chunk, source=True)
    (block,) = whole.gathers(0, chunk)
    assert block.pages == range(3, 8) and block.layers == Span(0, spec.layers)


@given(st.sampled_from([1, 2, 4, 8]), st.sampled_from([1, 2, 4, 8]), st.sampled_from([8, 16, 24]))
def test_what_is_compiled_for_a_rank_serves_all_its_blocks(source: int, destination: int, layers: int) -> None:
    spec, chunk = spec_of(layers=layers), Chunk(0, 3, 6)
    whole = plan(spec, Layout(pp=source), Layout(pp=destination))
    for places, blocks_of in ((whole.source_places, whole.gathers), (whole.destination_places, whole.scatters)):
        for rank, place in places.items():
            compiled = block_layers(spec, place)
            assert {block.layers.count for block in blocks_of(rank, chunk)} <= set(compiled)
            assert max(compiled) == place.layers.count


def test_one_copy_of_a_latent_is_sent_and_the_other_ranks_are_not_asked() -> None:
    whole = plan(spec_of(heads=1, latent=True), Layout(tp=8), Layout())
    assert [piece.source for piece in whole.pieces] == [0]
    assert whole.gathers(3, Chunk(0, 4, 8)) == []


def test_pages_before_the_window_stay_where_they_are() -> None:
    whole = plan(spec_of(window=5), Layout(), Layout())
    assert whole.transfers(Chunk(0, 6, 20)) == [], "tokens 0 to 11; the next one, 20, sees 16 to 20"
    (block,) = whole.gathers(0, Chunk(6, 4, 20))
    assert block.pages == range(8, 10)


@pytest.mark.parametrize(
    ("source", "options", "says"),
    [
        (Layout(tp=3), {}, "the source's layout cannot be served: tp 3 and 8 key-value heads of state 'kv' do not"),
        (Layout(tp=12), {}, "use a tp that divides 8, or a multiple of it"),
        (Layout(cp=0), {}, "cp is 0; expected 1 or more"),
        (Layout(pp=2, stage_layers=(1, 2)), {}, "stage_layers is [1, 2]; expected numbers whose sum is the 4 layers"),
        (Layout(pp=2, stage_layers=(4,)), {}, "stage_layers names 1 stages; pp is 2"),
        (Layout(dp=2), {"source_dp_rank": 2}, "there is no dp rank 2; dp is 2"),
        (Layout(), {"destination_dp_rank": -1}, "the destination's layout cannot be served: there is no dp rank -1"),
    ],
)
def test_a_layout_that_cannot_be_served_is_refused_with_the_reason(source: Layout, options: dict, says: str) -> None:
    with pytest.raises(LayoutError) as refused:
        plan(spec_of(), source, Layout(), **options)
    assert says in str(refused.value)


@pytest.mark.parametrize(
    ("fields", "says"), [({"window": -1}, "a window of -1"), ({"latent": True}, "a latent state has 1 head, not 8")]
)
def test_a_state_that_makes_no_sense_is_refused(fields: dict, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        spec_of(**fields)

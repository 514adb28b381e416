"""A request is in one dp rank, whose pages and rows bound it; which, is decided by load."""

from __future__ import annotations

import pytest

from pdjax.cache.ranks import RankedPages

TEXT = list(range(40))


def ranked(ranks: int = 2, *, pages: int = 11, rows: int = 2) -> RankedPages:
    return RankedPages(ranks, pages=pages, rows=rows, page_size=4, enabled=True)


def begin(ranked: RankedPages, owner: str, pages: int = 3, ranks: list[int] | None = None) -> int | None:
    grant = ranked.begin(owner, TEXT, pages=pages, cached=9, ranks=ranks)
    return None if grant is None else grant.rank


def test_requests_go_where_the_fewest_are_until_every_row_is_taken() -> None:
    pages = ranked()
    assert [begin(pages, str(number)) for number in range(4)] == [0, 1, 0, 1]
    assert not pages.has_free_row and begin(pages, "late") is None
    pages.end("1", [], [])
    assert begin(pages, "late") == 1


def test_a_rank_that_is_named_is_waited_for() -> None:
    pages = ranked()
    assert begin(pages, "a", 8, ranks=[1]) == 1
    assert begin(pages, "b", 8, ranks=[1]) is None
    assert begin(pages, "b", 8) == 0


def test_where_the_least_loaded_rank_has_too_few_pages_another_one_serves() -> None:
    pages = ranked(rows=3)
    assert [begin(pages, "long", 9), begin(pages, "a", 1), begin(pages, "b", 1, ranks=[1])] == [0, 1, 1]
    assert begin(pages, "c", 5) == 1


def test_among_equals_the_rank_that_knows_the_text_is_taken() -> None:
    pages = ranked()
    grant = pages.begin("first", TEXT, pages=4, cached=0, ranks=[1])
    assert grant is not None
    pages.end("first", TEXT[:16], grant.pages)
    again = pages.begin("second", TEXT, pages=5, cached=9)
    assert again is not None and (again.rank, again.cached) == (1, 4)


def test_ranks_are_tried_in_the_order_that_suits_the_request() -> None:
    """Rank 1 has a request, and knows the text."""
    pages = ranked()
    grant = pages.begin("first", TEXT, pages=4, cached=0, ranks=[1])
    assert grant is not None
    pages.publish("first", TEXT[:16], grant.pages)
    assert (pages.by_load(TEXT), pages.by_text(TEXT)) == ([0, 1], [1, 0])
    assert (pages.by_load([7] * 8), pages.by_text([7] * 8)) == ([0, 1], [0, 1])
    assert begin(pages, "second", 5, [1, 0]) == 1 and begin(pages, "third", 5, pages.by_text(TEXT)) == 0


def test_pages_are_a_ranks_own_and_counted_together() -> None:
    pages = ranked()
    grants = [pages.begin(str(rank), [], pages=10, cached=0, ranks=[rank]) for rank in range(2)]
    assert all(grant is not None and sorted(grant.pages) == list(range(1, 11)) for grant in grants)
    assert pages.available == 0 and pages.capacity == 20 and pages.grow("0", 1) is None
    pages.end("0", [], [])
    pages.check_integrity()
    assert pages.available == 10 and pages.grow("1", 1) is None
    with pytest.raises(KeyError):
        pages.grow("0", 1)

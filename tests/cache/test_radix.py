"""The prefix cache against a model that anyone can check: a set of known texts, one page at a time."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from pdjax.cache.allocator import PageAllocator
from pdjax.cache.prefix import PrefixCache

SIZE = 2  # tokens a page
texts = st.lists(st.integers(0, 1), min_size=1, max_size=13)


def whole_pages(text: list[int]) -> list[tuple[int, ...]]:
    """Every prefix of whole pages, short to long."""
    return [tuple(text[:end]) for end in range(SIZE, len(text) + 1, SIZE)]


class PrefixMachine(RuleBasedStateMachine):
    """Requests come, compute, publish, grow and end in any order. The model knows each page's text by its number."""

    @initialize(pages=st.integers(8, 24))
    def start(self, pages: int) -> None:
        self.allocator = PageAllocator(pages)
        self.cache = PrefixCache(self.allocator, page_size=SIZE, enabled=True)
        self.live: dict[str, tuple[list[int], list[int], int]] = {}  # text, pages, tokens computed
        self.holds: dict[int, tuple[int, ...]] = {}  # what was last written to a page
        self.number = 0

    @rule(text=texts, spare=st.integers(0, 4))
    def begin(self, text: list[int], spare: int) -> None:
        self.number += 1
        owner, needed = f"request {self.number}", -(-len(text) // SIZE)
        available = self.cache.available
        grant = self.cache.begin(owner, text, pages=needed, cached=(len(text) - 1) // SIZE, spare=spare)
        if grant is None:
            assert needed + spare > available - len(self.known(text, needed))
            return
        assert len(grant.pages) == len(set(grant.pages)) == needed
        assert self.cache.available >= spare
        assert grant.cached <= (len(text) - 1) // SIZE
        for page, prefix in zip(grant.pages[: grant.cached], whole_pages(text), strict=False):
            assert self.holds[page] == prefix, "a cached page holds another text"
        self.live[owner] = (text, grant.pages, grant.cached * SIZE)

    def known(self, text: list[int], pages: int) -> list[tuple[int, ...]]:
        cached = {self.holds[page] for page in self.allocator.cached_pages}
        return [prefix for prefix in whole_pages(text)[:pages] if prefix in cached]

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def compute(self, data: st.DataObject) -> None:
        owner = data.draw(st.sampled_from(sorted(self.live)))
        text, pages, computed = self.live[owner]
        end = data.draw(st.integers(computed, len(text)))
        for index in range(computed // SIZE, -(-end // SIZE)):
            assert pages[index] not in self.allocator.cached_pages, "a shared page is written"
            self.holds[pages[index]] = tuple(text[: min(end, (index + 1) * SIZE)])
        self.live[owner] = (text, pages, end)
        if data.draw(st.booleans()):
            self.cache.publish(owner, text[:end], pages)

    @precondition(lambda self: self.live)
    @rule(data=st.data(), more=st.lists(st.integers(0, 1), min_size=1, max_size=4))
    def grow(self, data: st.DataObject, more: list[int]) -> None:
        owner = data.draw(st.sampled_from(sorted(self.live)))
        text, pages, computed = self.live[owner]
        missing = -(-len(text + more) // SIZE) - len(pages)
        available = self.cache.available
        grown = self.cache.grow(owner, missing)
        assert (grown is None) == (missing > available)
        if grown is not None:
            assert not set(grown) & {page for _, pages, _ in self.live.values() for page in pages}
            self.live[owner] = (text + more, pages + grown, computed)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        owner = data.draw(st.sampled_from(sorted(self.live)))
        text, pages, computed = self.live.pop(owner)
        self.cache.end(owner, text[:computed], pages)
        # Of the whole text nothing can be evicted before it was known once.
        path = self.known(text, len(text))
        assert path[: computed // SIZE] == whole_pages(text[:computed])

    @rule()
    def flush(self) -> None:
        before = self.allocator.free_pages
        freed = self.cache.flush()
        assert self.allocator.free_pages == before + freed
        assert self.cache.pages == self.cache.locked_pages

    @invariant()
    def books_add_up(self) -> None:
        if not hasattr(self, "cache"):
            return
        self.cache.check_integrity()
        used = {page for _, pages, _ in self.live.values() for page in pages}
        assert self.cache.available == self.allocator.capacity - len(used), "a page is neither used nor available"


TestPrefixCache = PrefixMachine.TestCase
TestPrefixCache.settings = settings(max_examples=120, stateful_step_count=40, deadline=None)


@given(st.lists(texts, min_size=1, max_size=12))
def test_with_room_for_all_the_longest_known_prefix_is_found(given_texts: list[list[int]]) -> None:
    cache = PrefixCache(PageAllocator(200), page_size=SIZE, enabled=True)
    known: set[tuple[int, ...]] = set()
    for number, text in enumerate(given_texts):
        grant = cache.begin(str(number), text, pages=-(-len(text) // SIZE), cached=(len(text) - 1) // SIZE)
        assert grant is not None
        assert grant.cached == sum(prefix in known for prefix in whole_pages(text)[: (len(text) - 1) // SIZE])
        cache.end(str(number), text, grant.pages)
        known.update(whole_pages(text))
        assert cache.pages == len(known)
    assert cache.flush() == len(known) and cache.available == 199


def give(cache: PrefixCache, owner: str, text: list[int]) -> None:
    grant = cache.begin(owner, text, pages=len(text) // SIZE, cached=len(text) // SIZE)
    assert grant is not None
    cache.end(owner, text, grant.pages)


def cached_pages(cache: PrefixCache, text: list[int]) -> int:
    grant = cache.begin("probe", text, pages=len(text) // SIZE, cached=len(text) // SIZE)
    assert grant is not None
    cache.end("probe", text[: grant.cached * SIZE], grant.pages)
    return grant.cached


def test_the_least_recently_used_leaf_goes_first() -> None:
    cache = PrefixCache(PageAllocator(7), page_size=SIZE, enabled=True)
    give(cache, "a", [1, 1, 2, 2])
    give(cache, "b", [1, 1, 3, 3])
    give(cache, "c", [4, 4])
    give(cache, "a again", [1, 1, 2, 2])
    grant = cache.begin("d", [9] * 6, pages=3, cached=0)  # two are free, one must go: the end of b
    assert grant is not None
    cache.end("d", [], grant.pages)
    assert [cached_pages(cache, text) for text in ([1, 1, 2, 2], [1, 1, 3, 3], [4, 4])] == [2, 1, 1]


def test_pages_in_use_are_not_evicted() -> None:
    cache = PrefixCache(PageAllocator(5), page_size=SIZE, enabled=True)
    give(cache, "a", [1, 1, 2, 2])
    holder = cache.begin("b", [1, 1, 2, 2, 5], pages=3, cached=2)
    assert holder is not None and holder.cached == 2
    assert cache.begin("c", [7] * 4, pages=2, cached=0) is None
    assert cache.grow("b", 2) is None and cache.flush() == 0 and cache.locked_pages == 2
    cache.end("b", [1, 1, 2, 2], holder.pages)
    assert cache.begin("c", [7] * 4, pages=4, cached=0) is not None and cache.pages == 0


def test_two_that_computed_the_same_hold_no_more_than_they_were_given() -> None:
    cache = PrefixCache(PageAllocator(5), page_size=SIZE, enabled=True)
    first, second = (cache.begin(owner, [1, 1, 2, 2], pages=2, cached=0) for owner in "ab")
    assert first is not None and second is not None
    cache.publish("a", [1, 1, 2, 2], first.pages)
    cache.publish("b", [1, 1, 2, 2], second.pages)
    cache.end("a", [1, 1, 2, 2], first.pages)
    assert cache.available == 2  # all but what b holds
    cache.end("b", [1, 1, 2, 2], second.pages)
    assert cache.pages == 2 and cache.available == 4
    cache.check_integrity()


def test_a_disabled_cache_keeps_nothing() -> None:
    allocator = PageAllocator(5)
    cache = PrefixCache(allocator, page_size=SIZE, enabled=False)
    give(cache, "a", [1, 1, 2, 2])
    assert cache.pages == 0 and allocator.free_pages == 4
    assert cached_pages(cache, [1, 1, 2, 2]) == 0


def test_a_page_cannot_be_cached_by_one_who_does_not_own_it() -> None:
    allocator = PageAllocator(4)
    mine, other = allocator.allocate("a", 1), allocator.allocate("b", 1)
    assert mine is not None and other is not None
    with pytest.raises(KeyError):
        allocator.move_to_cache("a", other[0])

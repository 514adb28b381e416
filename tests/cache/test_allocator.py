"""Every page has one owner or none, whatever happens."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdjax.cache.allocator import PageAllocator


@given(st.lists(st.tuples(st.integers(0, 6), st.integers(0, 12)), max_size=60))
def test_no_page_is_lost_or_given_out_twice(steps: list[tuple[int, int]]) -> None:
    allocator = PageAllocator(pages=24)
    held: dict[str, list[int]] = {}
    for owner, count in ((f"request {number}", count) for number, count in steps):
        if owner in held:
            allocator.release(owner)
            del held[owner]
        else:
            pages = allocator.allocate(owner, count)
            assert (pages is None) == (count > 23 - sum(map(len, held.values())))
            if pages is not None:
                assert len(pages) == count and 0 not in pages
                assert not set(pages) & {page for others in held.values() for page in others}
                held[owner] = pages
        allocator.check_integrity()
        assert allocator.free_pages == 23 - sum(map(len, held.values()))


def test_an_owner_cannot_be_given_pages_twice() -> None:
    allocator = PageAllocator(pages=4)
    allocator.allocate("a", 1)
    with pytest.raises(ValueError, match="holds pages already"):
        allocator.allocate("a", 1)

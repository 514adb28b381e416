from __future__ import annotations

from collections.abc import Iterator

import pytest
from upstream import RouterProcess, Upstream, answer_ok


@pytest.fixture(scope="module")
def _prefill() -> Iterator[Upstream]:
    upstream = Upstream("prefill")
    yield upstream
    upstream.close()


@pytest.fixture(scope="module")
def _decode() -> Iterator[Upstream]:
    upstream = Upstream("decode")
    yield upstream
    upstream.close()


@pytest.fixture(scope="module")
def _router(_prefill: Upstream, _decode: Upstream) -> Iterator[RouterProcess]:
    router = RouterProcess([_prefill.url], [_decode.url], idle_timeout=2.0)
    yield router
    router.close()


def _reset(upstream: Upstream) -> Upstream:
    upstream.handle = answer_ok
    upstream.flush_status, upstream.load = 200, 40
    upstream.bodies.clear()
    upstream.left.clear()
    return upstream


@pytest.fixture
def prefill(_prefill: Upstream) -> Upstream:
    return _reset(_prefill)


@pytest.fixture
def decode(_decode: Upstream) -> Upstream:
    return _reset(_decode)


@pytest.fixture
def router(_router: RouterProcess) -> RouterProcess:
    _router.wait_until_ready()
    return _router

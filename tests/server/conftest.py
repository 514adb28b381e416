from __future__ import annotations

from collections.abc import Iterator

import pytest
from scripted_leader import FrontendProcess


def _process(tmp_path_factory: pytest.TempPathFactory, role: str, **info) -> Iterator[FrontendProcess]:
    process = FrontendProcess(tmp_path_factory.mktemp(role), role, **info)
    yield process
    process.close()


@pytest.fixture(scope="session")
def _unified(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FrontendProcess]:
    yield from _process(tmp_path_factory, "unified")


@pytest.fixture(scope="session")
def _prefill(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FrontendProcess]:
    info = {"disaggregation_bootstrap_host": "127.0.0.1", "disaggregation_bootstrap_port": 8998}
    yield from _process(tmp_path_factory, "prefill", **info)


@pytest.fixture(scope="session")
def _decode(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FrontendProcess]:
    yield from _process(tmp_path_factory, "decode")


def _reset(process: FrontendProcess) -> FrontendProcess:
    process.leader.received.clear()
    process.leader.on_generate = lambda request: process.leader.reply(request, "hello world")
    return process


@pytest.fixture
def unified(_unified: FrontendProcess) -> FrontendProcess:
    return _reset(_unified)


@pytest.fixture
def prefill(_prefill: FrontendProcess) -> FrontendProcess:
    return _reset(_prefill)


@pytest.fixture
def decode(_decode: FrontendProcess) -> FrontendProcess:
    return _reset(_decode)

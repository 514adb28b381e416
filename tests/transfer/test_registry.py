from __future__ import annotations

from importlib.metadata import EntryPoint
from types import SimpleNamespace

import pytest

from pdjax.transfer import registry
from pdjax.transfer.backend import TransferError
from pdjax.transfer.fake import FakeBackend


def test_an_unknown_backend_is_refused_with_the_list(monkeypatch: pytest.MonkeyPatch) -> None:
    theirs = [EntryPoint("pigeons", "nowhere:nothing", registry.GROUP)]
    monkeypatch.setattr(registry, "entry_points", lambda group: theirs)
    with pytest.raises(TransferError, match="no transfer backend 'smoke'; there are fake, pigeons, ucx"):
        registry.create("smoke", print)


def test_a_third_partys_backend_is_started_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def factory(on_event: object, *, allow_mapped: bool) -> str:
        asked.append((on_event, allow_mapped))
        return "theirs"

    point = SimpleNamespace(name="pigeons", load=lambda: factory)
    monkeypatch.setattr(registry, "entry_points", lambda group: [point])
    assert registry.create("pigeons", print, allow_mapped=False) == "theirs"
    assert asked == [(print, False)]


def test_the_fake_backend_goes_by_its_name() -> None:
    backend = registry.create("fake", print)
    assert isinstance(backend, FakeBackend)
    backend.close()

from __future__ import annotations

import sys
from importlib.metadata import EntryPoint
from types import SimpleNamespace

import pytest

from pdjax.transfer import registry
from pdjax.transfer.backend import BackendOptions, TransferError


def test_an_unknown_backend_is_refused_with_the_list(monkeypatch: pytest.MonkeyPatch) -> None:
    theirs = [EntryPoint("pigeons", "nowhere:nothing", registry.GROUP)]
    monkeypatch.setattr(registry, "entry_points", lambda group: theirs)
    with pytest.raises(
        TransferError, match="no transfer backend 'smoke'; there are fake, jax, mooncake, nixl, pigeons, ucx"
    ):
        registry.create("smoke", print)


def test_a_third_partys_backend_is_started_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def factory(on_event: object, options: BackendOptions) -> str:
        asked.append((on_event, options))
        return "theirs"

    point = SimpleNamespace(name="pigeons", load=lambda: factory)
    monkeypatch.setattr(registry, "entry_points", lambda group: [point])
    assert registry.create("pigeons", print, BackendOptions(mapped=False)) == "theirs"
    assert asked == [(print, BackendOptions(mapped=False))]


def test_the_fake_backend_goes_by_its_name() -> None:
    backend = registry.create("fake", print)
    assert backend.name == "fake" and "nothing is moved" in backend.summary
    backend.close()


@pytest.mark.parametrize(("name", "package"), [("nixl", "nixl-cu12"), ("mooncake", "mooncake-transfer-engine")])
def test_a_backend_whose_library_is_not_installed_says_how_to_install_it(
    monkeypatch: pytest.MonkeyPatch, name: str, package: str
) -> None:
    for module in ("nixl_cu12", "nixl_cu13", "nixl", "mooncake", "mooncake.engine"):
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(TransferError, match=f"pip install .*{package}"):
        registry.create(name, print)

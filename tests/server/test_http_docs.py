"""The documentation names every route and every field that there is."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from pdjax.server.app import AbortRequest, DetokenizeRequest, TokenizeRequest, operations
from pdjax.server.chat_request import ChatRequest
from pdjax.server.completions import CompletionRequest
from pdjax.server.native import GenerateRequest
from pdjax.server.sampling import SamplingFields

TEXT = (Path(__file__).parents[2] / "docs" / "http.md").read_text()
NAMES = set(re.findall(r"\w+", " ".join(re.findall(r"`[^`\n]+`", TEXT))))


@pytest.mark.parametrize(
    "body",
    [GenerateRequest, SamplingFields, CompletionRequest, ChatRequest, AbortRequest, TokenizeRequest, DetokenizeRequest],
)
def test_every_field_is_written_down(body):
    assert set(body.__struct_fields__) <= NAMES, set(body.__struct_fields__) - NAMES


def test_every_route_is_written_down():
    for operation in operations():
        for path in operation.paths:
            assert path.replace(":path}", "}") in TEXT, path

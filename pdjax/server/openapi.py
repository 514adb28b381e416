"""The OpenAPI document, made from the types that the routes read and answer with."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from pdjax.server.answers import ErrorAnswer

_ERRORS = "400 and 404: the client's fault; 429: too many wait; 502, 503, 504: the engine's, or its peer's"


@dataclass(frozen=True)
class Operation:
    """What one route does.

    Attributes:
        paths: the path and its other names, as Starlette has them: `{name:path}` is a variable part.
        summary: a line.
        answer: type of a JSON answer; None for text.
        body: struct of the request's body; None if it takes none.
        streams: whether it can answer by server-sent events.
        neutral: values of fields that are known but take no other, by field of `body`; None is always one.
    """

    method: str
    paths: tuple[str, ...]
    summary: str
    answer: Any = None
    body: type[msgspec.Struct] | None = None
    streams: bool = False
    neutral: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)


def document(operations: Sequence[Operation], *, also: Sequence[type], version: str) -> dict[str, Any]:
    """The document for these operations; `also` are types that bodies refer to by name."""
    types = [each for operation in operations for each in (operation.answer, operation.body) if each is not None]
    known = list(dict.fromkeys([*types, *also, ErrorAnswer]))
    schemas, components = msgspec.json.schema_components(known, ref_template="#/components/schemas/{name}")
    schema_of = dict(zip(known, schemas, strict=True))
    paths: dict[str, Any] = {}
    for operation in operations:
        for name, values in operation.neutral.items():
            assert operation.body is not None, "neutral values are a body's"
            components[operation.body.__name__]["properties"][name] = {"enum": [*values, None], "default": None}
        for path in operation.paths:
            described = _describe(operation, schema_of)
            names = re.findall(r"{(\w+)", path)
            if names:
                text = {"type": "string"}
                described["parameters"] = [
                    {"name": name, "in": "path", "required": True, "schema": text} for name in names
                ]  # fmt: skip
            paths.setdefault(path.replace(":path}", "}"), {})[operation.method.lower()] = described
    return {
        "openapi": "3.1.0",
        "info": {"title": "pdjax", "version": version},
        "paths": paths,
        "components": {"schemas": components},
    }


def _describe(operation: Operation, schema_of: dict[Any, Any]) -> dict[str, Any]:
    kinds: dict[str, Any] = {}
    if operation.answer is None:
        kinds["text/plain"] = {"schema": {"type": "string"}}
    else:
        kinds["application/json"] = {"schema": schema_of[operation.answer]}
    if operation.streams:
        kinds["text/event-stream"] = {"schema": {"description": "server-sent events with JSON; the last is [DONE]"}}
    error = {"description": _ERRORS, "content": {"application/json": {"schema": schema_of[ErrorAnswer]}}}
    described: dict[str, Any] = {
        "summary": operation.summary,
        "responses": {"200": {"description": "success", "content": kinds}, "400": error, "default": error},
    }
    if operation.body is not None:
        body = {"application/json": {"schema": schema_of[operation.body]}}
        described["requestBody"] = {"required": True, "content": body}
    return described

"""What a request says about the form of its answer, as a grammar for the engine."""

from __future__ import annotations

from typing import Any

import msgspec

from pdjax import wire
from pdjax.web import HttpError

JSON_OBJECT = wire.Grammar("json_object")


class JsonSchemaFormat(msgspec.Struct):
    """`response_format.json_schema`."""

    schema: dict[str, Any] | bool | None = None
    name: str | None = None
    description: str | None = None
    strict: bool | None = None


class ResponseFormat(msgspec.Struct, forbid_unknown_fields=True):
    """`response_format`: text, json_object, or json_schema with the schema."""

    type: str
    json_schema: JsonSchemaFormat | None = None


def grammar(*, json_schema: str | dict[str, Any] | bool | None, regex: str | None, ebnf: str | None) -> (
    wire.Grammar | None
):  # fmt: skip
    """The one grammar that is given, or None.

    Raises:
        HttpError: 400, more than one is given, or a schema is not one. Whether it compiles only the engine knows.
    """
    given = [name for name, value in (("json_schema", json_schema), ("regex", regex), ("ebnf", ebnf)) if value not in (
        None, "")]  # fmt: skip
    if len(given) > 1:
        raise HttpError(400, f"{' and '.join(given)}: an answer can follow only one of them")
    match given:
        case ["json_schema"]:
            return wire.Grammar("json_schema", _schema_text(json_schema))
        case ["regex"]:
            return wire.Grammar("regex", regex or "")
        case ["ebnf"]:
            return wire.Grammar("ebnf", ebnf or "")
        case _:
            return None


def response_grammar(wanted: ResponseFormat | None) -> wire.Grammar | None:
    """The grammar of a `response_format`, or None.

    Raises:
        HttpError: 400.
    """
    if wanted is None or wanted.type == "text":
        return None
    if wanted.type == "json_object":
        return JSON_OBJECT
    if wanted.type != "json_schema":
        raise HttpError(400, f"response_format.type: expected text, json_object or json_schema, not {wanted.type!r}")
    if wanted.json_schema is None or wanted.json_schema.schema is None:
        raise HttpError(400, "response_format.json_schema.schema: missing; give the JSON schema")
    return wire.Grammar("json_schema", _schema_text(wanted.json_schema.schema))


def _schema_text(schema: Any) -> str:
    value = schema
    if isinstance(schema, str):
        try:
            value = msgspec.json.decode(schema)
        except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
            raise HttpError(400, f"json_schema: the text is not JSON: {error}") from error
    if not isinstance(value, dict | bool):
        raise HttpError(400, f"json_schema: a schema is a JSON object, not {type(value).__name__}")
    if value is False:
        raise HttpError(400, "json_schema: false allows no answer at all")
    if value is True:
        value = {}  # which says the same, and compiles
    return msgspec.json.encode(value).decode()

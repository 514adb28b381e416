"""Reads request bodies into typed structs, and says in words what is wrong with one that does not fit."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

import msgspec

from pdjax.web import HttpError, decode_object

S = TypeVar("S", bound=msgspec.Struct)


def read(body: bytes, kind: type[S]) -> S:
    """A body as a struct.

    Raises:
        HttpError: 400.
    """
    return convert(decode_object(body), kind)


def convert(value: Any, kind: type[S], *, inside: str = "") -> S:
    """A decoded JSON value as a struct; `inside` is the name of the field that holds it.

    Raises:
        HttpError: 400.
    """
    fields = kind.__struct_fields__
    if isinstance(value, dict) and kind.__struct_config__.forbid_unknown_fields:
        for name in value:
            if name not in fields:
                raise HttpError(400, unknown_field(name, fields, inside=inside))
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        raise HttpError(400, _in_words(str(error), inside)) from error


def unknown_field(name: str, known: Iterable[str], *, inside: str = "") -> str:
    """A sentence about a field that is not known, with the nearest right name."""
    known = list(known)
    near = difflib.get_close_matches(name, known, n=1)
    hint = f"; did you mean {near[0]!r}?" if near else f"; known are {', '.join(sorted(known))}"
    place = f" in {inside}" if inside else ""
    return f"unknown field {name!r}{place}{hint}"


def refuse_unsupported(fields: msgspec.Struct, neutral: Mapping[str, tuple[Any, ...]], *, inside: str = "") -> None:
    """Raise `HttpError` 400 if a field that is known but not supported holds anything but what changes nothing.

    Args:
        neutral: by field, the values that change nothing; None is always one.
    """
    for name, values in neutral.items():
        value = getattr(fields, name)
        if value is not None and value not in values:
            allowed = ", ".join(msgspec.json.encode(each).decode() for each in (*values, None))
            place = f"{inside}.{name}" if inside else name
            raise HttpError(400, f"{place}: this option is not supported yet; leave it out or set it to {allowed}")


def _in_words(text: str, inside: str) -> str:
    sentence, _, path = text.partition(" - at `$")
    path = path.rstrip("`").lstrip(".")
    path = ".".join(part for part in (inside, path) if part)
    sentence = re.sub(r"`([^`]*)`", lambda match: match[1].replace(" | ", " or "), sentence)
    sentence = sentence[0].lower() + sentence[1:]
    return f"{path}: {sentence}" if path else sentence

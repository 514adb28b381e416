"""Finds calls of tools in an answer's text.

Two forms are known, whatever the model: ``<tool_call>{"name": ..., "arguments": {...}}</tool_call>`` (Hermes, Qwen,
SmolLM), and an answer that is nothing but such JSON, one object, a list, or several in a row, with `parameters` for
`arguments` if the model prefers (Llama 3, and every forced call).
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_JSON_STARTS = ("{", "[", "<|python_tag|>")
_BETWEEN = " \t\r\n;,"


@dataclass(frozen=True)
class ToolCall:
    """One call. `arguments` is the text of a JSON object."""

    name: str
    arguments: str

    def as_openai(self) -> dict[str, Any]:
        """With a new id, as OpenAI shows it."""
        function = {"name": self.name, "arguments": self.arguments}
        return {"id": f"call_{uuid.uuid4().hex[:24]}", "type": "function", "function": function}


class ToolCallFinder:
    """Takes an answer's text in pieces; lets out what is content, and holds back what may be a call.

    Args:
        names: of the tools that may be called; what calls others is content.
        forced: the answer can be nothing but calls.
    """

    def __init__(self, names: Collection[str], *, forced: bool) -> None:
        self._names = names
        self._held = ""
        self._begun = False  # some content is out
        self._holding = forced  # all that comes

    def add(self, text: str) -> str:
        """Take text; returns content."""
        self._held += text
        if self._holding:
            return ""
        if not self._begun:
            start = self._held.lstrip()
            if not start or any(start.startswith(each) or each.startswith(start) for each in _JSON_STARTS):
                self._holding = start.startswith(_JSON_STARTS)
                return ""
        if _OPEN in self._held:
            self._holding = True
            return self._let_out(self._held.index(_OPEN))
        keep = next((n for n in range(len(_OPEN) - 1, 0, -1) if self._held.endswith(_OPEN[:n])), 0)
        return self._let_out(len(self._held) - keep)

    def finish(self) -> tuple[str, list[ToolCall]]:
        """The rest of the content, and the calls: all that was held back is one or the other."""
        held, self._held = self._held, ""
        try:
            calls = _tagged(held) if _OPEN in held else _bare(held)
        except ValueError:
            return held, []
        if not calls or any(call.name not in self._names for call in calls):
            return held, []
        return "", calls

    def _let_out(self, end: int) -> str:
        """White space before the first content waits: it is none, if a call follows."""
        text = self._held[:end]
        if not self._begun and not text.strip():
            return ""
        self._begun = True
        self._held = self._held[end:]
        return text


def parse(text: str, names: Collection[str], *, forced: bool) -> tuple[str, list[ToolCall]]:
    """Content and calls of a whole answer."""
    finder = ToolCallFinder(names, forced=forced)
    content = finder.add(text)
    rest, calls = finder.finish()
    return content + rest, calls


def _tagged(text: str) -> list[ToolCall]:
    calls: list[ToolCall] = []
    for part in text.split(_OPEN)[1:]:
        calls += _sequence(part.split(_CLOSE)[0])
    return calls


def _bare(text: str) -> list[ToolCall]:
    return _sequence(text.strip().removeprefix("<|python_tag|>"))


def _sequence(text: str) -> list[ToolCall]:
    """Calls of JSON values in a row. Raises `ValueError` for anything else."""
    decoder, calls, text = json.JSONDecoder(), [], text.strip(_BETWEEN)
    try:
        while text:
            value, end = decoder.raw_decode(text)
            calls += [_call(each) for each in (value if isinstance(value, list) else [value])]
            text = text[end:].lstrip(_BETWEEN)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error
    return calls


def _call(value: Any) -> ToolCall:
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        raise ValueError("a call has a name")
    arguments = value.get("arguments", value.get("parameters", {}))
    if isinstance(arguments, str):
        arguments = json.loads(arguments)
    if not isinstance(arguments, dict):
        raise ValueError("arguments are an object")
    return ToolCall(value["name"], json.dumps(arguments, ensure_ascii=False))

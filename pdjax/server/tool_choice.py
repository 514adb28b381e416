"""What a chat says about tools: which there are, whether one must be called, and how the model is told."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from pdjax import wire
from pdjax.web import HttpError

_PREAMBLE = (
    "# Tools\n\nYou may call one or more functions to assist with the user query.\n\n"
    "You are provided with function signatures within <tools></tools> XML tags:\n<tools>\n{tools}\n</tools>\n\n"
    "For each function call, return a json object with function name and arguments within "
    "<tool_call></tool_call> XML tags:\n<tool_call>\n"
    '{{"name": <function-name>, "arguments": <args-json-object>}}\n</tool_call>'
)


class Function(msgspec.Struct, omit_defaults=True):
    """What a tool is."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(msgspec.Struct):
    """A tool that the model may call."""

    type: str
    function: Function


class FunctionName(msgspec.Struct):
    """The name of a tool's function."""

    name: str


class NamedTool(msgspec.Struct):
    """`tool_choice` for one tool."""

    type: str
    function: FunctionName


@dataclass(frozen=True)
class ToolUse:
    """Tools of one chat.

    Attributes:
        tools: as templates read them; empty if none may be called.
        names: of their functions.
        grammar: of an answer that must be a call; None if the model may choose.
    """

    tools: tuple[dict[str, Any], ...] = ()
    names: frozenset[str] = frozenset()
    grammar: wire.Grammar | None = None


def tool_use(tools: Sequence[Tool] | None, choice: str | NamedTool | None, *, parallel: bool) -> ToolUse:
    """From a request's fields; `parallel` allows several calls in one answer.

    Raises:
        HttpError: 400, they make no sense.
    """
    functions = {tool.function.name: tool.function for tool in tools or ()}
    _check(tools or (), functions)
    if isinstance(choice, str) and choice not in ("none", "auto", "required"):
        raise HttpError(400, f"tool_choice: expected none, auto, required or a named function, not {choice!r}")
    if choice == "none" or (not functions and choice in (None, "auto")):
        return ToolUse()
    if not functions:
        raise HttpError(400, "tool_choice: asks for a call, but tools is empty")
    wanted, most = list(functions.values()), None if parallel else 1
    if isinstance(choice, NamedTool):
        if choice.function.name not in functions:
            known = ", ".join(sorted(functions))
            raise HttpError(400, f"tool_choice: there is no tool {choice.function.name!r}; tools has {known}")
        wanted, most = [functions[choice.function.name]], 1
    grammar = None
    if choice not in (None, "auto"):
        grammar = wire.Grammar("json_schema", json.dumps(_calls_schema(wanted, most), ensure_ascii=False))
    described = tuple({"type": "function", "function": msgspec.to_builtins(each)} for each in functions.values())
    return ToolUse(described, frozenset(functions), grammar)


def for_plain_template(messages: Sequence[Mapping[str, Any]], use: ToolUse) -> list[dict[str, Any]]:
    """Messages for a template that knows no tools: they are described in the system's message, calls and results are
    text, in the words that Hermes and Qwen models are trained on."""
    plain = [_plain(message) for message in messages]
    if not use.tools:
        return plain
    told = _PREAMBLE.format(tools="\n".join(json.dumps(tool, ensure_ascii=False) for tool in use.tools))
    if plain and plain[0]["role"] == "system":
        return [plain[0] | {"content": f"{plain[0]['content']}\n\n{told}"}, *plain[1:]]
    return [{"role": "system", "content": told}, *plain]


def _plain(message: Mapping[str, Any]) -> dict[str, Any]:
    content, calls = message["content"], message.get("tool_calls")
    if message["role"] == "tool":
        return {"role": "user", "content": f"<tool_response>\n{content}\n</tool_response>"}
    if not calls:
        return dict(message)
    texts = [json.dumps(call["function"], ensure_ascii=False) for call in calls]
    said = "\n".join(f"<tool_call>\n{text}\n</tool_call>" for text in texts)
    return {"role": message["role"], "content": f"{content}\n{said}" if content else said}


def _check(tools: Sequence[Tool], functions: Mapping[str, Function]) -> None:
    for i, tool in enumerate(tools):
        if tool.type != "function":
            raise HttpError(400, f"tools[{i}].type: only 'function' is supported, not {tool.type!r}")
        if not tool.function.name:
            raise HttpError(400, f"tools[{i}].function.name: empty")
    if len(functions) != len(tools):
        raise HttpError(400, "tools: two functions have the same name")


def _calls_schema(functions: Sequence[Function], most: int | None) -> dict[str, Any]:
    """A list of calls. References inside parameters point to the schema's root, so their definitions move there."""
    definitions: dict[str, dict[str, Any]] = {}
    calls = [_call_schema(function, definitions) for function in functions]
    schema: dict[str, Any] = {
        "type": "array",
        "minItems": 1,
        "items": calls[0] if len(calls) == 1 else {"anyOf": calls},
    }
    return schema | ({} if most is None else {"maxItems": most}) | definitions


def _call_schema(function: Function, definitions: dict[str, dict[str, Any]]) -> dict[str, Any]:
    parameters = dict(function.parameters or {})
    for place in ("$defs", "definitions"):
        found = parameters.pop(place, None)
        if not isinstance(found, dict):
            continue
        shared = definitions.setdefault(place, {})
        for name, value in found.items():
            if shared.setdefault(name, value) != value:
                raise HttpError(400, f"tools: two functions define {place}/{name} differently; name them apart")
    return {
        "type": "object",
        "properties": {"name": {"const": function.name}, "arguments": parameters or {"type": "object"}},
        "required": ["name", "arguments"],
        "additionalProperties": False,
    }

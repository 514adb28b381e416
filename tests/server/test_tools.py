"""Tools: the model is told of them, its calls are found in its text, and a call can be forced."""

from __future__ import annotations

import json
from collections.abc import Iterator

import msgspec
import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scripted_leader import FrontendProcess, byte_tokenizer

from pdjax import wire
from pdjax.server import answers
from pdjax.server.chat_template import ChatTemplate
from pdjax.server.tool_choice import Function, Tool, for_plain_template, tool_use
from pdjax.server.tools import ToolCall, ToolCallFinder, parse
from pdjax.web import HttpError

WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
TIME = {"type": "function", "function": {"name": "time", "description": "what time it is"}}
HELLO = [{"role": "user", "content": "hi"}]
NAMES = {"weather", "time"}
NOW = ToolCall("time", "{}")
UNKNOWN = '<tool_call>{"name": "rm", "arguments": {}}</tool_call>'
PARIS = ToolCall("weather", '{"city": "Paris"}')


@pytest.fixture(scope="module")
def _process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FrontendProcess]:
    """With room for the description of tools, a token a byte."""
    process = FrontendProcess(tmp_path_factory.mktemp("tools"), max_context=4000)
    yield process
    process.close()


@pytest.fixture
def unified(_process: FrontendProcess) -> FrontendProcess:
    _process.leader.received.clear()
    says(_process, "hello world")
    return _process


@pytest.fixture
def client(unified: FrontendProcess) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{unified.url}/v1", api_key="none", max_retries=0, timeout=30) as client:
        yield client


def says(process: FrontendProcess, text: str, finish: str = "stop") -> None:
    process.leader.on_generate = lambda request: process.leader.reply(request, text, finish=finish)


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        ('<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>', "", [PARIS]),
        ('I look.\n<tool_call>{"name": "weather", "arguments": {"city": "Paris"}}', "I look.\n", [PARIS]),
        ('<tool_call>{"name": "weather", "arguments": "{\\"city\\": \\"Paris\\"}"}</tool_call>', "", [PARIS]),
        ('<tool_call>{"name":"time"}</tool_call>\n<tool_call>{"name":"time"}</tool_call>', "", [NOW, NOW]),
        ('<tool_call>[{"name":"time"},{"name":"time"}]</tool_call>', "", [NOW, NOW]),
        ('{"name": "weather", "parameters": {"city": "Paris"}}', "", [PARIS]),
        ('\n<|python_tag|>{"name": "weather", "parameters": {"city": "Paris"}}; {"name": "time", "parameters": {}}', "",
         [PARIS, NOW]),
        ('[{"name": "weather", "arguments": {"city": "Paris"}}]', "", [PARIS]),
        (UNKNOWN, UNKNOWN, []),
        ("<tool_call>{broken</tool_call>", "<tool_call>{broken</tool_call>", []),
        ('{"answer": 4}', '{"answer": 4}', []),
        ("[1, 2]", "[1, 2]", []),
        ("a <tool and more", "a <tool and more", []),
        ("  plain", "  plain", []),
        ("", "", []),
    ],
)  # fmt: skip
def test_calls_are_told_from_content(text, content, calls):
    assert parse(text, NAMES, forced=False) == (content, calls)


@given(st.text(alphabet='<tool_cal>/{}[] "name:time', max_size=60) | st.sampled_from([
    'x <tool_call>{"name": "time"}</tool_call>', '{"name": "time"}', "<|python_tag|>[]", " <tool_call"]),
    st.integers(1, 7))  # fmt: skip
def test_however_a_text_is_cut_it_means_the_same_and_no_call_is_shown_as_content(text, size):
    finder, shown = ToolCallFinder(NAMES, forced=False), ""
    for start in range(0, len(text), size):
        shown += finder.add(text[start : start + size])
    rest, calls = finder.finish()
    assert (shown + rest, calls) == parse(text, NAMES, forced=False)
    if not calls:
        assert shown + rest == text


def test_content_is_shown_as_it_comes():
    finder = ToolCallFinder(NAMES, forced=False)
    assert [finder.add(text) for text in ("The ", "answer <", "b>", "<tool_call>x")] == ["The ", "answer ", "<b>", ""]


@pytest.mark.parametrize("text", ["hello", '{"name": "time"}'])
def test_a_forced_answer_is_held_until_it_is_whole(text):
    finder = ToolCallFinder(NAMES, forced=True)
    assert finder.add(text) == ""
    assert finder.finish() == (("hello", []) if text == "hello" else ("", [ToolCall("time", "{}")]))


def test_openais_client_gets_calls_and_content(client, unified):
    says(unified, 'I look. <tool_call>\n{"name": "weather", "arguments": {"city": "Zürich"}}\n</tool_call>')
    choice = client.chat.completions.create(model="tiny", messages=HELLO, tools=[WEATHER, TIME]).choices[0]
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content == "I look. "
    (call,) = choice.message.tool_calls
    assert (call.type, call.function.name, json.loads(call.function.arguments)) == (
        "function", "weather", {"city": "Zürich"})  # fmt: skip
    assert call.id.startswith("call_")


def test_openais_client_gets_calls_from_a_stream(client, unified):
    says(unified, 'I look. <tool_call>{"name": "weather", "arguments": {"city": "Paris"}}</tool_call>')
    chunks = list(client.chat.completions.create(model="tiny", messages=HELLO, tools=[WEATHER], stream=True))
    deltas = [chunk.choices[0].delta for chunk in chunks]
    assert "".join(delta.content or "" for delta in deltas) == "I look. "
    ((call,),) = [delta.tool_calls for delta in deltas if delta.tool_calls]
    assert (call.index, call.function.name, json.loads(call.function.arguments)) == (0, "weather", {"city": "Paris"})
    assert [chunk.choices[0].finish_reason for chunk in chunks][-1] == "tool_calls"


def test_an_answer_without_calls_stays_what_it_is(client, unified):
    says(unified, "hello world")
    choice = client.chat.completions.create(model="tiny", messages=HELLO, tools=[WEATHER]).choices[0]
    assert (choice.message.content, choice.finish_reason, choice.message.tool_calls) == ("hello world", "stop", None)
    says(unified, '{"name": "weather"}')
    choice = client.chat.completions.create(model="tiny", messages=HELLO, tools=[WEATHER], tool_choice="none").choices[
        0
    ]
    assert (choice.message.content, choice.finish_reason) == ('{"name": "weather"}', "stop")


@pytest.mark.parametrize(
    ("choice", "names", "most"),
    [
        ("required", ["weather", "time"], None),
        ({"type": "function", "function": {"name": "time"}}, ["time"], 1),
    ],
)
def test_a_call_can_be_forced(client, unified, choice, names, most):
    says(unified, '[{"name": "time", "arguments": {}}]')
    answer = client.chat.completions.create(model="tiny", messages=HELLO, tools=[WEATHER, TIME], tool_choice=choice)
    assert answer.choices[0].message.tool_calls[0].function.name == "time"
    assert answer.choices[0].finish_reason == "tool_calls"
    grammar = unified.leader.wait_for(wire.Generate).sampling.grammar
    schema = json.loads(grammar.text)
    assert (grammar.kind, schema["type"], schema["minItems"], schema.get("maxItems")) == (
        "json_schema",
        "array",
        1,
        most,
    )
    items = schema["items"].get("anyOf", [schema["items"]])
    assert [each["properties"]["name"]["const"] for each in items] == names


def test_an_answer_with_a_call_is_as_described(unified):
    says(unified, '{"name": "time", "parameters": {}}')
    status, answer = unified.post("/v1/chat/completions", {"messages": HELLO, "tools": [TIME]})
    assert status == 200
    decoded = msgspec.json.decode(json.dumps(answer), type=answers.ChatAnswer)
    assert decoded.choices[0].message.content is None


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"tools": [WEATHER], "tool_choice": "always"}, "expected none, auto, required or a named function"),
        ({"tool_choice": "required"}, "tools is empty"),
        ({"tools": [WEATHER], "tool_choice": {"type": "function", "function": {"name": "w"}}}, "tools has weather"),
        ({"tools": [WEATHER, WEATHER]}, "the same name"),
        ({"tools": [{"type": "retrieval", "function": {"name": "x"}}]}, "only 'function' is supported"),
        ({"tools": [{"type": "function", "function": {"name": ""}}]}, "tools[0].function.name: empty"),
        ({"tools": [WEATHER], "tool_choice": "required", "response_format": {"type": "json_object"}},
         "response_format"),
        ({"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "x", "arguments": "{"}}]}]},
         "messages[0].tool_calls: arguments are not JSON"),
    ],
)  # fmt: skip
def test_what_makes_no_sense_is_refused_in_words(unified, fields, words):
    status, answer = unified.post("/v1/chat/completions", {"messages": HELLO} | fields)
    assert (status, words in answer["error"]["message"]) == (400, True), answer


def test_definitions_of_parameters_move_to_the_root_where_references_look_for_them():
    def tool(name: str, city: dict) -> Tool:
        parameters = {"type": "object", "properties": {"c": {"$ref": "#/$defs/City"}}, "$defs": {"City": city}}
        return Tool("function", Function(name, parameters=parameters))

    use = tool_use([tool("a", {"type": "string"}), tool("b", {"type": "string"})], "required", parallel=False)
    assert use.grammar is not None
    schema = json.loads(use.grammar.text)
    assert (schema["$defs"], schema["maxItems"]) == ({"City": {"type": "string"}}, 1)
    with pytest.raises(HttpError, match="name them apart"):
        tool_use([tool("a", {"type": "string"}), tool("b", {"type": "integer"})], "required", parallel=True)


CONVERSATION = [
    {"role": "user", "content": "weather?"},
    {"role": "assistant", "content": None, "tool_calls": [
        {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Rom"}'}}]},
    {"role": "tool", "tool_call_id": "call_1", "content": "sunny"},
]  # fmt: skip


def test_a_template_that_knows_no_tools_gets_them_as_text(unified):
    status, _ = unified.post("/v1/chat/completions", {"messages": CONVERSATION, "tools": [WEATHER]})
    assert status == 200
    ids = unified.leader.wait_for(wire.Generate).input_ids
    text = byte_tokenizer().decode(ids, skip_special_tokens=False)
    assert text.startswith("<|im_start|>system\n# Tools")
    assert json.dumps(WEATHER) in text
    assert '<tool_call>\n{"name": "weather", "arguments": {"city": "Rom"}}\n</tool_call>' in text
    assert "<|im_start|>user\n<tool_response>\nsunny\n</tool_response>" in text


def test_the_systems_own_words_stay_before_the_tools():
    use = tool_use([Tool("function", Function("time"))], None, parallel=True)
    told = for_plain_template([{"role": "system", "content": "Be kind."}], use)
    assert told[0]["content"].startswith("Be kind.\n\n# Tools")
    assert for_plain_template(HELLO, tool_use(None, None, parallel=True)) == HELLO


def test_a_template_that_knows_tools_gets_them_and_calls_as_objects():
    source = (
        "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}{{ m.role }}:{{ m.content }}"
        "{% if m.tool_calls %}{% for c in m.tool_calls %}{{ c.function.arguments.city }}{% endfor %}{% endif %};"
        "{% endfor %}"
    )
    template = ChatTemplate(source, {})
    assert template.reads_tools
    call = {"function": {"name": "weather", "arguments": {"city": "Rom"}}}
    said = template.render([{"role": "assistant", "content": "", "tool_calls": [call]}], tools=[TIME])
    assert said == f"{json.dumps([TIME])}assistant:Rom;"
    assert not ChatTemplate("{{ messages }}", {}).reads_tools

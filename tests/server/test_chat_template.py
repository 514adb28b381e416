"""A model's chat template renders what its authors meant, and can do no harm."""

from __future__ import annotations

import json

import pytest

from pdjax.server.chat_template import ChatTemplate
from pdjax.server.vocabulary import VocabularyError
from pdjax.web import HttpError

MESSAGES = [{"role": "user", "content": "hi"}]


def test_special_tokens_options_and_loop_controls_work():
    source = (
        "{{ bos_token }}{% for m in messages %}{% if m.role == 'skip' %}{% continue %}{% endif %}"
        "{{ m | tojson }}{% endfor %}{% if add_generation_prompt %}>{% endif %}{{ extra }}"
    )
    template = ChatTemplate(source, {"bos_token": "<s>"})
    said = template.render([{"role": "skip"}, {"role": "user", "content": "é"}], {"extra": "!"})
    assert said == '<s>{"role": "user", "content": "é"}>!'


def test_a_refusal_of_the_template_is_told():
    template = ChatTemplate("{{ raise_exception('roles must alternate') }}", {})
    with pytest.raises(HttpError, match="roles must alternate") as caught:
        template.render(MESSAGES)
    assert caught.value.status == 400


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages.append(1) }}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages[0].content.nothing.at_all }}",
        "{{ 1 / 0 }}",
    ],
)
def test_a_template_can_not_break_out(source):
    with pytest.raises(HttpError):
        ChatTemplate(source, {}).render(MESSAGES)


def test_without_a_template_the_other_routes_are_named():
    with pytest.raises(HttpError, match="/v1/completions"):
        ChatTemplate(None, {}).render(MESSAGES)


def test_a_template_that_does_not_parse_is_refused_at_start():
    with pytest.raises(VocabularyError, match="not valid"):
        ChatTemplate("{% if %}", {})


def test_all_places_where_a_template_may_stand_are_read(tmp_path):
    assert ChatTemplate.load(tmp_path, {"chat_template": "one"}).render([]) == "one"
    named = [{"name": "tool_use", "template": "no"}, {"name": "default", "template": "two{{ eos_token }}"}]
    settings = {"chat_template": named, "eos_token": {"content": "</s>"}}
    assert ChatTemplate.load(tmp_path, json.loads(json.dumps(settings))).render([]) == "two</s>"
    (tmp_path / "chat_template.jinja").write_text("three")
    assert ChatTemplate.load(tmp_path, settings).render([]) == "three"

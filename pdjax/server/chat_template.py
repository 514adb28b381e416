"""Renders a conversation to the text that the model was trained on, by the template in its folder."""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from jinja2 import TemplateError, meta
from jinja2.sandbox import ImmutableSandboxedEnvironment

from pdjax.server.vocabulary import VocabularyError
from pdjax.web import HttpError


class ChatTemplate:
    """A model's chat template, in a sandbox: it sees messages and can change nothing.

    Args:
        source: Jinja source; None, if the model has no template.
        tokens: `bos_token`, `eos_token` and other special tokens' texts that templates use.

    Attributes:
        reads_tools: whether it tells the model of tools.
    """

    def __init__(self, source: str | None, tokens: Mapping[str, str]) -> None:
        self._tokens = dict(tokens)
        self.reads_tools = False
        if source is None:
            self._template = None
            return
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _refuse
        environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
        try:
            self.reads_tools = "tools" in meta.find_undeclared_variables(environment.parse(source))
            self._template = environment.from_string(source)
        except TemplateError as error:
            raise VocabularyError(f"the model's chat template is not valid: {error}") from error

    @classmethod
    def load(cls, folder: Path, settings: Mapping[str, Any]) -> ChatTemplate:
        """The template of a model folder: ``chat_template.jinja``, else `chat_template` of its settings.

        Raises:
            VocabularyError: it does not parse.
        """
        path = folder / "chat_template.jinja"
        source = path.read_text(encoding="utf-8") if path.is_file() else settings.get("chat_template")
        if isinstance(source, list):
            source = {each.get("name"): each.get("template") for each in source}.get("default")
        if source is not None and not isinstance(source, str):
            raise VocabularyError("chat_template in tokenizer_config.json must be a text or a list of named texts")
        texts = {name: _token_text(value) for name, value in settings.items() if name.endswith("_token")}
        return cls(source, {name: text for name, text in texts.items() if text is not None})

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        options: Mapping[str, Any] | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> str:
        """The prompt's text, ready for the assistant's answer.

        Args:
            messages: mappings with `role`, `content` and what else the template reads.
            options: further variables for the template (`chat_template_kwargs`).
            tools: that the model may call.

        Raises:
            HttpError: 400, the template refuses the messages, or there is no template.
        """
        if self._template is None:
            raise HttpError(400, "this model has no chat template; use /v1/completions or /generate")
        variables: dict[str, Any] = {"add_generation_prompt": True, **self._tokens, **(options or {})}
        if tools:
            variables["tools"] = list(tools)
        try:
            return self._template.render({**variables, "messages": messages})
        except (
            TemplateError,
            TypeError,
            ValueError,
            LookupError,
            AttributeError,
            ArithmeticError,
            RecursionError,
        ) as error:
            raise HttpError(400, f"messages: the model's chat template can't render them: {error}") from error


def _token_text(value: Any) -> str | None:
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None


def _to_json(value: Any, indent: int | None = None, **_: Any) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _refuse(message: str) -> NoReturn:
    raise TemplateError(message)

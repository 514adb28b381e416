"""Structured output: which tokens a grammar allows next. Compiled and advanced on the host, applied on the device.

A thread of its own builds the tokenizer's trie at the first use and compiles grammars, so that nobody else waits:
llguidance does both without the interpreter lock.
"""

from __future__ import annotations

import queue
import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pdjax import wire
from pdjax.engine.slots import mask_words

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

CACHED_GRAMMARS = 64
MAX_GRAMMAR = 1 << 20  # characters
# White space between the parts of a JSON text is bounded: a weak model may never come to an end otherwise.
_JSON_OPTIONS: JsonCompileOptions = {"whitespace_pattern": r"[ \n\r\t]{1,32}"}


class GrammarError(Exception):
    """A grammar that does not compile, or an answer that it can't be led through; in words.

    `status` is the HTTP status that fits: 400, unless this side has gone wrong.
    """

    def __init__(self, message: str, status: int = 400) -> None:
        super().__init__(message)
        self.status = status


@dataclass(frozen=True)
class Compiled:
    """Posted for each `Grammars.request`, by its number: `matcher` at its start, or `error` in words."""

    number: int
    matcher: Matcher | None
    error: str = ""


class Matcher:
    """Where one answer stands in its grammar. `matcher` is an llguidance `LLMatcher`."""

    def __init__(self, matcher: Any, vocab: int) -> None:
        self._matcher = matcher
        self._bytes = 4 * mask_words(vocab)
        self._allowed = b""  # the latest mask

    def copy(self) -> Matcher:
        """Another answer's, at the same place."""
        return Matcher(self._matcher.deep_copy(), self._bytes * 8)

    def mask(self) -> bytes:
        """The tokens that may come next, as `pdjax.engine.plan.Row.mask` has them.

        Raises:
            GrammarError: none may, because the grammar has become too large for its limits.
        """
        mask = bytes(self._matcher.compute_bitmask())[: self._bytes]
        if self._matcher.is_error():
            raise self._too_large()
        self._allowed = mask.ljust(self._bytes, b"\0")
        return self._allowed

    @property
    def complete(self) -> bool:
        """Whether the answer can't go on."""
        return self._matcher.is_stopped()

    def advance(self, token: int) -> None:
        """Take the next token in.

        Raises:
            GrammarError: the grammar has become too large for its limits, or does not allow the token.
        """
        if self._matcher.consume_token(token):
            return
        if self._allowed and self._allowed[token // 8] >> token % 8 & 1:
            raise self._too_large()
        raise GrammarError(f"token {token} is not in the grammar: {_first_line(self._matcher.get_error())}", status=500)

    def _too_large(self) -> GrammarError:
        return GrammarError(f"the grammar can't be followed further: {_first_line(self._matcher.get_error())}")


class Grammars:
    """Compiles grammars, and keeps those that were used last.

    Args:
        tokenizer: ``tokenizer.json`` of the model folder.
        vocab: how many logits the model has; at least the tokenizer's own vocabulary.
        eos_token_ids: tokens that may end a complete answer.
        post: takes a `Compiled` for each request, from this object's thread.
    """

    def __init__(
        self, tokenizer: Path, *, vocab: int, eos_token_ids: tuple[int, ...], post: Callable[[Compiled], None]
    ) -> None:
        self._tokenizer_file = tokenizer
        self._vocab = vocab
        self._eos_token_ids = eos_token_ids
        self._post = post
        self._wanted: queue.SimpleQueue[tuple[int, wire.Grammar]] = queue.SimpleQueue()
        self._tokenizer: Any = None
        self._kept: OrderedDict[wire.Grammar, Matcher] = OrderedDict()
        self._thread: threading.Thread | None = None

    def request(self, number: int, grammar: wire.Grammar) -> None:
        """Have a grammar compiled; a `Compiled` with this number follows."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="grammars", daemon=True)
            self._thread.start()
        self._wanted.put((number, grammar))

    def compile(self, grammar: wire.Grammar) -> Matcher:
        """A matcher at its start.

        Raises:
            GrammarError: it does not compile.
        """
        kept = self._kept.get(grammar)
        if kept is None:
            kept = self._kept[grammar] = self._compile(grammar)
            if len(self._kept) > CACHED_GRAMMARS:
                self._kept.popitem(last=False)
        self._kept.move_to_end(grammar)
        return kept.copy()

    def _work(self) -> None:
        while True:
            number, grammar = self._wanted.get()
            try:
                answer = Compiled(number, self.compile(grammar))
            except GrammarError as error:
                answer = Compiled(number, None, str(error))
            except Exception as error:  # noqa: BLE001 - the one who waits must hear of it, whatever it was
                answer = Compiled(number, None, f"{grammar.kind}: cannot be used: {type(error).__name__}: {error}")
            self._post(answer)

    def _compile(self, grammar: wire.Grammar) -> Matcher:
        import llguidance  # not before it is needed: it takes a twentieth of a second

        if len(grammar.text) > MAX_GRAMMAR:
            raise GrammarError(f"{grammar.kind}: {len(grammar.text)} characters are over the limit of {MAX_GRAMMAR}")
        if self._tokenizer is None:
            self._tokenizer = llguidance.LLTokenizer(
                str(self._tokenizer_file), n_vocab=self._vocab, eos_token=list(self._eos_token_ids) or None
            )
        try:
            match grammar.kind:
                case "json_schema":
                    text = llguidance.LLMatcher.grammar_from_json_schema(grammar.text, overrides=_JSON_OPTIONS)
                case "json_object":
                    text = llguidance.LLMatcher.grammar_from_json_schema('{"type": "object"}', overrides=_JSON_OPTIONS)
                case "regex":
                    text = llguidance.LLMatcher.grammar_from_regex(grammar.text)
                case "ebnf":
                    text = llguidance.grammar_from("ebnf", grammar.text)
                case kind:
                    raise GrammarError(f"a grammar is json_schema, json_object, regex or ebnf, not {kind!r}")
        except ValueError as error:
            raise GrammarError(f"{grammar.kind}: does not compile: {error}") from error
        matcher = llguidance.LLMatcher(self._tokenizer, text, log_level=0)
        if matcher.is_error():
            raise GrammarError(f"{grammar.kind}: does not compile: {matcher.get_error().strip()}")
        return Matcher(matcher, self._vocab)


def _first_line(text: str) -> str:
    return text.strip().split("\n", 1)[0]

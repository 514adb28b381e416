"""A grammar leads an answer, whatever the model would rather say and whoever else is in the batch."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from small_engine import EOS, SmallEngine, TinyModel

from pdjax.engine.grammar import GrammarError, Grammars
from pdjax.engine.plan import DecodeStep
from pdjax.models.random import tiny_config, write_random_model
from pdjax.wire import Failed, Grammar, Tokens

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 1, "maxLength": 8},
        "kind": {"enum": ["cat", "dog", None]},
        "ages": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 99}, "maxItems": 3},
        "home": {"type": "object", "properties": {"city": {"type": "string", "pattern": "^[A-Z][a-z]{1,6}$"}},
                 "required": ["city"], "additionalProperties": False},
    },
    "required": ["name", "kind", "ages", "home"],
    "additionalProperties": False,
}  # fmt: skip
JSON_SCHEMA = Grammar("json_schema", json.dumps(SCHEMA))
DATE = r"(19|20)[0-9]{2}-(0[1-9]|1[0-2])-[0-3][0-9]"
SUM = 'root ::= term ("+" term){0,3} ";"\nterm ::= [0-9] | "(" [a-z] ")"\n'


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer") / "tiny"
    write_random_model(folder, tiny_config(), seed=1)
    return folder / "tokenizer.json"


@pytest.fixture
def make(tiny: TinyModel, tokenizer: Path) -> Callable[..., SmallEngine]:
    def make(**options: Any) -> SmallEngine:
        grammars = Grammars(tokenizer, vocab=260, eos_token_ids=(EOS,), post=lambda compiled: small.inbox.put(compiled))
        small = SmallEngine(tiny, grammars=grammars, **options)
        return small

    return make


def run(small: SmallEngine, seconds: float = 60) -> None:
    """Turn until nothing is live; grammars are compiled in a thread of their own meanwhile."""
    end = time.monotonic() + seconds
    while small.turn() or small.engine.requests or not small.inbox.empty():
        assert time.monotonic() < end, f"requests do not end: {sorted(small.engine.requests)}"
        if not small.engine.scheduler.has_work:
            time.sleep(0.002)


@pytest.fixture(scope="module")
def byte_of(tokenizer: Path) -> dict[int, int]:
    """What byte each token of the tiny vocabulary is."""
    alphabet = json.loads(tokenizer.read_text())["model"]["vocab"]
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    characters = {chr(byte): byte for byte in printable}
    others = [byte for byte in range(256) if byte not in printable]
    characters |= {chr(256 + number): byte for number, byte in enumerate(others)}
    return {token: characters[text] for text, token in alphabet.items() if text in characters}


def text(ids: list[int], byte_of: dict[int, int]) -> str:
    return bytes(byte_of[token] for token in ids if token != EOS).decode()


def test_answers_follow_a_schema_whatever_the_seed(make: Callable[..., SmallEngine], byte_of: dict[int, int]) -> None:
    small = make()
    for seed in range(12):
        small.send(str(seed), [1, 2, seed], 240, grammar=JSON_SCHEMA, temperature=1.0, seed=seed, ignore_eos=False)
    run(small)
    answers = set()
    for rid, end in small.ends().items():
        assert isinstance(end, Tokens) and end.finish_reason == "stop", end
        answer = text(small.ids(rid), byte_of)
        jsonschema.validate(json.loads(answer), SCHEMA)
        answers.add(answer)
    assert len(answers) == 12


@pytest.mark.parametrize(
    ("grammar", "matches"),
    [
        (Grammar("regex", DATE), lambda answer: re.fullmatch(DATE, answer)),
        (Grammar("ebnf", SUM), lambda answer: re.fullmatch(r"([0-9]|\([a-z]\))(\+([0-9]|\([a-z]\))){0,3};", answer)),
    ],
    ids=["regex", "ebnf"],
)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_answers_match_a_regex_or_a_grammar(
    make: Callable[..., SmallEngine], byte_of: dict[int, int], grammar: Grammar, matches: Any, temperature: float
) -> None:
    small = make()
    for seed in range(4):
        small.send(str(seed), [7, seed], 60, grammar=grammar, temperature=temperature, seed=seed)
    run(small)
    for seed in range(4):
        answer = text(small.ids(str(seed)), byte_of)
        assert matches(answer), answer
        end = small.ends()[str(seed)]
        assert isinstance(end, Tokens) and (end.finish_reason, end.matched) == ("stop", None)


def test_a_json_object_is_one_as_far_as_it_goes(make: Callable[..., SmallEngine], byte_of: dict[int, int]) -> None:
    small = make()
    small.send("a", [3], 40, grammar=Grammar("json_object"), temperature=1.0, seed=5)
    run(small)
    # Inside its strings there may be tokens of more than a byte.
    said = bytes(byte_of.get(token, 0) for token in small.ids("a"))
    assert said.lstrip().startswith(b"{")


def test_others_in_the_batch_keep_their_tokens(make: Callable[..., SmallEngine]) -> None:
    alone = make()
    alone.send("free", [4, 5, 6], 60, temperature=1.0, seed=1)
    run(alone)
    together = make()
    together.send("free", [4, 5, 6], 60, temperature=1.0, seed=1)
    for seed in range(3):
        together.send(f"led {seed}", [9], 40, grammar=JSON_SCHEMA, temperature=1.0, seed=seed)
    run(together)
    assert together.ids("free") == alone.ids("free")


@pytest.mark.parametrize(("pages", "host_pages"), [(257, 0), (21, 0), (21, -1)])
def test_a_led_answer_survives_retraction_and_is_the_plain_loops(
    make: Callable[..., SmallEngine], pages: int, host_pages: int
) -> None:
    answers = []
    for options in ({"pages": 257, "overlap": False}, {"pages": pages, "host_pages": host_pages}):
        small = make(**options)
        for seed in range(4):
            small.send(
                str(seed), [8, seed], 40, grammar=JSON_SCHEMA, temperature=0.7, seed=seed, repetition_penalty=1.1
            )
            small.send(f"free {seed}", [8, seed], 40, temperature=0.7, seed=seed)
        run(small)
        answers.append([small.ids(name.format(seed)) for seed in range(4) for name in ("{}", "free {}")])
    assert answers[0] == answers[1]
    assert (small.engine.stats()["rebootstraps_total"] > 0) == (host_pages < 0)


@pytest.mark.parametrize(
    ("grammar", "word"),
    [
        (Grammar("regex", "(ab"), "unclosed"),
        (Grammar("json_schema", '{"type": "nope"}'), "nope"),
        (Grammar("json_schema", "{"), "json_schema"),
        (Grammar("ebnf", "root ::= other"), "ebnf"),
        (Grammar("dance", "x"), "dance"),
    ],
)
def test_a_grammar_that_does_not_compile_is_refused_in_words(
    make: Callable[..., SmallEngine], grammar: Grammar, word: str
) -> None:
    small = make()
    small.send("bad", [1], 10, grammar=grammar)
    small.send("good", [1], 10)
    run(small)
    end = small.ends()["bad"]
    assert isinstance(end, Failed) and end.status == 400 and word in end.message, end
    assert len(small.ids("good")) == 10


def test_whoever_leaves_while_the_grammar_compiles_is_forgotten(make: Callable[..., SmallEngine]) -> None:
    small = make()
    small.send("gone", [1], 10, grammar=JSON_SCHEMA)
    small.turn()
    small.abort("gone")
    small.send("gone", [1], 5)
    run(small)
    assert len(small.ids("gone")) == 5


def test_without_a_tokenizer_a_grammar_is_refused_in_words(tiny: TinyModel) -> None:
    small = SmallEngine(tiny)
    small.send("a", [1], 10, grammar=JSON_SCHEMA)
    small.run()
    end = small.ends()["a"]
    assert isinstance(end, Failed) and end.status == 400 and "tokenizer" in end.message


def test_a_compiled_grammar_is_kept(tokenizer: Path) -> None:
    grammars = Grammars(tokenizer, vocab=260, eos_token_ids=(EOS,), post=lambda compiled: None)
    first = grammars.compile(JSON_SCHEMA)
    mask = first.mask()
    first.advance(next(token for token in range(260) if mask[token // 8] >> token % 8 & 1))
    assert grammars.compile(JSON_SCHEMA).mask() == mask, "another answer starts where this one did"


def test_each_step_waits_for_the_token_that_its_mask_depends_on(make: Callable[..., SmallEngine]) -> None:
    small = make()
    plans = []
    dispatch = small.engine.runner.dispatch
    small.engine.runner.dispatch = lambda step: (plans.append(step), dispatch(step))[1]  # type: ignore[method-assign]
    try:
        small.send("led", [1], 20, grammar=Grammar("regex", DATE))
        run(small)
    finally:
        del small.engine.runner.dispatch
    decodes = [plan for plan in plans if isinstance(plan, DecodeStep)]
    assert len(decodes) == 9 and all(plan.rows[0].mask and plan.token_ids[0] >= 0 for plan in decodes)


def test_a_grammar_that_outgrows_its_limits_is_the_clients_fault(tokenizer: Path) -> None:
    grammars = Grammars(tokenizer, vocab=260, eos_token_ids=(EOS,), post=lambda compiled: None)
    matcher = grammars.compile(Grammar("regex", "(a{1000}){1000}"))
    with pytest.raises(GrammarError, match=r"can't be followed further: .*too many") as caught:
        for _ in range(10):
            mask = matcher.mask()
            matcher.advance(next(token for token in range(260) if mask[token // 8] >> token % 8 & 1))
    assert caught.value.status == 400


def test_a_token_that_no_mask_allowed_is_not(tokenizer: Path) -> None:
    matcher = Grammars(tokenizer, vocab=260, eos_token_ids=(EOS,), post=lambda compiled: None).compile(
        Grammar("regex", "ab")
    )
    mask = matcher.mask()
    with pytest.raises(GrammarError, match="is not in the grammar") as caught:
        matcher.advance(next(token for token in range(260) if not mask[token // 8] >> token % 8 & 1))
    assert caught.value.status == 500

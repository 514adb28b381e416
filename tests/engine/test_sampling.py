"""A token is picked as its request's options say, whatever the rows beside it ask for."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import numpy as np
import pytest
from sampling_oracle import adjusted, log_softmax

from pdjax.engine.plan import History, Row
from pdjax.engine.rows import Packer
from pdjax.engine.sampling import DRAW_BLOCK, MAX_TOP, Picked, inverse_cdf, problem, sample
from pdjax.engine.slots import MAX_BIAS, Progress, Tables, empty, mask_rows, slot_row, write_masks, write_slot
from pdjax.wire import Grammar, SamplingParams

VOCAB, ROWS = 77, 16
_sample, _write_slot, _write_masks = jax.jit(sample), jax.jit(write_slot), jax.jit(write_masks)
_empty = jax.jit(partial(empty, ROWS, VOCAB))


def pick(logits: np.ndarray, rows: list[Row], positions: np.ndarray | None = None) -> Picked:
    """One step's picks [ROWS]. A row's `history.output_ids` are all that it has put out."""
    progress, tables = _tables(rows)
    positions = np.arange(ROWS, dtype=np.int32) if positions is None else positions
    places, zeros = list(range(len(rows))), [0] * len(rows)
    packed = Packer(width=0).pack(rows, ROWS, places, token_ids=zeros, positions=zeros)
    return _sample(logits, packed, positions, progress, tables)


def _tables(rows: list[Row]) -> tuple[Progress, Tables]:
    progress, tables = _empty()
    for row in rows:
        if row.history is not None:
            contents = slot_row(row.history, row.sampling, VOCAB)
            progress, tables = _write_slot(progress, tables, np.int32(row.slot), contents)
    places, words = mask_rows({row.slot: row.mask for row in rows if row.mask}, ROWS, VOCAB)
    return progress, tables._replace(masks=_write_masks(tables.masks, places, words))


def mask_of(allowed: list[int]) -> bytes:
    bits = np.zeros(-(-VOCAB // 32) * 32, np.uint8)
    bits[allowed] = 1
    return np.packbits(bits, bitorder="little").tobytes()


def random_row(random: np.random.Generator, slot: int) -> tuple[Row, list[int] | None]:
    """Some options, each there or not; and the tokens that a grammar allows."""
    there = random.random(5) < 0.5
    bias = random.choice(VOCAB, 5, replace=False)
    sampling = SamplingParams(
        temperature=0.0,
        repetition_penalty=float(random.uniform(0.5, 3)) if there[0] else 1.0,
        presence_penalty=float(random.uniform(-2, 2)) if there[1] else 0.0,
        frequency_penalty=float(random.uniform(-2, 2)) if there[2] else 0.0,
        logit_bias=tuple((int(token), float(random.normal(0, 4))) for token in bias) if there[3] else (),
    )
    allowed = random.choice(VOCAB, 30, replace=False).tolist() if there[4] else None
    history = History(random.integers(0, VOCAB, 20).tolist(), random.integers(0, VOCAB, 20).tolist())
    return (
        Row("", [], sampling, 0, banned=tuple(random.choice(VOCAB, random.integers(0, 4)).tolist()), slot=slot,
            history=history, mask=b"" if allowed is None else mask_of(allowed)), allowed)  # fmt: skip


@pytest.mark.parametrize("seed", range(8))
def test_greedy_takes_the_best_after_penalties_bias_bans_and_grammar(seed: int) -> None:
    random = np.random.default_rng(seed)
    logits = random.normal(0, 3, (ROWS, VOCAB)).astype(np.float32)
    drawn = [random_row(random, slot) for slot in random.permutation(ROWS).tolist()]
    picked = pick(logits, [row for row, _ in drawn])
    for index, (row, allowed) in enumerate(drawn):
        assert row.history is not None
        expected = adjusted(logits[index], row.sampling, prompt=row.history.prompt_ids, output=row.history.output_ids,
                            banned=row.banned, allowed=allowed)  # fmt: skip
        assert picked.tokens[index] == expected.argmax(), row
        np.testing.assert_allclose(picked.logprobs[index], log_softmax(logits[index])[expected.argmax()], atol=1e-4)


def test_penalties_are_those_of_transformers() -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    random = np.random.default_rng(5)
    logits = random.normal(0, 3, (ROWS, VOCAB)).astype(np.float32)
    histories = [History(random.integers(0, VOCAB, 30).tolist(), random.integers(0, VOCAB, 9).tolist()) for _ in logits]
    penalty = 1.7
    sampling = SamplingParams(temperature=0.0, repetition_penalty=penalty)
    picked = pick(logits, [Row("", [], sampling, 0, slot=i, history=each) for i, each in enumerate(histories)])
    processor = transformers.RepetitionPenaltyLogitsProcessor(penalty)
    ids = torch.tensor([each.prompt_ids + each.output_ids for each in histories])
    assert picked.tokens.tolist() == processor(ids, torch.tensor(logits)).argmax(dim=-1).tolist()


def test_best_tokens_are_told_in_order_and_as_the_model_has_them() -> None:
    random = np.random.default_rng(1)
    logits = random.normal(0, 3, (ROWS, VOCAB)).astype(np.float32)
    biased = SamplingParams(temperature=0.0, logit_bias=((3, 50.0),))
    rows = [Row("", [], biased, 0, slot=0, history=History([1], []), top=MAX_TOP)] + [
        Row("", [], SamplingParams(temperature=0.0), 0, slot=slot) for slot in range(1, ROWS)
    ]
    picked = pick(logits, rows)
    order = np.argsort(-logits[0])[:MAX_TOP]
    assert picked.tokens[0] == 3
    assert picked.top_ids[0].tolist() == order.tolist()
    np.testing.assert_allclose(picked.top_logprobs[0], log_softmax(logits[0])[order], atol=1e-4)
    np.testing.assert_allclose(picked.logprobs[0], log_softmax(logits[0])[3], atol=1e-4)


def draws(logits: np.ndarray, count: int, **options: Any) -> np.ndarray:
    """Relative frequency [vocab] of the tokens that one request draws at `count` positions with the same logits."""
    rows = [Row("", [], SamplingParams(**options), 7)] * ROWS
    tokens = [
        pick(np.tile(logits, (ROWS, 1)), rows, np.arange(start, start + ROWS, dtype=np.int32)).tokens
        for start in range(0, count, ROWS)
    ]
    return np.bincount(np.concatenate(tokens), minlength=VOCAB) / count


def test_draws_follow_the_probabilities() -> None:
    logits = np.random.default_rng(2).normal(0, 1.5, VOCAB).astype(np.float32)
    expected = np.exp(log_softmax(logits / 0.8))
    count = 3200
    error = np.abs(draws(logits, count, temperature=0.8) - expected)
    assert (error < 5 * np.sqrt(expected / count) + 2e-3).all()


def test_draws_from_a_vocabulary_of_many_blocks_follow_the_probabilities_too() -> None:
    random = np.random.default_rng(6)
    vocab, count = 3 * DRAW_BLOCK + 5, 40_000
    logits = random.normal(0, 1.5, vocab).astype(np.float32)
    excluded = np.r_[0:3, DRAW_BLOCK : 2 * DRAW_BLOCK, vocab - 2 : vocab]  # one of the blocks wholly
    logits[excluded] = -np.inf
    uniforms = random.random((count, 2), np.float32)
    uniforms[:4] = [[0, 0], [0, 1 - 2**-24], [1 - 2**-24, 0], [1 - 2**-24, 1 - 2**-24]]
    tokens = np.asarray(jax.jit(inverse_cdf)(np.broadcast_to(logits, (count, vocab)), uniforms))
    drawn = np.bincount(tokens, minlength=vocab)
    assert not drawn[excluded].any()
    expected = np.exp(log_softmax(logits)) * count
    expected, drawn = np.delete(expected, excluded), np.delete(drawn, excluded)
    chi_square = ((drawn - expected) ** 2 / expected).sum()
    degrees = len(expected) - 1
    assert abs(chi_square - degrees) < 6 * np.sqrt(2 * degrees)


@pytest.mark.parametrize(
    "options", [{"top_k": 5}, {"top_k": 70}, {"top_p": 0.6}, {"min_p": 0.2}, {"top_k": 9, "top_p": 0.7, "min_p": 0.02}]
)
@pytest.mark.parametrize("masked", [False, True])
def test_what_filters_exclude_is_never_drawn(options: dict[str, Any], masked: bool) -> None:
    logits = np.random.default_rng(3).normal(0, 1.5, VOCAB).astype(np.float32)
    allowed = list(range(0, VOCAB, 2)) if masked else list(range(VOCAB))
    order = sorted(allowed, key=lambda token: -logits[token])[: options.get("top_k", VOCAB)]
    order = [int(token) for token in order]
    probabilities = np.exp(log_softmax(logits[order]))
    last = int(np.searchsorted(np.cumsum(probabilities), options.get("top_p", 1.0))) + 1
    kept = [token for token, p in zip(order[:last], probabilities, strict=False)
            if p >= options.get("min_p", 0) * probabilities[0]]  # fmt: skip
    sampling = SamplingParams(temperature=1.0, **options)
    rows = [Row("", [], sampling, seed, slot=seed, mask=mask_of(allowed) if masked else b"") for seed in range(ROWS)]
    drawn = set()
    for start in range(40):
        drawn |= set(np.asarray(pick(np.tile(logits, (ROWS, 1)), rows, np.full(ROWS, start, np.int32)).tokens).tolist())
    assert drawn <= set(kept)
    assert len(drawn) > len(kept) // 2


@pytest.mark.parametrize(
    ("sampling", "top", "word"),
    [
        (SamplingParams(logit_bias=tuple((token, 1.0) for token in range(MAX_BIAS + 1))), 0, "300"),
        (SamplingParams(logit_bias=((VOCAB, 1.0),)), 0, "vocabulary"),
        (SamplingParams(logit_bias=((1, 1.0), (1, 2.0))), 0, "twice"),
        (SamplingParams(logit_bias=((1, float("nan")),)), 0, "finite"),
        (SamplingParams(), MAX_TOP + 1, "0..20"),
        (SamplingParams(repetition_penalty=0.0), 0, "above 0"),
        (SamplingParams(min_new_tokens=1, stop_token_ids=tuple(range(50))), 0, "48"),
        (SamplingParams(min_new_tokens=1, grammar=Grammar("regex", "a")), 0, "grammar"),
    ],
)
def test_what_the_steps_cannot_do_is_refused_in_words(sampling: SamplingParams, top: int, word: str) -> None:
    said = problem(sampling, top=top, vocab=VOCAB)
    assert said is not None and word in said
    assert problem(SamplingParams(repetition_penalty=1.2, logit_bias=((1, 2.0),)), top=5, vocab=VOCAB) is None

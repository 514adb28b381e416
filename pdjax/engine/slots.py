"""What stays on the device between steps, one row for each request that is being served: its *slot*.

A slot keeps what does not fit into a step's arguments: which tokens a request has seen, which logits it biases, which
tokens its grammar allows now. Slots are reused without being cleared: a step reads only what its rows say they have.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pdjax.engine.plan import NO_SLOT, History
from pdjax.wire import SamplingParams

MAX_BIAS = 300  # tokens whose logits a request may bias; as many as OpenAI takes
NO_TOKEN = np.iinfo(np.int32).max  # past any vocabulary: scatters drop it
PROMPT, OUTPUT = 1, 2  # `seen` counts: bit 0 is set for a prompt's token, each output token adds 2


class Progress(NamedTuple):
    """What decode steps themselves move on: donated to each, and given back by it.

    Attributes: last int32 [slots], the token that was picked last; seen int32 [slots, vocab], `PROMPT` and `OUTPUT`.
    """

    last: jax.Array
    seen: jax.Array


class Tables(NamedTuple):
    """What steps only read.

    Attributes: bias_ids int32 [slots, MAX_BIAS], padded with `NO_TOKEN`; bias_values float32, the same shape; masks
    int32 [slots, ceil(vocab / 32)], bit t % 32 of word t // 32 allows token t.
    """

    bias_ids: jax.Array
    bias_values: jax.Array
    masks: jax.Array


def mask_words(vocab: int) -> int:
    """32-bit words of a mask."""
    return -(-vocab // 32)


def empty(slots: int, vocab: int) -> tuple[Progress, Tables]:
    """Tables for so many slots; for `jax.jit` with the shardings that the steps give them back with."""
    progress = Progress(jnp.zeros(slots, jnp.int32), jnp.zeros((slots, vocab), jnp.int32))
    tables = Tables(
        bias_ids=jnp.full((slots, MAX_BIAS), NO_TOKEN, jnp.int32),
        bias_values=jnp.zeros((slots, MAX_BIAS), jnp.float32),
        masks=jnp.full((slots, mask_words(vocab)), -1, jnp.int32),
    )
    return progress, tables


class SlotRow(NamedTuple):
    """One slot's new contents, on the host. Shapes are those of `Progress` and `Tables` without the slots."""

    seen: np.ndarray
    bias_ids: np.ndarray
    bias_values: np.ndarray


def slot_row(history: History, sampling: SamplingParams, vocab: int) -> SlotRow:
    """What a request's slot holds before the step that `history` comes with."""
    seen = np.zeros(vocab, np.int32)
    np.add.at(seen, np.asarray(history.output_ids, np.int64), OUTPUT)
    seen[np.asarray(history.prompt_ids, np.int64)] |= PROMPT
    bias_ids, bias_values = np.full(MAX_BIAS, NO_TOKEN, np.int32), np.zeros(MAX_BIAS, np.float32)
    for index, (token, value) in enumerate(sampling.logit_bias):
        bias_ids[index], bias_values[index] = token, value
    return SlotRow(seen, bias_ids, bias_values)


def write_slot(progress: Progress, tables: Tables, slot: jax.Array, row: SlotRow) -> tuple[Progress, Tables]:
    """Traced: replace a slot's contents, but for its mask; `NO_SLOT` writes nothing."""

    def put(table: jax.Array, values: np.ndarray) -> jax.Array:
        return table.at[slot].set(values, mode="drop")

    return (
        progress._replace(seen=put(progress.seen, row.seen)),
        tables._replace(
            bias_ids=put(tables.bias_ids, row.bias_ids), bias_values=put(tables.bias_values, row.bias_values)
        ),
    )


def write_masks(masks: jax.Array, slots: jax.Array, words: jax.Array) -> jax.Array:
    """Traced: set the masks of `slots` [n] to words [n, ceil(vocab / 32)]; `NO_SLOT` writes nothing."""
    return masks.at[slots].set(words, mode="drop")


def mask_rows(masks: dict[int, bytes], slots: int, vocab: int) -> tuple[np.ndarray, np.ndarray]:
    """Masks by slot as arguments of `write_masks`, for one program: n is `slots`."""
    places = np.full(slots, NO_SLOT, np.int32)
    words = np.zeros((slots, mask_words(vocab)), np.int32)
    for index, (slot, mask) in enumerate(masks.items()):
        places[index] = slot
        words[index] = np.frombuffer(mask, np.int32)
    return places, words

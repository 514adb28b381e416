"""The rows of a step as the compiled programs take them: one array for all that is said of them.

Each argument of a program costs the host tens of microseconds, so all rows' numbers travel together, and what has not
changed since the step before is not packed again.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pdjax.engine.plan import Row
from pdjax.engine.slots import NO_TOKEN
from pdjax.wire import SamplingParams

MAX_BANNED = 64  # tokens that a row may exclude before `min_new_tokens`
PENALIZED, BIASED, BANNED, MASKED, TOP = 1, 2, 4, 8, 16  # what a row asks for

_TOKEN, _POSITION, _SLOT, _FLAGS, _TOP_K, _SEED, _FLOATS, _BANNED = 0, 1, 2, 3, 4, 5, 6, 12  # first columns
_PAGES = _BANNED + MAX_BANNED
_FLOATS_OFF = (0, 1, 0, 1, 0, 0)


class StepRows(NamedTuple):
    """Attributes: packed int32 [batch, columns]; floats and unsigned numbers as their bits. Read by the properties,
    traced, [batch] each where nothing else is said."""

    packed: jax.Array | np.ndarray

    @property
    def token_ids(self) -> jax.Array:
        """The tokens to compute on; each may be `ON_DEVICE`."""
        return self._column(_TOKEN)

    @property
    def positions(self) -> jax.Array:
        """Those of `token_ids`."""
        return self._column(_POSITION)

    @property
    def slots(self) -> jax.Array:
        """The rows' slots; `NO_SLOT` for padding."""
        return self._column(_SLOT)

    @property
    def flags(self) -> jax.Array:
        """What the rows ask for: PENALIZED, BIASED, BANNED, MASKED, TOP."""
        return self._column(_FLAGS)

    @property
    def top_k(self) -> jax.Array:
        """0 is off."""
        return self._column(_TOP_K)

    @property
    def seeds(self) -> jax.Array:
        """uint32."""
        return lax.bitcast_convert_type(self._column(_SEED), jnp.uint32)

    @property
    def temperature(self) -> jax.Array:
        """0 is greedy."""
        return self._float(0)

    @property
    def top_p(self) -> jax.Array:
        """1 is off."""
        return self._float(1)

    @property
    def min_p(self) -> jax.Array:
        """0 is off."""
        return self._float(2)

    @property
    def repetition(self) -> jax.Array:
        """1 is off."""
        return self._float(3)

    @property
    def presence(self) -> jax.Array:
        """0 is off."""
        return self._float(4)

    @property
    def frequency(self) -> jax.Array:
        """0 is off."""
        return self._float(5)

    @property
    def banned(self) -> jax.Array:
        """[batch, MAX_BANNED], padded with `NO_TOKEN`."""
        return jnp.asarray(self.packed)[:, _BANNED:_PAGES]

    @property
    def page_table(self) -> jax.Array:
        """[batch, width], 0 past each row's pages."""
        return jnp.asarray(self.packed)[:, _PAGES:]

    def any(self, flag: int) -> jax.Array:
        """Whether a row asks for (one of) `flag`."""
        return jnp.any(self.flags & flag != 0)

    def only(self, flag: int, indices: jax.Array) -> jax.Array:
        """int32 indices [batch, ...], `NO_TOKEN` in the rows that do not ask for `flag`."""
        asked = (self.flags & flag != 0).reshape(-1, *[1] * (indices.ndim - 1))
        return jnp.where(asked, indices, NO_TOKEN)

    def _column(self, column: int) -> jax.Array:
        return jnp.asarray(self.packed)[:, column]

    def _float(self, column: int) -> jax.Array:
        return lax.bitcast_convert_type(self._column(_FLOATS + column), jnp.float32)


class Packer:
    """Packs the rows of steps. `width` is the most pages of a row."""

    def __init__(self, width: int) -> None:
        self._padding = _padding(width)
        self._batch: list[Row | None] = []  # what `_packed` holds, by place
        self._packed = np.zeros((0, 0), np.int32)

    def pack(
        self, rows: list[Row], batch: int, places: list[int], *, token_ids: list[int], positions: list[int]
    ) -> StepRows:
        """`batch` rows, of which `rows` stand in `places`; the others are greedy and compute on page 0.

        A row that is the same object as in the call before, in the same place, is not looked at again.
        """
        if len(self._batch) != batch:
            self._batch = [None] * batch
            self._packed = np.tile(self._padding, (batch, 1))
        new: list[Row | None] = [None] * batch
        tokens, at = [0] * batch, [0] * batch
        for place, row, token_id, position in zip(places, rows, token_ids, positions, strict=True):
            new[place], tokens[place], at[place] = row, token_id, position
        if new != self._batch:
            self._replace(new)
        packed = self._packed.copy()  # the program may still read the one before
        packed[:, _TOKEN], packed[:, _POSITION] = tokens, at  # half of what assigning to `places` costs
        return StepRows(packed)

    def _replace(self, new: list[Row | None]) -> None:
        """Pack those of the rows, by place, that are not the same objects as before."""
        for place, (row, before) in enumerate(zip(new, self._batch, strict=True)):
            if row is not before:
                self._packed[place] = self._padding
                if row is not None:
                    _fill(self._packed[place], row)
        self._batch = new


def uses_slot(sampling: SamplingParams) -> bool:
    """Whether a request's slot must be written before it can be sampled."""
    return bool(_history_flags(sampling))


def _padding(width: int) -> np.ndarray:
    line = np.zeros(_PAGES + width, np.int32)
    line[_SLOT] = NO_TOKEN
    line[_FLOATS:_BANNED].view(np.float32)[:] = _FLOATS_OFF
    line[_BANNED:_PAGES] = NO_TOKEN
    return line


def _fill(line: np.ndarray, row: Row) -> None:
    """Write a row over padding."""
    param = row.sampling
    flags = _history_flags(param) | (BANNED if row.banned else 0)
    flags |= (MASKED if row.mask else 0) | (TOP if row.top else 0)
    line[_SLOT], line[_FLAGS], line[_TOP_K] = row.slot, flags, param.top_k
    line[_SEED : _SEED + 1].view(np.uint32)[0] = row.seed & 0xFFFFFFFF
    line[_FLOATS:_BANNED].view(np.float32)[:] = (
        param.temperature, param.top_p, param.min_p, param.repetition_penalty,
        param.presence_penalty, param.frequency_penalty,
    )  # fmt: skip
    line[_BANNED : _BANNED + len(row.banned)] = row.banned
    line[_PAGES : _PAGES + len(row.pages)] = row.pages


def _history_flags(sampling: SamplingParams) -> int:
    neutral = sampling.repetition_penalty == 1 and not sampling.presence_penalty and not sampling.frequency_penalty
    return (0 if neutral else PENALIZED) | (BIASED if sampling.logit_bias else 0)

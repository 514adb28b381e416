"""A parameter that is a row of one array with others like it.

A compiled step costs the host 4 us for each array that it takes, so parameters that are alike, one a layer, may come
as one array. To a layer it makes no difference: ``parameter[...]`` is the row. What can work on a row where it lies
asks for ``parameter.get_value()``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Stacked:
    """Attributes: stack [rows, *shape]; row int32 scalar, traced, so that all layers are one traced function."""

    stack: jax.Array
    row: jax.Array

    @property
    def dtype(self) -> jnp.dtype:
        """Of the parameter."""
        return self.stack.dtype

    def __getitem__(self, index: Any) -> jax.Array:
        """The parameter [*shape], indexed."""
        return lax.dynamic_index_in_dim(self.stack, self.row, keepdims=False)[index]

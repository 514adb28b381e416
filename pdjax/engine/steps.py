"""The traced functions behind a runner's compiled steps. Arguments are named as in `PagedBatch`."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial, wraps
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from pdjax.engine.plan import ON_DEVICE
from pdjax.engine.prompt_logprobs import PromptLogprobs, prompt_logprobs
from pdjax.engine.rows import PENALIZED, StepRows
from pdjax.engine.sampling import sample
from pdjax.engine.slots import OUTPUT, Progress, Tables
from pdjax.layers.attention import PagedBatch, attend_decode_parts, attend_prefill_parts
from pdjax.layers.attention_backend import AttentionBackend
from pdjax.layers.mesh_attention import Attention, write_and_attend
from pdjax.layers.pipeline import through_stages
from pdjax.layers.sharding import constrain
from pdjax.models.checkpoint import LoadedModel
from pdjax.models.llama import Llama


def _in_context(step: Callable[..., Any]) -> Callable[..., Any]:
    """A method of `Steps`, traced in its context."""

    @wraps(step)
    def traced(self: Steps, *args: Any, **named: Any) -> Any:
        with self._context():
            return step(self, *args, **named)

    return traced


class Steps:
    """Steps of one model on a mesh. The pool is threaded through the layers."""

    def __init__(self, model: LoadedModel, dtype: jnp.dtype, attention: AttentionBackend, mesh: Mesh) -> None:
        self._model = model
        self._attention = attention
        self._dtype = dtype
        # What is traced finds the mesh in its context; one device needs none.
        self._context = nullcontext if mesh.size == 1 else partial(jax.sharding.use_abstract_mesh, mesh.abstract_mesh)

    @_in_context
    def prefill(
        self,
        leaves: list[jax.Array],
        pool: jax.Array,
        token_ids: jax.Array,  # [1, T]
        targets: jax.Array,  # [T]
        start: jax.Array,
        count: jax.Array,
        dp_rank: jax.Array,
        want_targets: jax.Array,  # bool
        want_top: jax.Array,  # bool
        page_table: jax.Array,  # [1, W]
    ) -> tuple[jax.Array, jax.Array, PromptLogprobs]:
        """One chunk of one prompt; returns the pool, the logits [1, vocab] after it, what is known of the targets."""
        offsets = jnp.arange(token_ids.shape[1], dtype=jnp.int32)[None]  # [1, T]
        batch = PagedBatch(page_table, start + offsets, offsets < count)
        module = self._model.merge(leaves)
        on_device = Attention(self._attention.write, self._attention.prefill, attend_prefill_parts)
        hidden, pool = self._run(module, token_ids, batch, pool, on_device, dp_rank)
        last = jnp.take(hidden, count - 1, axis=1)  # [1, hidden]
        with jax.named_scope("prompt_logprobs"):
            told = prompt_logprobs(
                hidden[0],
                targets,
                wanted=want_targets,
                top=want_top,
                logits=module.logits,
                vocab=self._model.config.vocab_size,
            )
        return pool, module.logits(last), told

    def first_token(
        self,
        logits: jax.Array,  # [1, vocab]
        progress: Progress,
        tables: Tables,
        rows: StepRows,  # positions: the picked token's own
    ) -> jax.Array:
        """The token after a prompt, see `Picked.packed`. A program of its own: the same for every length of chunk."""
        with jax.named_scope("sample"):
            return sample(logits, rows, rows.positions, progress, tables).packed()

    @_in_context
    def decode(
        self,
        leaves: list[jax.Array],
        pool: jax.Array,
        progress: Progress,
        tables: Tables,
        rows: StepRows,
    ) -> tuple[jax.Array, Progress, jax.Array]:
        """One token of each row, equally many rows of each dp rank in turn; returns the pool, the slots moved on, and
        the next tokens."""
        last = progress.last.at[rows.slots].get(mode="clip")
        token_ids = jnp.where(rows.token_ids == ON_DEVICE, last, rows.token_ids)
        # The token that is computed on is counted here, so that a request can begin in the middle of its life.
        counted = rows.only(PENALIZED, rows.slots)
        seen = progress.seen.at[counted, token_ids].add(OUTPUT, mode="drop")
        progress = progress._replace(seen=seen)
        # Each dp rank has its rows of what follows, but every device picks all tokens.
        token_ids, positions = (constrain(each[:, None], None, None) for each in (token_ids, rows.positions))
        batch = PagedBatch(constrain(rows.page_table, None, None), positions, jnp.ones_like(positions, bool))
        module = self._model.merge(leaves)
        on_device = Attention(self._attention.write, self._attention.decode, attend_decode_parts)
        hidden, pool = self._run(module, token_ids, batch, pool, on_device)
        with jax.named_scope("sample"):
            picked = sample(module.logits(hidden[:, 0]), rows, rows.positions + 1, progress, tables)
        progress = progress._replace(last=progress.last.at[rows.slots].set(picked.tokens, mode="drop"))
        return pool, progress, picked.packed()

    def _run(
        self,
        module: Llama,
        token_ids: jax.Array,
        batch: PagedBatch,
        pool: jax.Array,
        attention: Attention,
        dp_rank: jax.Array | None = None,
    ) -> tuple[jax.Array, jax.Array]:
        """The hidden states [B, T, hidden] of a step's tokens, and the pool."""

        def run_layers(states, x, batch, pool):
            def attend(layer, q, k, v, pool):
                return write_and_attend(attention, q, k, v, pool, layer, batch, self._dtype, dp_rank)

            return module.run_layers(states, x, batch.positions, pool, attend)

        x, pool = through_stages(run_layers, module.layer_states(), module.enter(token_ids), batch, pool)
        return module.leave(x), pool

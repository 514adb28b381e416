"""Runs step plans: pads them to buckets, feeds the compiled steps, owns the KV pool.

Steps are `jax.jit` over the model's flat weights with the pool donated; `warm_up` compiles all of them at start.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from pdjax.cache.pool import create_pool, pool_addresses, pool_sharding
from pdjax.cache.spec import StateSpec
from pdjax.engine.buckets import Buckets, pick
from pdjax.engine.plan import DecodeStep, PrefillStep, Row, StepPlan
from pdjax.engine.sampling import SamplingRows, sample, sampling_rows
from pdjax.layers.attention import PagedBatch, attend_decode, attend_prefill, write_pages
from pdjax.models.checkpoint import LoadedModel
from pdjax.wire import SamplingParams


@dataclass(frozen=True)
class StepResult:
    """Picked tokens and their log-probabilities, one a row of the plan."""

    token_ids: list[int]
    logprobs: list[float]


class Runner:
    """One instance's device work. Not thread-safe: it belongs to the device thread."""

    def __init__(self, model: LoadedModel, *, spec: StateSpec, pages: int, buckets: Buckets, mesh: Mesh) -> None:
        self.spec = spec
        self.buckets = buckets
        self.pool = create_pool(spec, pages, mesh)
        self.compiles_after_warm_up = 0
        self._leaves = model.leaves
        self._addresses = pool_addresses(self.pool)
        replicated = NamedSharding(mesh, PartitionSpec())
        shardings = (pool_sharding(mesh), replicated, replicated)
        steps = _Steps(model, jnp.dtype(spec.dtype))
        self._prefill = jax.jit(steps.prefill, donate_argnums=1, out_shardings=shardings)
        self._decode = jax.jit(steps.decode, donate_argnums=1, out_shardings=shardings)

    def run(self, step: StepPlan) -> StepResult:
        """Run one step and wait for its tokens."""
        match step:
            case PrefillStep():
                return self._run_prefill(step, [step.row])
            case DecodeStep():
                return self._run_decode(step)

    def warm_up(self, steps: Iterable[StepPlan]) -> None:
        """Run steps that write to page 0 only, so that their programs are compiled."""
        for step in steps:
            self.run(step)

    def prefill_warm_up(self) -> list[PrefillStep]:
        """A step for every prefill program."""
        return [PrefillStep(row=_IDLE, token_ids=[0] * tokens, start=0) for tokens in self.buckets.prefill_tokens]

    def decode_warm_up(self) -> list[DecodeStep]:
        """A step for every decode program."""
        return [
            DecodeStep(rows=[_IDLE] * rows, token_ids=[0] * rows, positions=[0] * rows)
            for rows in self.buckets.decode_rows
        ]

    def expect_no_compile(self) -> None:
        """From now on count every compilation, and say so: a request is waiting for it."""

        def listen(event: str, duration_secs: float, **_: str | int) -> None:
            if event == "/jax/core/compile/backend_compile_duration":
                self.compiles_after_warm_up += 1
                text = f"pdjax: a program was compiled after warm-up, in {duration_secs:.1f} s"
                print(text, file=sys.stderr, flush=True)

        jax.monitoring.register_event_duration_secs_listener(listen)

    def check_integrity(self) -> None:
        """Raise RuntimeError if the pool has moved: staging and transfers know it by address."""
        if pool_addresses(self.pool) != self._addresses:
            raise RuntimeError("the KV pool has moved: something holds a view of it across a step")

    def _run_prefill(self, step: PrefillStep, rows: list[Row]) -> StepResult:
        tokens = pick(len(step.token_ids), self.buckets.prefill_tokens)
        token_ids = np.zeros((1, tokens), np.int32)
        token_ids[0, : len(step.token_ids)] = step.token_ids
        self.pool, picked, logprobs = self._prefill(
            self._leaves,
            self.pool,
            token_ids,
            np.int32(step.start),
            np.int32(len(step.token_ids)),
            self._page_table(rows, 1),
            sampling_rows(rows, 1),
        )
        return _read(picked, logprobs, 1)

    def _run_decode(self, step: DecodeStep) -> StepResult:
        rows = pick(len(step.rows), self.buckets.decode_rows)
        token_ids, positions = np.zeros((rows, 1), np.int32), np.zeros((rows, 1), np.int32)
        token_ids[: len(step.rows), 0] = step.token_ids
        positions[: len(step.rows), 0] = step.positions
        self.pool, picked, logprobs = self._decode(
            self._leaves,
            self.pool,
            token_ids,
            positions,
            self._page_table(step.rows, rows),
            sampling_rows(step.rows, rows),
        )
        return _read(picked, logprobs, len(step.rows))

    def _page_table(self, rows: list[Row], padded_rows: int) -> np.ndarray:
        """int32 [padded_rows, width], 0 past each row's pages."""
        table = np.zeros((padded_rows, self.buckets.width), np.int32)
        for index, row in enumerate(rows):
            table[index, : len(row.pages)] = row.pages
        return table


class _Steps:
    """The traced functions. Arguments named as in `PagedBatch`; the pool is threaded through the layers."""

    def __init__(self, model: LoadedModel, dtype: jnp.dtype) -> None:
        self._model = model
        self._dtype = dtype

    def prefill(
        self,
        leaves: list[jax.Array],
        pool: jax.Array,
        token_ids: jax.Array,  # [1, T]
        start: jax.Array,
        count: jax.Array,
        page_table: jax.Array,  # [1, W]
        sampling: SamplingRows,
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """One chunk of one prompt; returns the pool, the token after it [1] and its logprob [1]."""
        offsets = jnp.arange(token_ids.shape[1], dtype=jnp.int32)[None]  # [1, T]
        batch = PagedBatch(page_table, start + offsets, offsets < count)
        module = self._model.merge(leaves)
        hidden, pool = module(token_ids, batch.positions, pool, self._attend(batch, attend_prefill))
        last = jnp.take(hidden, count - 1, axis=1)  # [1, hidden]
        with jax.named_scope("sample"):
            tokens, logprobs = sample(module.logits(last), sampling, (start + count)[None])
        return pool, tokens, logprobs

    def decode(
        self,
        leaves: list[jax.Array],
        pool: jax.Array,
        token_ids: jax.Array,  # [B, 1]
        positions: jax.Array,  # [B, 1]
        page_table: jax.Array,  # [B, W]
        sampling: SamplingRows,
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """One token of each row; returns the pool, the next tokens [B] and their logprobs [B]."""
        batch = PagedBatch(page_table, positions, jnp.ones_like(positions, bool))
        module = self._model.merge(leaves)
        hidden, pool = module(token_ids, positions, pool, self._attend(batch, attend_decode))
        with jax.named_scope("sample"):
            tokens, logprobs = sample(module.logits(hidden[:, 0]), sampling, positions[:, 0] + 1)
        return pool, tokens, logprobs

    def _attend(self, batch: PagedBatch, attend: Callable) -> Callable:
        def attend_layer(layer, q, k, v, pool):
            pool = write_pages(pool, layer, k, v, batch)
            return attend(q, pool, layer, batch, self._dtype), pool

        return attend_layer


# Computes on page 0 only.
_IDLE = Row(rid="", pages=[], sampling=SamplingParams(temperature=0.0), seed=0)


def _read(picked: jax.Array, logprobs: jax.Array, rows: int) -> StepResult:
    picked.copy_to_host_async()
    logprobs.copy_to_host_async()
    return StepResult(np.asarray(picked)[:rows].tolist(), np.asarray(logprobs)[:rows].tolist())

"""Runs step plans: pads them to buckets, feeds the compiled steps, owns the KV pool and the slots' tables.

Steps are `jax.jit` over the model's flat weights with the pool donated; `warm_up` compiles all of them at start.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from pdjax.cache.pool import create_pool, pool_addresses
from pdjax.cache.spec import StateSpec
from pdjax.engine import slots
from pdjax.engine.buckets import Buckets, pick
from pdjax.engine.plan import NO_SLOT, DecodeStep, History, PrefillStep, Row, StepPlan
from pdjax.engine.prompt_logprobs import PromptLogprobs
from pdjax.engine.request import Top
from pdjax.engine.rows import Packer
from pdjax.engine.sampling import Picked
from pdjax.engine.steps import Steps
from pdjax.layers.attention_backend import AUTO, AttentionBackend
from pdjax.layers.sharding import DATA_AXIS
from pdjax.models.checkpoint import LoadedModel
from pdjax.wire import SamplingParams

if TYPE_CHECKING:
    from pdjax.engine.orders import Order


class Journal(Protocol):
    """Hears what is done to the devices, in order: how the leader of several processes has them all do the same."""

    def ordered(self, order: Order) -> None:
        """This is about to be done."""
        ...

    def picked(self, token_ids: list[int]) -> None:
        """The tokens of the oldest step that was not read yet."""
        ...


@dataclass(frozen=True)
class StepResult:
    """Picked tokens, their log-probabilities and the best tokens in their places, one a row of the plan.

    `prompt_logprobs` and `prompt_top` are of a prefill step's targets, if it has any.
    """

    token_ids: list[int]
    logprobs: list[float]
    top: list[Top]
    prompt_logprobs: list[float]
    prompt_top: list[Top]


class RunningStep:
    """A step that the device was given. Its results are on their way to the host."""

    def __init__(
        self,
        step: StepPlan,
        places: list[int],  # of the step's rows in the batch
        picked: jax.Array,  # see `Picked.packed`
        prompt: PromptLogprobs | None,
        journal: Journal | None = None,
    ) -> None:
        self._journal = journal
        self._places = places
        self._rows = [step.row] if isinstance(step, PrefillStep) else step.rows
        self._targets = len(step.targets) if isinstance(step, PrefillStep) else 0
        self._picked = picked
        self._prompt = prompt
        wanted = [picked]
        if prompt is not None and self._targets:
            wanted += prompt
        if jax.default_backend() != "cpu":  # there it copies nothing, and takes 45 us an array
            for array in wanted:
                array.copy_to_host_async()

    def read(self) -> StepResult:
        """Wait for the results."""
        places = self._places
        tops = [row.top for row in self._rows]
        prompt, told = self._prompt, self._targets
        picked = Picked.unpacked(np.asarray(self._picked))
        tokens, logprobs = picked.tokens.tolist(), picked.logprobs.tolist()
        token_ids = [tokens[place] for place in places]
        if self._journal is not None:
            self._journal.picked(token_ids)
        return StepResult(
            token_ids=token_ids,
            logprobs=[logprobs[place] for place in places],
            top=_tops(picked.top_ids, picked.top_logprobs, places, tops),
            prompt_logprobs=[] if prompt is None or not told else np.asarray(prompt.logprobs)[:told].tolist(),
            prompt_top=[]
            if prompt is None or not told
            else _tops(prompt.top_ids, prompt.top_logprobs, list(range(told)), tops * told),
        )


class Runner:
    """One instance's device work. Not thread-safe: it belongs to the device thread.

    `pages` and the decode rows of `buckets` are those of each dp rank.
    """

    def __init__(
        self,
        model: LoadedModel,
        *,
        spec: StateSpec,
        pages: int,
        buckets: Buckets,
        mesh: Mesh,
        attention: AttentionBackend = AUTO,
    ) -> None:
        self.spec = spec
        self.buckets = buckets
        self.vocab = model.config.vocab_size
        self.dp = mesh.shape.get(DATA_AXIS, 1)
        self.pool = create_pool(spec, pages, mesh)
        self.compiles_after_warm_up = 0
        self.journal: Journal | None = None
        self._leaves = model.leaves
        self._addresses = pool_addresses(self.pool)
        self._first_rows, self._decode_rows = Packer(buckets.width), Packer(buckets.width)
        self._slots = self.dp * buckets.decode_rows[-1]
        pool, replicated = self.pool.sharding, NamedSharding(mesh, PartitionSpec())
        empty = jax.jit(slots.empty, static_argnums=(0, 1), out_shardings=replicated)
        self._progress, self._tables = empty(self._slots, self.vocab)
        steps = Steps(model, jnp.dtype(spec.dtype), attention, mesh)
        shardings = (pool, replicated, replicated)
        self._prefill = jax.jit(steps.prefill, donate_argnames="pool", out_shardings=shardings)
        self._first_token = jax.jit(steps.first_token, out_shardings=replicated)
        self._decode = jax.jit(steps.decode, donate_argnames=("pool", "progress"), out_shardings=shardings)
        self._write_slot = jax.jit(slots.write_slot, donate_argnums=(0, 1), out_shardings=replicated)
        self._write_masks = jax.jit(slots.write_masks, donate_argnums=0, out_shardings=replicated)

    def run(self, step: StepPlan) -> StepResult:
        """Run one step and wait for its results."""
        return self.dispatch(step).read()

    def dispatch(self, step: StepPlan) -> RunningStep:
        """Give a step to the device. Whatever is dispatched later finds its writes done: the pool goes through both."""
        self.announce(step)
        match step:
            case PrefillStep():
                self._write_slots([step.row])
                return self._dispatch_prefill(step)
            case DecodeStep():
                self._write_slots(step.rows)
                return self._dispatch_decode(step)

    def announce(self, order: Order) -> None:
        """Say what is about to be done to the devices, to whoever must do the same."""
        if self.journal is not None:
            self.journal.ordered(order)

    def warm_up(self, steps: Iterable[StepPlan], *, meet: Callable[[], None] = lambda: None) -> None:
        """Compile the programs of steps that write to page 0 only, and run them: on one process's CPU only the first of
        each kind, because a long prompt takes seconds there and a compiled program is ready without.

        Of several processes each calls `meet` when it has compiled all, which is to return when all have.
        """
        self._write_slot_row(NO_SLOT, History([0], []), _IDLE.sampling)
        self._write_slot_masks({})
        alone = jax.process_count() == 1
        running, ran, steps = None, set(), self._compiled(steps)
        if not alone:
            steps = list(steps)
            meet()
        for step in steps:
            if type(step) in ran and alone and jax.default_backend() == "cpu":
                continue
            ran.add(type(step))
            following = self.dispatch(step)  # while the one before runs
            if running is not None:
                running.read()
            running = following
        if running is not None:
            running.read()

    def _compiled(self, steps: Iterable[StepPlan]) -> Iterator[StepPlan]:
        """The same steps, each when its program is there: it is compiled, or read from the cache, while the next one's
        is traced."""
        waiting: tuple[StepPlan, Future[Any]] | None = None
        with ThreadPoolExecutor(1, "compile") as compiler:
            for step in steps:
                program, arguments, _ = self._call(step)
                compiling = step, compiler.submit(program.lower(*arguments).compile)
                if waiting is not None:
                    waiting[1].result()
                    yield waiting[0]
                waiting = compiling
            if waiting is not None:
                waiting[1].result()
                yield waiting[0]

    def prefill_warm_up(self) -> list[PrefillStep]:
        """A step for every prefill program."""
        return [PrefillStep(row=_IDLE, token_ids=[0] * tokens, start=0) for tokens in self.buckets.prefill_tokens]

    def decode_warm_up(self) -> list[DecodeStep]:
        """A step for every decode program."""
        return [
            DecodeStep(rows=[_IDLE] * rows, token_ids=[0] * rows, positions=[0] * rows)
            for rows in self.buckets.decode_rows  # all of dp rank 0, so that each has so many
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

    def _dispatch_prefill(self, step: PrefillStep) -> RunningStep:
        program, arguments, places = self._call(step)
        self.pool, logits, told = program(*arguments)
        rows = self._first_rows.pack([step.row], 1, places, token_ids=[0], positions=[step.end])
        picked = self._first_token(logits, self._progress, self._tables, rows)
        return RunningStep(step, places, picked, told, self.journal)

    def _dispatch_decode(self, step: DecodeStep) -> RunningStep:
        program, arguments, places = self._call(step)
        self.pool, self._progress, picked = program(*arguments)
        return RunningStep(step, places, picked, None, self.journal)

    def _call(self, step: StepPlan) -> tuple[Any, tuple[Any, ...], list[int]]:
        """The jitted function of a step, its arguments, padded to the step's bucket, and its rows' places in them."""
        count = len(step.token_ids)
        if isinstance(step, PrefillStep):
            tokens = pick(count, self.buckets.prefill_tokens)
            token_ids, targets = np.zeros((1, tokens), np.int32), np.zeros(tokens, np.int32)
            token_ids[0, :count] = step.token_ids
            targets[: len(step.targets)] = step.targets
            chunk = (token_ids, targets, np.int32(step.start), np.int32(count), np.int32(step.row.dp_rank))
            wants = np.bool_(bool(step.targets)), np.bool_(bool(step.row.top))
            table = np.zeros((1, self.buckets.width), np.int32)
            table[0, : len(step.row.pages)] = step.row.pages
            return self._prefill, (self._leaves, self.pool, *chunk, *wants, table), [0]
        rows, places = self._spread(step.rows)
        packed = self._decode_rows.pack(
            step.rows, rows, places, token_ids=step.token_ids, positions=step.positions
        )  # fmt: skip
        return self._decode, (self._leaves, self.pool, self._progress, self._tables, packed), places

    def _spread(self, rows: list[Row]) -> tuple[int, list[int]]:
        """Rows of a padded decode batch, equally many of each dp rank in turn, and which of them these take."""
        ranks = [row.dp_rank for row in rows]
        each = pick(max(ranks.count(rank) for rank in range(self.dp)), self.buckets.decode_rows)
        free = [rank * each for rank in range(self.dp)]
        places = []
        for rank in ranks:
            places.append(free[rank])
            free[rank] += 1
        return self.dp * each, places

    def _write_slots(self, rows: list[Row]) -> None:
        """Bring the slots up to date with what comes with the plan."""
        for row in rows:
            if row.history is not None:
                self._write_slot_row(row.slot, row.history, row.sampling)
        masks = {row.slot: row.mask for row in rows if row.mask}
        if masks:
            self._write_slot_masks(masks)

    def _write_slot_row(self, slot: int, history: History, sampling: SamplingParams) -> None:
        row = slots.slot_row(history, sampling, self.vocab)
        self._progress, self._tables = self._write_slot(self._progress, self._tables, np.int32(slot), row)

    def _write_slot_masks(self, masks: dict[int, bytes]) -> None:
        places, words = slots.mask_rows(masks, self._slots, self.vocab)
        self._tables = self._tables._replace(masks=self._write_masks(self._tables.masks, places, words))


# Computes on page 0 only.
_IDLE = Row(rid="", pages=[], sampling=SamplingParams(temperature=0.0), seed=0)


def _tops(
    ids: jax.Array | np.ndarray, logprobs: jax.Array | np.ndarray, places: list[int], counts: list[int]
) -> list[Top]:
    """The best tokens of the rows in `places`, as many as each asks for."""
    if not any(counts):
        return [[] for _ in counts]
    rows = zip(np.asarray(ids)[places].tolist(), np.asarray(logprobs)[places].tolist(), counts, strict=True)
    return [list(zip(ids[:count], values[:count], strict=True)) for ids, values, count in rows]

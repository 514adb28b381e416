"""An engine in this process, over a tiny random model: no HTTP, no MPI, stepped by hand or run in a thread."""

from __future__ import annotations

import queue
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax

from pdjax.cache.spec import StateSpec
from pdjax.engine.buckets import Buckets, make_buckets
from pdjax.engine.engine import Engine, Limits
from pdjax.engine.plan import DecodeStep, StepPlan
from pdjax.engine.runner import Runner
from pdjax.engine.scheduler import Scheduler
from pdjax.engine.unified import Unified
from pdjax.layers.sharding import instance_mesh
from pdjax.models.checkpoint import LoadedModel, load_model
from pdjax.models.random import tiny_config, write_random_model
from pdjax.wire import Abort, Failed, Flush, Flushed, Generate, SamplingParams, ToFrontend, Tokens, apart

PAGE = 4
POOL_PAGES = 257
EOS = 257


class TinyModel:
    """The model, and the runner that its engines share, with whatever an earlier one left in its pages.

    The pool has more pages than most engines are told of, so that all of them use the same compiled steps. `axes` are
    those of `instance_mesh`; the model is written if it is not there.
    """

    def __init__(
        self,
        folder: Path,
        *,
        max_context: int = 256,
        rows: int = 8,
        prefill_tokens: int = 16,
        devices: int = 1,
        **axes: int,
    ) -> None:
        self.folder = folder
        if not (folder / "tiny").exists():
            write_random_model(folder / "tiny", tiny_config(), seed=1)
        self.mesh = instance_mesh(jax.devices()[:devices], 4, **axes)
        self.model: LoadedModel = load_model(folder / "tiny", dtype="float32", mesh=self.mesh)
        self.spec = StateSpec(
            name="kv", layers=2, heads=4, head_dim=16, page_size=PAGE * axes.get("cp", 1), dtype="float32"
        )
        self.rows, self.max_context, self.prefill_tokens = rows, max_context, prefill_tokens
        buckets = make_buckets(
            max_context=max_context,
            page_size=self.spec.page_size,
            parts=axes.get("cp", 1),
            prefill_tokens=prefill_tokens,
            max_running_requests=rows,
            min_decode_rows=rows,
        )
        rows_of_rank = -(-rows // axes.get("dp", 1))
        self.buckets = Buckets(prefill_tokens=(prefill_tokens,), decode_rows=(rows_of_rank,), width=buckets.width)
        self.runner = Runner(self.model, spec=self.spec, pages=POOL_PAGES, buckets=self.buckets, mesh=self.mesh)


class SmallEngine:
    """An `Engine` in the unified role with its inbox and all that it has emitted."""

    def __init__(
        self,
        tiny: TinyModel,
        *,
        pages: int = POOL_PAGES,
        host_pages: int = 0,
        queued: int = 10_000,
        check: bool = True,
        **more: Any,
    ) -> None:
        self.inbox: queue.SimpleQueue[object] = queue.SimpleQueue()
        self.emitted: list[ToFrontend] = []
        self._check = check
        self.engine = Engine(
            inbox=self.inbox,
            runner=tiny.runner,
            scheduler=Scheduler(prefill_tokens=tiny.prefill_tokens, eos_token_ids=(EOS,)),
            pages=pages,
            limits=Limits(tiny.max_context, tiny.rows, queued, host_pages),
            eos_token_ids=(EOS,),
            emit=lambda *messages: self.emitted.extend(apart(messages)),
            make_role=Unified,
            **more,
        )
        self.role: Unified = self.engine.role  # type: ignore[assignment]
        self._next_step = self.engine.scheduler.next_step
        self.engine.scheduler.next_step = self._checked_step  # type: ignore[method-assign]

    def send(self, rid: str, ids: Sequence[int], tokens: int = 8, **more: Any) -> None:
        """Put a greedy request that ignores the end of sequence; takes SamplingParams' and Generate's fields too."""
        sampling = {name: more.pop(name) for name in list(more) if name in SamplingParams.__struct_fields__}
        options: dict[str, Any] = {"temperature": 0.0, "max_new_tokens": tokens, "ignore_eos": True} | sampling
        self.inbox.put(Generate(rid, list(ids), SamplingParams(**options), **more))

    def abort(self, rid: str) -> None:
        self.inbox.put(Abort(rid, "the client left"))

    def turn(self) -> bool:
        """One turn of the engine's loop. Returns whether a step was run."""
        assert self.engine._take_messages() is None
        self.engine.role.poll(self.engine.clock())
        stepped = self.engine.step()
        if self._check:
            self.engine.check_integrity()
        return stepped

    def run(self, turns: int = 20_000) -> None:
        """Turn until nothing is live."""
        for _ in range(turns):
            if not self.turn() and not self.engine.requests and self.inbox.empty():
                self.engine.check_integrity()
                return
        raise AssertionError(f"requests do not end: {sorted(self.engine.requests)}; {self.engine.stats()}")

    def _checked_step(self) -> StepPlan | None:
        """Every position that a step writes has a page; without one it would go to page 0, and be lost in silence."""
        step = self._next_step()
        if isinstance(step, DecodeStep):
            for row, position in zip(step.rows, step.positions, strict=True):
                assert position < len(row.pages) * self.engine.spec.page_size, f"{row.rid} decodes past its pages"
        elif step is not None:
            assert step.end <= len(step.row.pages) * self.engine.spec.page_size
        return step

    def flush_soon(self) -> None:
        self.inbox.put(Flush(7))

    def flush(self) -> Flushed:
        self.flush_soon()
        self.turn()
        return next(message for message in reversed(self.emitted) if isinstance(message, Flushed))

    def ids(self, rid: str) -> list[int]:
        """The output tokens of a request so far."""
        frames = [message for message in self.emitted if isinstance(message, Tokens) and message.rid == rid]
        return [token for frame in frames for token in frame.token_ids]

    def frames(self, rid: str) -> list[Tokens]:
        return [message for message in self.emitted if isinstance(message, Tokens) and message.rid == rid]

    def ends(self) -> dict[str, Tokens | Failed]:
        """The last frame of every request that has ended; each ends once."""
        ends: dict[str, Tokens | Failed] = {}
        for message in self.emitted:
            if isinstance(message, Failed) or (isinstance(message, Tokens) and message.finish_reason is not None):
                assert message.rid not in ends, f"{message.rid} ended twice"
                ends[message.rid] = message
        return ends

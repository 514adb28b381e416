"""The part of an instance that every role has: mesh, model, pool, compiled steps and limits."""

from __future__ import annotations

import queue
import socket
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
from jax.sharding import AxisType, Mesh

from pdjax.cache.allocator import PageAllocator
from pdjax.cache.spec import StateSpec
from pdjax.config import Config
from pdjax.engine.buckets import make_buckets
from pdjax.engine.engine import Engine, Limits
from pdjax.engine.grammar import Grammars
from pdjax.engine.plan import StepPlan
from pdjax.engine.roles import Role
from pdjax.engine.runner import Runner
from pdjax.engine.scheduler import Scheduler
from pdjax.kernels import native
from pdjax.launch.cache_folder import cache_root
from pdjax.models.checkpoint import load_model, model_identity
from pdjax.wire import ToFrontend


@dataclass(frozen=True)
class Core:
    """A loaded model with its pool, not yet warm."""

    runner: Runner
    mesh: Mesh
    spec: StateSpec
    limits: Limits
    pages: int
    slot_pages: int  # pages of one prefill step, and so of one staging slot
    eos_token_ids: tuple[int, ...]
    identity: str
    info: dict[str, Any]  # what /server_info shows

    @property
    def prefill_tokens(self) -> int:
        """The most prompt tokens of one step: whole pages."""
        return self.slot_pages * self.spec.page_size

    def warm_up_steps(self, role: str) -> list[StepPlan]:
        """The steps that this role can be asked for."""
        prefill = [] if role == "decode" else self.runner.prefill_warm_up()
        decode = [] if role == "prefill" else self.runner.decode_warm_up()
        return [*prefill, *decode]


def keep_compiled_programs() -> None:
    """Have JAX keep all compiled programs in the cache folder, so that the next start finds them."""
    jax.config.update("jax_compilation_cache_dir", str(cache_root() / "compiled"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


def start_jax() -> None:
    """Configure JAX and make this job a `jax.distributed` one of its own.

    Compiled programs are kept, and the native CPU kernels. The preemption service is off, because it swallows SIGTERM.
    """
    jax.config.update("jax_enable_preemption_service", False)
    keep_compiled_programs()
    with socket.create_server(("127.0.0.1", 0)) as probe:
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    jax.distributed.initialize(
        address, num_processes=1, process_id=0, coordinator_bind_address=address, heartbeat_timeout_seconds=10
    )
    native.load(cache_root() / "native")


def make_engine(
    role: str,
    config: Config,
    core: Core,
    *,
    inbox: queue.SimpleQueue[object],
    emit: Callable[[ToFrontend], None],
    make_role: Callable[[Engine], Role],
) -> Engine:
    """The engine over a core, for whoever feeds its inbox and takes what it emits."""
    return Engine(
        inbox=inbox,
        runner=core.runner,
        scheduler=Scheduler(prefill_tokens=core.prefill_tokens, eos_token_ids=core.eos_token_ids),
        allocator=PageAllocator(core.pages),
        limits=core.limits,
        eos_token_ids=core.eos_token_ids,
        emit=emit,
        make_role=make_role,
        # A decode instance is sent whole prompts, and asks for no less.
        prefix_cache=config.cache.prefix and role != "decode",
        grammars=Grammars(
            Path(core.info["model_path"]) / "tokenizer.json",
            vocab=core.runner.vocab,
            eos_token_ids=core.eos_token_ids,
            post=inbox.put,
        ),
        # A prefill instance waits for each step anyway: it sends the step's pages before it goes on.
        overlap=config.engine.overlap and role != "prefill",
    )


def load_core(role: str, config: Config, folder: Path) -> Core:
    """Load the model of a folder and make its pool."""
    tp = config.instance.tp
    mesh = jax.make_mesh((tp,), ("tp",), axis_types=(AxisType.Auto,), devices=jax.devices()[:tp])
    model = load_model(folder, dtype=config.model.dtype, mesh=mesh)
    spec = StateSpec(
        name="kv",
        layers=model.config.num_layers,
        heads=model.config.num_kv_heads,
        head_dim=model.config.head_dim,
        page_size=config.cache.page_size,
        dtype=config.model.dtype,
    )
    limits = Limits(
        max_context=min(config.engine.max_context, model.config.max_position_embeddings),
        max_running_requests=config.engine.max_running_requests,
        max_queued_requests=config.engine.max_queued_requests,
    )
    pages = config.cache.pages or 1 + limits.max_running_requests * spec.pages(-(-limits.max_context // 4))
    slot_pages = spec.pages(min(config.engine.prefill_tokens, limits.max_context))
    buckets = make_buckets(
        max_context=limits.max_context,
        page_size=spec.page_size,
        prefill_tokens=slot_pages * spec.page_size,
        max_running_requests=limits.max_running_requests,
        # One bfloat16 row takes a scalar path on CPU, 8 times slower than two rows.
        min_decode_rows=2 if spec.word_bytes == 2 else 1,
    )
    info = {
        "engine_type": role,
        "disaggregation_mode": "null" if role == "unified" else role,
        "model_path": str(folder),
        "served_model_name": config.model.served_name or folder.name,
        "model_type": model.config.model_type,
        "vocab_size": model.config.vocab_size,
        "max_context": limits.max_context,
        "page_size": spec.page_size,
        "max_running_requests": limits.max_running_requests,
        "max_total_tokens": (pages - 1) * spec.page_size,
        "dtype": spec.dtype,
        "tp_size": tp,
        "dp_size": 1,
    }
    return Core(
        runner=Runner(model, spec=spec, pages=pages, buckets=buckets, mesh=mesh),
        mesh=mesh,
        spec=spec,
        limits=limits,
        pages=pages,
        slot_pages=slot_pages,
        eos_token_ids=model.config.eos_token_ids,
        identity=model_identity(folder),
        info=info,
    )

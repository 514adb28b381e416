"""The part of an instance that every role has: mesh, model, pool, compiled steps and limits."""

from __future__ import annotations

import gc
import queue
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax._src import distributed
from jax.sharding import Mesh

from pdjax.cache.spec import StateSpec
from pdjax.config import Config, ConfigError, Instance
from pdjax.engine.buckets import Buckets, make_buckets
from pdjax.engine.engine import Emit, Engine, Limits
from pdjax.engine.grammar import Grammars
from pdjax.engine.plan import StepPlan
from pdjax.engine.roles import Role
from pdjax.engine.runner import Runner
from pdjax.engine.scheduler import Scheduler
from pdjax.kernels import native
from pdjax.launch.cache_folder import cache_root
from pdjax.launch.devices import emulated_devices, layout_of, make_mesh
from pdjax.layers.attention_backend import attention_backend
from pdjax.models.checkpoint import LoadedModel, load_model, model_identity
from pdjax.models.folder import read_config
from pdjax.net.world import World
from pdjax.transfer.layout import Layout
from pdjax.transfer.staging import Device

COMPILE_SECONDS = 900.0  # by which one process may have compiled its steps later than another


@dataclass(frozen=True)
class Core:
    """A loaded model with its pool, not yet warm."""

    runner: Runner
    mesh: Mesh
    layout: Layout  # its places are the mesh's devices, in order
    spec: StateSpec
    limits: Limits
    pages: int
    prefill_tokens: int  # the most prompt tokens of one step: whole pages
    eos_token_ids: tuple[int, ...]
    identity: str
    info: dict[str, Any]  # what /server_info shows

    @property
    def local_devices(self) -> dict[int, Device]:
        """This process's devices, by the numbers of their places in the layout."""
        here = jax.process_index()
        return {rank: device for rank, device in enumerate(self.mesh.devices.flat) if device.process_index == here}

    @property
    def chunk_pages(self) -> int:
        """Pages of one prefill step as transfers count them, and so of the largest chunk."""
        return self.layout.state(self.spec).pages(self.prefill_tokens)

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


def start_jax(world: World, instance: Instance) -> None:
    """Configure JAX and make the processes of this instance, if it has several, a `jax.distributed` job of their own.

    Compiled programs are kept, and the native CPU kernels. The preemption service is off, because it swallows SIGTERM.
    A process by itself stays out of `jax.distributed`, which would have its CPU devices talk over TCP: a decode step of
    a tiny model over four of them took 45 ms then, and takes 3.
    """
    jax.config.update("jax_enable_preemption_service", False)
    keep_compiled_programs()
    devices = None
    if instance.platform == "cpu":
        emulated = emulated_devices(instance, world.size)
        if emulated:
            jax.config.update("jax_num_cpu_devices", emulated)
    elif world.local_size > 1:
        count = max(1, instance.devices_per_process)
        devices = list(range(world.local_rank * count, (world.local_rank + 1) * count))
    if world.size > 1:
        jax.distributed.initialize(
            world.coordinator,
            num_processes=world.size,
            process_id=world.rank,
            local_device_ids=devices,
            coordinator_bind_address=world.coordinator if world.rank == 0 else None,
            # Half of it is the soonest that JAX ends this process without a word over another whose host has vanished:
            # later than the leader knows of it and has told those who wait.
            heartbeat_timeout_seconds=20,
        )
    native.load(cache_root() / "native")


def meet(point: str) -> None:
    """Return when every process of this instance has come to `point`.

    At "compiled", because Gloo waits 30 s for all that take part in a group's first collective, and compiling may keep
    one of them longer on a busy machine. At "warm", because what serves must be there whole.

    Raises:
        jax.errors.JaxRuntimeError: some have not come in time; it names them.
    """
    client = distributed.global_state.client  # JAX shows it by no public name
    if client is not None:
        client.wait_at_barrier(f"pdjax {point}", timeout_in_ms=int(COMPILE_SECONDS * 1000))


def freeze_heap() -> None:
    """What has been made until now stays, and no collection needs to look at it: a full one would hold up all steps for
    0.2 s, most of it for what JAX keeps of programs."""
    gc.collect()
    gc.freeze()


def make_engine(
    role: str,
    config: Config,
    core: Core,
    *,
    inbox: queue.SimpleQueue[object],
    emit: Emit,
    make_role: Callable[[Engine], Role],
) -> Engine:
    """The engine over a core, for whoever feeds its inbox and takes what it emits."""
    return Engine(
        inbox=inbox,
        runner=core.runner,
        scheduler=Scheduler(prefill_tokens=core.prefill_tokens, eos_token_ids=core.eos_token_ids),
        pages=core.pages,
        limits=core.limits,
        eos_token_ids=core.eos_token_ids,
        emit=emit,
        make_role=make_role,
        prefix_cache=config.cache.prefix,
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
    mesh = make_mesh(config.instance, read_config(folder).num_kv_heads)
    layout = layout_of(mesh)
    dp, cp = layout.dp, layout.cp
    model = load_model(folder, dtype=config.model.dtype, mesh=mesh)
    spec = StateSpec(
        name="kv",
        layers=model.config.num_layers,
        heads=model.config.num_kv_heads,
        head_dim=model.config.head_dim,
        page_size=config.cache.page_size * cp,  # parts have a page of each of these, so that requests need one table
        dtype=config.model.dtype,
    )
    limits = Limits(
        max_context=min(config.engine.max_context, model.config.max_position_embeddings),
        max_running_requests=config.engine.max_running_requests,
        max_queued_requests=config.engine.max_queued_requests,
        host_pages=config.cache.host_pages,
        reserved_decode_tokens=config.disagg.num_reserved_decode_tokens,
    )
    rows = -(-limits.max_running_requests // dp)
    pages = config.cache.pages or 1 + rows * spec.pages(-(-limits.max_context // 4))
    prefill_tokens = spec.page_size * spec.pages(min(config.engine.prefill_tokens, limits.max_context))
    buckets = make_buckets(
        max_context=limits.max_context,
        page_size=spec.page_size,
        prefill_tokens=prefill_tokens,
        max_running_requests=rows,
        parts=cp,
        # One bfloat16 row takes a scalar path of XLA's on CPU, 8 times slower than two rows. To the native kernels 8
        # rows cost what one does, and each bucket less is a second of start-up.
        min_decode_rows=8 if native.multiplies(jnp.dtype(spec.dtype)) else 2 if spec.word_bytes == 2 else 1,
    )
    info = {
        "engine_type": role,
        "disaggregation_mode": "null" if role == "unified" else role,
        "model_path": str(folder),
        "served_model_name": config.model.served_name or folder.name,
        "model_type": model.config.model_type,
        "vocab_size": model.config.vocab_size,
        "max_context": limits.max_context,
        "page_size": config.cache.page_size,
        "max_running_requests": limits.max_running_requests,
        "max_total_tokens": dp * (pages - 1) * spec.page_size,
        "dtype": spec.dtype,
        "tp_size": layout.tp,
        "processes": jax.process_count(),
        "dp_size": dp,
        "cp_size": cp,
        "pp_size": layout.pp,
    }
    return Core(
        runner=_runner(model, config, spec=spec, pages=pages, buckets=buckets, mesh=mesh),
        mesh=mesh,
        layout=layout,
        spec=spec,
        limits=limits,
        pages=pages,
        prefill_tokens=prefill_tokens,
        eos_token_ids=model.config.eos_token_ids,
        identity=model_identity(folder),
        info=info,
    )


def _runner(model: LoadedModel, config: Config, *, spec: StateSpec, pages: int, buckets: Buckets, mesh: Mesh) -> Runner:
    try:
        attention = attention_backend(config.engine.attention_backend, head_dim=spec.head_dim, devices=mesh.size)
    except ValueError as error:
        raise ConfigError(f"Engine.{error}") from error
    return Runner(model, spec=spec, pages=pages, buckets=buckets, mesh=mesh, attention=attention)

"""One instance: core, role, frontend and data plane, put together and run until told to stop."""

from __future__ import annotations

import os
import queue
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from tqdm import tqdm

from pdjax.config import Config, ConfigError
from pdjax.engine.frontend import Frontend, FrontendError
from pdjax.launch import mpiexec
from pdjax.launch.fetch import fetch
from pdjax.launch.join import GRACE_SECONDS, SLOWEST_START_SECONDS, join, say
from pdjax.models.errors import ModelError
from pdjax.net import mpi
from pdjax.net.world import WorldError
from pdjax.transfer.backend import TransferError
from pdjax.wire import Failed

if TYPE_CHECKING:
    from pdjax.launch.leading import Leading


S = TypeVar("S")


class StartError(Exception):
    """An instance that cannot start; the sentence says why and what to do."""


def run(role: str, config: Config) -> int:
    """Serve as `role` (unified, prefill or decode) until SIGTERM, SIGINT or the end of a part.

    This is the leader's part, but for the processes of an instance that are its workers.

    Returns:
        The exit code: 0 if it was asked to stop.

    Raises:
        StartError: it cannot start.
    """
    _prepare_environment(config)
    folder = model_folder(config.model.folder)
    if mpiexec.rank() > 0:
        from pdjax.launch import worker

        return worker.run(role, config, folder)
    inbox: queue.SimpleQueue[object] = queue.SimpleQueue()
    from pdjax.engine.engine import Stop  # after the environment is set: it imports JAX

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: inbox.put(Stop()))
    # The frontend starts before MPI does: MPI does not like to be forked.
    frontend = Frontend(
        _frontend_arguments(config, folder),
        on_message=inbox.put,
        on_end=lambda reason: inbox.put(Stop(reason)),
    )
    try:
        stop = _serve(role, config, folder, inbox, frontend)
    finally:
        frontend.stop()
    if stop.problem is not None:
        say(role, f"stopped: {stop.problem}")
    return 0 if stop.problem is None else 1


def model_folder(name: str) -> Path:
    """A folder as it is; else the name of a model that `fetch` knows.

    Raises:
        StartError: neither.
    """
    folder = Path(name).expanduser()
    if folder.is_dir():
        return folder.resolve()
    try:
        return fetch(name)
    except (KeyError, ValueError) as error:
        raise StartError(f"Model.folder: {name!r} is neither a folder nor a model to fetch: {error}") from error


def _serve(role: str, config: Config, folder: Path, inbox: queue.SimpleQueue[object], frontend: Frontend) -> Any:
    started = time.monotonic()
    world = join(config, folder)
    problem = mpi.check_interfaces()
    if problem is not None and role != "unified":
        raise StartError(problem)
    import jax

    from pdjax.engine.engine import Stop
    from pdjax.engine.unified import Unified
    from pdjax.launch.core import freeze_heap, load_core, make_engine, meet, start_jax
    from pdjax.launch.leading import Leading

    leading = None
    open_requests: Callable[[], list[str]] = list
    if world.crew is not None:
        leading = Leading(
            world.crew,
            post=inbox.put,
            stop=lambda problem: inbox.put(Stop(problem)),
            say=lambda text: say(role, text),
            bury=lambda problem: _bury(role, problem, open_requests(), frontend),
        )
    start_jax(world, config.instance)
    core = load_core(role, config, folder)
    say(role, f"model loaded after {time.monotonic() - started:.1f} s")
    frontend.check()
    pair = None
    if role != "unified":
        from pdjax.launch.pair import make_pair, make_part

        part = make_part(role, config, core, inbox.put)
        pair = make_pair(
            role, config, core, part, descriptions=_descriptions(part.backend.describe(), leading), post=inbox.put
        )
    engine = make_engine(
        role, config, core, inbox=inbox, emit=frontend.send, make_role=Unified if pair is None else pair.make_role
    )
    open_requests = lambda: list(engine.requests)  # noqa: E731
    info = dict(core.info)
    if config.engine.warmup:
        steps = core.warm_up_steps(role)
        bar = tqdm(steps, desc=f"pdjax {role}: compiling", unit="step", file=sys.stderr)
        core.runner.warm_up(_while_served(bar, frontend), meet=lambda: meet("compiled"))
        if pair is not None:
            pair.part.warm_up()
    meet("warm")
    if pair is not None and role == "prefill":
        info["disaggregation_bootstrap_host"] = config.disagg.bootstrap_host
        info["disaggregation_bootstrap_port"] = pair.network.listen(
            config.disagg.bootstrap_host, config.disagg.bootstrap_port
        )
    core.runner.expect_no_compile()
    freeze_heap()
    if leading is not None:
        leading.begin(core.runner)
    frontend.ready(info)
    say(role, f"ready after {time.monotonic() - started:.1f} s")
    try:
        with jax.thread_guard(True):
            stop = engine.run()
    except Exception:
        # A program in which a worker has died fails here too, and names nobody.
        stop = Stop(leading.why()) if leading is not None else Stop()
        if stop.problem is None:
            raise
    for request in list(engine.requests.values()):
        engine.fail(request, 503, _stopping(role, stop.problem))
    if leading is not None and stop.problem is None:
        leading.end()
    if pair is not None:
        pair.close()
    return stop


def _while_served(steps: Iterable[S], frontend: Frontend) -> Iterator[S]:
    """The steps, as long as there is a frontend: without one it is no use to compile on."""
    for step in steps:
        frontend.check()
        yield step


def _stopping(role: str, problem: str | None) -> str:
    return f"this {role} instance is stopping" + ("" if problem is None else f": {problem}")


def _bury(role: str, problem: str, open_requests: list[str], frontend: Frontend) -> None:
    """What the device thread would do if it were not stuck."""
    for rid in open_requests:
        frontend.send(Failed(rid, 503, _stopping(role, problem)))
    frontend.stop(GRACE_SECONDS / 2)


def _descriptions(own: bytes, leading: Leading | None) -> list[bytes]:
    """How the memory of each process of this instance is reached."""
    if leading is None:
        return [own]
    found = leading.descriptions(own, SLOWEST_START_SECONDS)
    if found is None:
        raise StartError(f"a worker has made no staging memory in {SLOWEST_START_SECONDS:g} s")
    return found


def _prepare_environment(config: Config) -> None:
    """What has to stand before JAX is imported."""
    if config.instance.platform:
        os.environ["JAX_PLATFORMS"] = config.instance.platform
    # A transfer thread that returns from a C call waits this long for the interpreter at most.
    sys.setswitchinterval(1e-4)


def _frontend_arguments(config: Config, folder: Path) -> list[str]:
    return [
        "--host",
        config.server.host,
        "--port",
        str(config.server.port),
        "--model-folder",
        str(folder),
        "--served-model-name",
        config.model.served_name or folder.name,
    ]


def run_and_exit(role: str, config: Config) -> int:
    """`run`, for the command line: errors in words, and an end that MPI cannot hold up."""
    try:
        code = run(role, config)
    except (
        StartError, ConfigError, FrontendError, WorldError, TransferError, ModelError, mpi.MPIError, OSError
    ) as error:  # fmt: skip
        say(role, str(error))
        code = 2
    except Exception:  # noqa: BLE001 - whatever it was, MPI must not hold up the end
        traceback.print_exc()
        code = 1
    mpi.shutdown(code)
    return code

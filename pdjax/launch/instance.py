"""One instance: core, role, frontend and data plane, put together and run until told to stop."""

from __future__ import annotations

import os
import queue
import signal
import sys
import time
import traceback
from pathlib import Path
from typing import Any

from tqdm import tqdm

from pdjax.config import Config
from pdjax.engine.frontend import Frontend
from pdjax.launch.fetch import fetch
from pdjax.models.errors import ModelError
from pdjax.net import mpi
from pdjax.transfer.backend import TransferError


class StartError(Exception):
    """An instance that cannot start; the sentence says why and what to do."""


def run(role: str, config: Config) -> int:
    """Serve as `role` (unified, prefill or decode) until SIGTERM, SIGINT or the end of a part.

    Returns:
        The exit code: 0 if it was asked to stop.

    Raises:
        StartError: it cannot start.
    """
    _check(role, config)
    _prepare_environment(config)
    folder = model_folder(config.model.folder)
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


def say(role: str, text: str) -> None:
    """One line for whoever watches the instance."""
    print(f"pdjax {role}: {text}", file=sys.stderr, flush=True)


def _serve(role: str, config: Config, folder: Path, inbox: queue.SimpleQueue[object], frontend: Frontend) -> Any:
    started = time.monotonic()
    mpi.load(config.transfer.ucx_library or None)
    problem = mpi.check_interfaces()
    if problem is not None and role != "unified":
        raise StartError(problem)
    import jax

    from pdjax.engine.unified import Unified
    from pdjax.launch.core import load_core, make_engine, start_jax

    start_jax()
    core = load_core(role, config, folder)
    say(role, f"model loaded after {time.monotonic() - started:.1f} s")
    pair = None
    if role != "unified":
        from pdjax.launch.pair import make_pair

        pair = make_pair(role, config, core, inbox.put)
    engine = make_engine(
        role, config, core, inbox=inbox, emit=frontend.send, make_role=Unified if pair is None else pair.make_role
    )
    info = dict(core.info)
    if config.engine.warmup:
        steps = core.warm_up_steps(role)
        core.runner.warm_up(tqdm(steps, desc=f"pdjax {role}: compiling", unit="step", file=sys.stderr))
        if pair is not None:
            pair.warm_up(engine)
    if pair is not None and role == "prefill":
        info["disaggregation_bootstrap_host"] = config.disagg.bootstrap_host
        info["disaggregation_bootstrap_port"] = pair.network.listen(
            config.disagg.bootstrap_host, config.disagg.bootstrap_port
        )
    core.runner.expect_no_compile()
    frontend.ready(info)
    say(role, f"ready after {time.monotonic() - started:.1f} s")
    with jax.thread_guard(True):
        stop = engine.run()
    for request in list(engine.requests.values()):
        engine.fail(request, 503, f"this {role} instance is stopping")
    if pair is not None:
        pair.close()
    return stop


def _check(role: str, config: Config) -> None:
    if config.instance.processes > 1:
        raise StartError("Instance.processes: instances of several processes are not served yet; set it to 1")
    if role != "unified" and config.instance.tp > 1:
        raise StartError(f"Instance.tp: a {role} instance of several devices is not served yet; set it to 1")


def _prepare_environment(config: Config) -> None:
    """What has to stand before JAX is imported."""
    if config.instance.platform:
        os.environ["JAX_PLATFORMS"] = config.instance.platform
    devices = max(config.instance.devices_per_process, config.instance.tp)
    if devices > 1 and config.instance.platform == "cpu":
        flags = os.environ.get("XLA_FLAGS", "")
        os.environ["XLA_FLAGS"] = f"{flags} --xla_force_host_platform_device_count={devices}".strip()
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
    except (StartError, TransferError, ModelError, mpi.MPIError, OSError) as error:
        say(role, str(error))
        code = 2
    except Exception:  # noqa: BLE001 - whatever it was, MPI must not hold up the end
        traceback.print_exc()
        code = 1
    mpi.shutdown(code)
    return code

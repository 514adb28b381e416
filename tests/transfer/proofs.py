"""A process that asks UCX whether it moves a device's memory, with the host's memory in the place of a GPU's.

Prints what `problem_with_device_memory` says, as JSON: of this machine's UCX, and of one that does, that takes the
memory for the host's, that moves something else, and that moves nothing.
"""

from __future__ import annotations

import json
from contextlib import ExitStack
from unittest import mock

import jax

from pdjax.net import mpi
from pdjax.transfer import device_proof
from pdjax.transfer.backend import BackendOptions
from pdjax.transfer.ucx import backend, binding
from pdjax.transfer.ucx.worker import UcxWorker

put = UcxWorker.put


def put_shifted(worker, endpoint, source, offset, nbytes, remote, rkey) -> int:
    return put(worker, endpoint, source, offset, nbytes - 4, remote + 4, rkey)


def ask(*patches) -> str | None:
    with ExitStack() as stack:
        for patch in patches:
            stack.enter_context(patch)
        return device_proof.problem_with_device_memory(
            jax.devices()[0], lambda on_event: backend.create(on_event, BackendOptions(gpu=0))
        )


has_cuda = mock.patch.object(backend, "has_cuda", lambda _: True)
has_context = mock.patch.object(backend.cuda, "make_current", lambda _: None)
finds = mock.patch.object(binding, "HOST_MEMORY", -1)
shifted = mock.patch.object(UcxWorker, "put", put_shifted)
nothing = mock.patch.object(UcxWorker, "notify", lambda *_: 0)
hurried = mock.patch.object(device_proof, "_BOUND", 0.5)
print(
    json.dumps(
        {
            "this machine's": ask(),
            "without a driver": ask(has_cuda),
            "moves": ask(has_cuda, has_context, finds),
            "takes for the host's": ask(has_cuda, has_context),
            "moves something else": ask(has_cuda, has_context, finds, shifted),
            "moves nothing": ask(has_cuda, has_context, finds, nothing, hurried),
        }
    ),
    flush=True,
)
mpi.shutdown(0)

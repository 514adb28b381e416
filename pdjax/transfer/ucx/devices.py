"""What UCX sees of this machine, and which of it the backend uses."""

from __future__ import annotations

import ctypes
import difflib
import re
from dataclasses import dataclass

from pdjax.transfer.backend import TransferError
from pdjax.transfer.ucx import binding
from pdjax.transfer.ucx.binding import Ucp, ffi
from pdjax.transfer.ucx.worker import library_path

_RESOURCE = re.compile(r"resource \d+ .*-- (\S+)/(\S+)")
# Gives memory that a peer can map. Not cma: where memory cannot be mapped (another container, another user), cma is
# usually forbidden too, which UCX finds out with the first bytes.
_SHARED_MEMORY = "posix"
_NETWORKS = re.compile(r"(tcp|rc_\w+|dc_\w+|ud_\w+|srd|efa|gga_\w+)")
_CUDA = re.compile(r"cuda_\w+|gdr_copy")


@dataclass(frozen=True)
class Resource:
    """A transport over a device, as UCX names them: ``tcp`` over ``eth0``, ``rc_mlx5`` over ``mlx5_0:1``."""

    transport: str
    device: str


def seen(ucp: Ucp) -> list[Resource]:
    """Every transport that UCX could use on this machine. Raises `TransferError`."""
    config = ffi.new("handle_t *")
    ucp.check(ucp.lib.ucp_config_read(ffi.NULL, ffi.NULL, config), "read its configuration")
    for name in ("TLS", "NET_DEVICES"):
        ucp.check(ucp.lib.ucp_config_modify(config[0], name.encode(), b"all"), f"set {name}")
    parameters = ffi.new("ucp_params_t *")
    parameters.field_mask = binding.CONTEXT_FIELDS
    parameters.features = binding.FEATURE_RMA | binding.FEATURE_AM
    context = ffi.new("handle_t *")
    status = ucp.lib.ucp_init_version(*ucp.api, parameters, config[0], context)
    ucp.lib.ucp_config_release(config[0])
    ucp.check(status, "look for its transports")
    text = _described(ucp, context[0])
    ucp.lib.ucp_cleanup(context[0])
    return [Resource(*found.groups()) for found in _RESOURCE.finditer(text)]


def networks(resources: list[Resource]) -> dict[str, list[str]]:
    """Network devices with their transports."""
    found: dict[str, list[str]] = {}
    for resource in resources:
        if _NETWORKS.fullmatch(resource.transport):
            found.setdefault(resource.device, []).append(resource.transport)
    return found


def problem_with_gpus(resources: list[Resource], devices: list[str], *, over_tcp: bool) -> str | None:
    """Why NVIDIA GPUs' memory is not to be moved by this UCX, or None.

    Over tcp it goes in pieces through buffers of UCX's own, many times slower than by a copy in the host's memory.
    """
    if not any(_CUDA.fullmatch(resource.transport) for resource in resources):
        return "this UCX has no cuda transports"
    if set(_kinds(resources, devices)) <= {"tcp"} and not over_tcp:
        return "no network here reaches a GPU's memory (Transfer.device_memory = 'always' is for peers on this host)"
    return None


def choose(wanted: tuple[str, ...], resources: list[Resource]) -> list[str]:
    """UCX's names of the wanted devices; a name without a port means all its ports.

    Raises:
        TransferError: there is no such device; the sentence lists those that are there.
    """
    found = networks(resources)
    chosen = []
    for name in wanted:
        ports = [device for device in found if device == name or device.partition(":")[0] == name]
        if not ports:
            close = difflib.get_close_matches(name, found, n=1)
            hint = f"; did you mean {close[0]!r}?" if close else ""
            listed = ", ".join(f"{device} ({'+'.join(kinds)})" for device, kinds in found.items()) or "none"
            raise TransferError(f"UCX sees no network device {name!r}{hint or '.'} It sees: {listed}")
        chosen += ports
    return list(dict.fromkeys(chosen))


def check(wanted: tuple[str, ...]) -> None:
    """For backends that take a wrong name in silence: raise `TransferError` unless UCX sees every wanted device."""
    if wanted:
        choose(wanted, seen(binding.load(library_path(None))))


def transports(resources: list[Resource], devices: list[str], *, gpu: bool) -> str:
    """What to use of it: shared memory on one host, every network transport of the devices, or of all, and those of
    GPUs if their memory is to be moved."""
    there = {resource.transport for resource in resources}
    shared = [_SHARED_MEMORY] if _SHARED_MEMORY in there else []
    cuda = sorted(kind for kind in there if gpu and _CUDA.fullmatch(kind))
    return ",".join([*shared, *_kinds(resources, devices), *cuda])


def _kinds(resources: list[Resource], devices: list[str]) -> list[str]:
    """Network transports of the devices, or of all, once each."""
    found = networks(resources).items()
    return list(dict.fromkeys(kind for device, kinds in found if not devices or device in devices for kind in kinds))


def _described(ucp: Ucp, context: int) -> str:
    """What UCX prints about a context, which is the only way in which it tells."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.open_memstream.restype = ctypes.c_void_p
    text, size = ctypes.c_void_p(), ctypes.c_size_t()
    stream = libc.open_memstream(ctypes.byref(text), ctypes.byref(size))
    if not stream:
        raise TransferError("there is no memory to list UCX's transports in")
    ucp.lib.ucp_context_print_info(context, ffi.cast("void *", stream))
    libc.fclose(ctypes.c_void_p(stream))
    whole = ctypes.string_at(text.value or 0, size.value).decode(errors="replace")
    libc.free(text)
    return whole

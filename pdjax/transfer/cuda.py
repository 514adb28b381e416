"""The CUDA driver, as far as transfers need it: the device that a thread works with, and when a device sees what a
network card has written into its memory.

A device is a number, as CUDA counts those that the process may use. Constants are those of cuda.h.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache

from pdjax.transfer.backend import TransferError

_FLUSH_OPTIONS = 117  # CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_FLUSH_WRITES_OPTIONS
_FLUSH_BY_HOST = 1  # CU_FLUSH_GPU_DIRECT_RDMA_WRITES_OPTION_HOST
_WRITES_ORDERING = 118  # CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WRITES_ORDERING
_TO_OWNER = 100  # CU_GPU_DIRECT_RDMA_WRITES_ORDERING_OWNER and CU_FLUSH_GPU_DIRECT_RDMA_WRITES_TO_OWNER
_CURRENT_CONTEXT = 0  # CU_FLUSH_GPU_DIRECT_RDMA_WRITES_TARGET_CURRENT_CTX


def make_current(device: int) -> None:
    """Let this thread work with a device, by the context that JAX uses too. Raises `TransferError`.

    UCX's cuda transports end the process when they find a thread without one (ai-dynamo/nixl issue 2102).
    """
    _call("cuCtxSetCurrent", _context(device))


def flush_of(device: int) -> Callable[[], None] | None:
    """What makes a device see everything that network cards have written into its memory so far; None: it does anyway.

    Source: CUDA driver API, cuFlushGPUDirectRDMAWrites.

    Raises:
        TransferError: neither is the case, or there is no CUDA.
    """
    if _attribute(device, _WRITES_ORDERING) >= _TO_OWNER:
        return None
    if not _attribute(device, _FLUSH_OPTIONS) & _FLUSH_BY_HOST:
        raise TransferError(f"GPU {device} neither orders nor flushes what network cards write into its memory")

    def flush() -> None:
        make_current(device)
        _call("cuFlushGPUDirectRDMAWrites", _CURRENT_CONTEXT, _TO_OWNER)

    return flush


@cache
def _driver() -> ctypes.CDLL:
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise TransferError(f"the CUDA driver cannot be loaded: {error}") from error
    driver.cuGetErrorString.argtypes = [ctypes.c_int, ctypes.POINTER(ctypes.c_char_p)]
    driver.cuDeviceGetAttribute.argtypes = [ctypes.POINTER(ctypes.c_int), ctypes.c_int, ctypes.c_int]
    driver.cuDevicePrimaryCtxRetain.argtypes = [ctypes.POINTER(ctypes.c_void_p), ctypes.c_int]
    driver.cuCtxSetCurrent.argtypes = [ctypes.c_void_p]
    driver.cuFlushGPUDirectRDMAWrites.argtypes = [ctypes.c_int, ctypes.c_int]
    return driver


@cache
def _context(device: int) -> int | None:
    """The primary context of a device, kept for the life of the process."""
    context = ctypes.c_void_p()
    _call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
    return context.value


def _attribute(device: int, attribute: int) -> int:
    value = ctypes.c_int()
    _call("cuDeviceGetAttribute", ctypes.byref(value), attribute, device)
    return value.value


def _call(function: str, *arguments: object) -> None:
    driver = _driver()
    error = driver[function](*arguments)
    if error:
        words = ctypes.c_char_p()
        driver.cuGetErrorString(error, ctypes.byref(words))
        raise TransferError(f"{function} failed: {(words.value or b'unknown error').decode()} ({error})")

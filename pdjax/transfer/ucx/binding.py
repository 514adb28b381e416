"""libucp's C interface, as far as the backend uses it, without a compiler.

Handles and status pointers are plain integers: 0 is null or done, the last hundred values are errors. A status is one
signed byte, since UCX packs that enum. Calls that may move many bytes go through cffi, which releases the interpreter
lock; the cheap ones go through `ctypes.PyDLL`, which keeps it: each release could cost a whole switch interval when
another Python thread is busy.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

import cffi

from pdjax.transfer.backend import TransferError

ffi: Any = cffi.FFI()
ffi.cdef("""
typedef int8_t status_t;
typedef uintptr_t handle_t;

typedef struct {
    uint64_t field_mask; uint64_t features; size_t request_size; void *request_init; void *request_cleanup;
    uint64_t tag_sender_mask; int mt_workers_shared; size_t estimated_num_eps; size_t estimated_num_ppn;
    const char *name; size_t node_local_id;
} ucp_params_t;
typedef struct {
    uint64_t field_mask; int thread_mode; unsigned long cpu_mask[16]; unsigned events; void *user_data; int event_fd;
    uint64_t flags; const char *name; size_t am_alignment; uint64_t client_id;
} ucp_worker_params_t;
typedef struct { const void *addr; uint32_t addrlen; } ucs_sock_addr_t;
typedef struct {
    uint64_t field_mask; const void *address; int err_mode;
    void (*err_cb)(void *arg, handle_t ep, status_t status); void *err_arg;
    void *user_data; unsigned flags; ucs_sock_addr_t sockaddr; handle_t conn_request; const char *name;
    ucs_sock_addr_t local_sockaddr;
} ucp_ep_params_t;
typedef struct {
    uint64_t field_mask; void *address; size_t length; unsigned flags; unsigned prot; int memory_type;
    const void *exported;
} ucp_mem_map_params_t;
typedef struct { uint64_t field_mask; void *address; size_t length; int memory_type; } ucp_mem_attr_t;
typedef struct {
    uint32_t op_attr_mask; uint32_t flags; void *request; void *cb; uint64_t datatype; void *user_data;
    void *reply_buffer; int memory_type; void *recv_info; handle_t memh;
} ucp_request_param_t;
typedef struct { uint64_t recv_attr; handle_t reply_ep; } ucp_am_recv_param_t;
typedef struct {
    uint64_t field_mask; unsigned id; uint32_t flags;
    status_t (*cb)(void *arg, const void *header, size_t header_length, void *data, size_t length,
                   const ucp_am_recv_param_t *param);
    void *arg;
} ucp_am_handler_param_t;
typedef struct { const char *transport_name; const char *device_name; } ucp_transport_entry_t;
typedef struct { ucp_transport_entry_t *entries; unsigned num_entries; size_t entry_size; } ucp_transports_t;
typedef struct {
    uint64_t field_mask; char name[32]; char local_sockaddr[128]; char remote_sockaddr[128];
    ucp_transports_t transports; void *user_data;
} ucp_ep_attr_t;

void ucp_get_version(unsigned *major, unsigned *minor, unsigned *release);
const char *ucs_status_string(status_t);
status_t ucp_config_read(const char *prefix, const char *file, handle_t *config);
status_t ucp_config_modify(handle_t config, const char *name, const char *value);
void ucp_config_release(handle_t config);
status_t ucp_init_version(unsigned major, unsigned minor, const ucp_params_t *, handle_t config, handle_t *context);
void ucp_cleanup(handle_t context);
void ucp_context_print_info(handle_t context, void *stream);
status_t ucp_worker_create(handle_t context, const ucp_worker_params_t *, handle_t *worker);
void ucp_worker_destroy(handle_t worker);
status_t ucp_worker_get_address(handle_t worker, void **address, size_t *length);
void ucp_worker_release_address(handle_t worker, void *address);
status_t ucp_worker_get_efd(handle_t worker, int *fd);
status_t ucp_worker_set_am_recv_handler(handle_t worker, const ucp_am_handler_param_t *);
status_t ucp_ep_create(handle_t worker, const ucp_ep_params_t *, handle_t *ep);
status_t ucp_ep_query(handle_t ep, ucp_ep_attr_t *);
status_t ucp_mem_map(handle_t context, const ucp_mem_map_params_t *, handle_t *memory);
status_t ucp_mem_unmap(handle_t context, handle_t memory);
status_t ucp_mem_query(handle_t memory, ucp_mem_attr_t *);
status_t ucp_rkey_pack(handle_t context, handle_t memory, void **buffer, size_t *length);
void ucp_rkey_buffer_release(void *buffer);
status_t ucp_ep_rkey_unpack(handle_t ep, const void *buffer, handle_t *rkey);
status_t ucp_rkey_ptr(handle_t rkey, uint64_t remote_address, void **address);
void ucp_rkey_destroy(handle_t rkey);
handle_t ucp_put_nbx(handle_t ep, handle_t buffer, size_t count, uint64_t remote_address, handle_t rkey,
                     const ucp_request_param_t *);
""")

# Field masks, features and flags of ucp_def.h, by the structure they belong to.
CONTEXT_FIELDS = 1 << 0 | 1 << 5  # features, mt_workers_shared
FEATURE_RMA, FEATURE_WAKEUP, FEATURE_AM = 1 << 1, 1 << 4, 1 << 6
WORKER_THREAD_MODE, THREAD_MODE_SERIALIZED = 1 << 0, 1
EP_FIELDS = 1 << 0 | 1 << 1 | 1 << 2  # address, err_mode, err_handler
ERROR_MODE_PEER = 1
EP_ATTR_TRANSPORTS = 1 << 3
MEM_ADDRESS, MEM_LENGTH, MEM_FLAGS, MEM_ALLOCATE = 1 << 0, 1 << 1, 1 << 2, 1 << 1
MEM_TYPE, HOST_MEMORY = 1 << 2, 0  # of what is asked of memory
PARAM_FLAGS, PARAM_MEMORY = 1 << 4, 1 << 8
AM_FIELDS = 1 << 0 | 1 << 2  # id, callback
AM_COPY_HEADER = 1 << 3
CLOSE_FORCE = 1 << 0

OK, IN_PROGRESS, BUSY = 0, 1, -15
_FIRST_ERROR = (1 << 64) - 100
_API = (1, 17)  # the oldest interface that has all of the above; newer libraries keep it


@dataclass(frozen=True)
class Cheap:
    """Calls that return in about a microsecond and keep the interpreter lock."""

    progress: Any
    arm: Any
    check: Any
    free: Any
    flush: Any
    send: Any
    close: Any


@dataclass(frozen=True)
class Ucp:
    """libucp, loaded."""

    lib: Any
    cheap: Cheap
    api: tuple[int, int] = _API

    def words(self, status: int) -> str:
        """A status as UCX puts it."""
        return ffi.string(self.lib.ucs_status_string(status)).decode()

    def check(self, status: int, doing: str) -> None:
        """Raise `TransferError` unless a call went well."""
        if status != OK:
            raise TransferError(f"UCX could not {doing}: {self.words(status)}")

    def version(self) -> tuple[int, int, int]:
        """The library's version."""
        parts = [ffi.new("unsigned *") for _ in range(3)]
        self.lib.ucp_get_version(*parts)
        return parts[0][0], parts[1][0], parts[2][0]


def load(path: str) -> Ucp:
    """Bind to the libucp at `path`, normally the one that the process has loaded already.

    Raises:
        TransferError: it cannot be loaded, or lacks a function.
    """
    try:
        lib = ffi.dlopen(path)
        cheap = _cheap_calls(ctypes.PyDLL(path))
    except (OSError, AttributeError) as error:
        raise TransferError(f"the UCX library {path} cannot be used: {error}") from error
    ucp = Ucp(lib, cheap)
    if ucp.version() < (*_API, 0):
        raise TransferError(
            f"UCX {'.'.join(map(str, ucp.version()))} is too old: {_API[0]}.{_API[1]} or later is needed"
        )
    return ucp


def is_error(request: int) -> bool:
    """Whether a status pointer is an error."""
    return request >= _FIRST_ERROR


def error_of(request: int) -> int:
    """The status in an erroneous status pointer."""
    return request - (1 << 64)


def _cheap_calls(library: ctypes.PyDLL) -> Cheap:
    handle, size, pointer = ctypes.c_size_t, ctypes.c_size_t, ctypes.c_void_p

    def bind(name: str, result: Any, *arguments: Any) -> Any:
        function = library[name]
        function.restype, function.argtypes = result, arguments
        return function

    return Cheap(
        progress=bind("ucp_worker_progress", ctypes.c_uint, handle),
        arm=bind("ucp_worker_arm", ctypes.c_int8, handle),
        check=bind("ucp_request_check_status", ctypes.c_int8, handle),
        free=bind("ucp_request_free", None, handle),
        flush=bind("ucp_ep_flush_nbx", handle, handle, pointer),
        send=bind("ucp_am_send_nbx", handle, handle, ctypes.c_uint, ctypes.c_char_p, size, pointer, size, pointer),
        close=bind("ucp_ep_close_nbx", handle, handle, pointer),
    )

"""A UCX context with one worker: endpoints, memory and operations, on the one thread that created it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from pdjax.transfer.backend import TransferError
from pdjax.transfer.ucx import binding
from pdjax.transfer.ucx.binding import Ucp, ffi

_NOTICE = 7  # the active message's id
_MAX_TRANSPORTS = 32
_PROGRESS_ROUNDS = 64
_CONFIGURATION = {
    # Where a rendezvous may happen, error mode PEER bars tcp from true puts, and UCX emulates them with a copy through
    # segments on each side (openucx/ucx issue 11929). Nothing of ours needs one: notices are small, the rest is puts.
    "RNDV_THRESH": "inf",
    "TCP_TX_SEG_SIZE": "256K",
    "TCP_RX_SEG_SIZE": "512K",
}


@dataclass(frozen=True)
class Memory:
    """Memory that UCX knows: its handle, address and bytes, and whether it is a GPU's."""

    handle: int
    address: int
    nbytes: int
    on_device: bool = False


class UcxWorker:
    """`on_notice` and `on_error` are called within `progress`: they must only hand on. Methods raise `TransferError`.

    Operations return a request: 0 when done, else a handle for `outcome`.
    """

    def __init__(
        self,
        ucp: Ucp,
        *,
        transports: str,
        devices: list[str],
        on_notice: Callable[[bytes], None],
        on_error: Callable[[int, str], None],
    ) -> None:
        self._ucp = ucp
        self._lib = ucp.lib
        self._cheap = ucp.cheap
        self._context = self._create_context(transports, devices)
        parameters = ffi.new("ucp_worker_params_t *")
        parameters.field_mask = binding.WORKER_THREAD_MODE
        parameters.thread_mode = binding.THREAD_MODE_SERIALIZED  # tests and closing may come from another thread
        worker = ffi.new("handle_t *")
        ucp.check(self._lib.ucp_worker_create(self._context, parameters, worker), "create a worker")
        self._worker: int = worker[0]
        fd = ffi.new("int *")
        ucp.check(self._lib.ucp_worker_get_efd(self._worker, fd), "give a file descriptor to sleep on")
        self.fd: int = fd[0]
        self._callbacks = (self._notice_callback(on_notice), self._error_callback(on_error))
        self._set_notice_handler()
        self._plain = ffi.new("ucp_request_param_t *")
        self._copied = ffi.new("ucp_request_param_t *")
        self._copied.op_attr_mask, self._copied.flags = binding.PARAM_FLAGS, binding.AM_COPY_HEADER
        self._forced = ffi.new("ucp_request_param_t *")
        self._forced.op_attr_mask, self._forced.flags = binding.PARAM_FLAGS, binding.CLOSE_FORCE
        self._addresses = {
            name: int(ffi.cast("uintptr_t", value))
            for name, value in (("plain", self._plain), ("copied", self._copied), ("forced", self._forced))
        }

    def address(self) -> bytes:
        """This worker's address, for its peers."""
        address, length = ffi.new("void **"), ffi.new("size_t *")
        self._ucp.check(self._lib.ucp_worker_get_address(self._worker, address, length), "tell its address")
        packed = bytes(ffi.buffer(address[0], length[0]))
        self._lib.ucp_worker_release_address(self._worker, address[0])
        return packed

    def register(self, address: int, nbytes: int) -> Memory:
        """Make memory of ours known to UCX."""
        parameters = ffi.new("ucp_mem_map_params_t *")
        parameters.field_mask = binding.MEM_ADDRESS | binding.MEM_LENGTH
        parameters.address, parameters.length = ffi.cast("void *", address), nbytes
        handle = self._map(parameters, f"register {nbytes} bytes at {address:#x}")
        attributes = ffi.new("ucp_mem_attr_t *")
        attributes.field_mask = binding.MEM_TYPE
        self._ucp.check(self._lib.ucp_mem_query(handle, attributes), "say what kind of memory it has")
        return Memory(handle, address, nbytes, on_device=attributes.memory_type != binding.HOST_MEMORY)

    def allocate(self, nbytes: int) -> Memory:
        """Let UCX allocate memory, shared if it can."""
        parameters = ffi.new("ucp_mem_map_params_t *")
        parameters.field_mask = binding.MEM_LENGTH | binding.MEM_FLAGS
        parameters.length, parameters.flags = nbytes, binding.MEM_ALLOCATE
        handle = self._map(parameters, f"allocate {nbytes} bytes (is /dev/shm large enough?)")
        attributes = ffi.new("ucp_mem_attr_t *")
        attributes.field_mask = binding.MEM_ADDRESS | binding.MEM_LENGTH
        self._ucp.check(self._lib.ucp_mem_query(handle, attributes), "say where its memory is")
        return Memory(handle, int(ffi.cast("uintptr_t", attributes.address)), nbytes)

    def unmap(self, memory: Memory) -> None:
        """Let go of memory; what `allocate` gave is freed."""
        self._ucp.check(self._lib.ucp_mem_unmap(self._context, memory.handle), "let go of memory")

    def key(self, memory: Memory) -> bytes:
        """What a peer needs to write into this memory."""
        buffer, length = ffi.new("void **"), ffi.new("size_t *")
        self._ucp.check(self._lib.ucp_rkey_pack(self._context, memory.handle, buffer, length), "pack a key")
        packed = bytes(ffi.buffer(buffer[0], length[0]))
        self._lib.ucp_rkey_buffer_release(buffer[0])
        return packed

    def open(self, address: bytes) -> int:
        """An endpoint to the worker at this address."""
        parameters = ffi.new("ucp_ep_params_t *")
        packed = ffi.from_buffer(address)
        parameters.field_mask = binding.EP_FIELDS
        parameters.address = packed
        parameters.err_mode = binding.ERROR_MODE_PEER
        parameters.err_cb = self._callbacks[1]
        endpoint = ffi.new("handle_t *")
        self._ucp.check(self._lib.ucp_ep_create(self._worker, parameters, endpoint), "reach the peer")
        return endpoint[0]

    def lanes(self, endpoint: int) -> str:
        """The transports of an endpoint, such as ``tcp/eth0``."""
        entries = ffi.new("ucp_transport_entry_t[]", _MAX_TRANSPORTS)
        attributes = ffi.new("ucp_ep_attr_t *")
        attributes.field_mask = binding.EP_ATTR_TRANSPORTS
        attributes.transports.entries = entries
        attributes.transports.num_entries = _MAX_TRANSPORTS
        attributes.transports.entry_size = ffi.sizeof("ucp_transport_entry_t")
        self._ucp.check(self._lib.ucp_ep_query(endpoint, attributes), "name a peer's transports")
        used = entries[0 : attributes.transports.num_entries]
        names = (f"{_text(entry.transport_name)}/{_text(entry.device_name)}" for entry in used)
        return "+".join(dict.fromkeys(names))

    def unpack(self, endpoint: int, key: bytes) -> int:
        """A handle to a peer's memory."""
        handle = ffi.new("handle_t *")
        status = self._lib.ucp_ep_rkey_unpack(endpoint, ffi.from_buffer(key), handle)
        self._ucp.check(status, "use the peer's key")
        return handle[0]

    def pointer(self, rkey: int, remote: int) -> int | None:
        """Where a peer's memory is mapped into this process, or None."""
        address = ffi.new("void **")
        if self._lib.ucp_rkey_ptr(rkey, remote, address) != binding.OK:
            return None
        return int(ffi.cast("uintptr_t", address[0]))

    def release_key(self, rkey: int) -> None:
        """Destroy a handle to a peer's memory; what was mapped is unmapped."""
        self._lib.ucp_rkey_destroy(rkey)

    def put(self, endpoint: int, source: Memory, offset: int, nbytes: int, remote: int, rkey: int) -> int:
        """Write into a peer's memory."""
        parameters = ffi.new("ucp_request_param_t *")
        parameters.op_attr_mask, parameters.memh = binding.PARAM_MEMORY, source.handle
        return self._lib.ucp_put_nbx(endpoint, source.address + offset, nbytes, remote, rkey, parameters)

    def flush(self, endpoint: int) -> int:
        """Done when everything put so far has landed."""
        return self._cheap.flush(endpoint, self._addresses["plain"])

    def notify(self, endpoint: int, payload: bytes) -> int:
        """Send a notice."""
        return self._cheap.send(endpoint, _NOTICE, payload, len(payload), None, 0, self._addresses["copied"])

    def close_endpoint(self, endpoint: int) -> int:
        """Force an endpoint closed: its requests end as cancelled, and nothing more is read from their sources."""
        return self._cheap.close(endpoint, self._addresses["forced"])

    def outcome(self, request: int) -> str | None:
        """None while a request is under way, else "" or what went wrong. A request that has ended is freed."""
        if request == 0:
            return ""
        if binding.is_error(request):
            return self._ucp.words(binding.error_of(request))
        status = self._cheap.check(request)
        if status == binding.IN_PROGRESS:
            return None
        self._cheap.free(request)
        return "" if status == binding.OK else self._ucp.words(status)

    def progress(self) -> bool:
        """Move what can move, for a while. Returns whether anything did."""
        moved = False
        for _ in range(_PROGRESS_ROUNDS):
            if not self._cheap.progress(self._worker):
                break
            moved = True
        return moved

    def arm(self) -> bool:
        """Prepare `fd` to wake a sleeper. False: there is work, progress first."""
        status = self._cheap.arm(self._worker)
        if status == binding.BUSY:
            return False
        self._ucp.check(status, "arm its file descriptor")
        return True

    def destroy(self) -> None:
        """Destroy worker and context, after endpoints, keys and memory."""
        self._lib.ucp_worker_destroy(self._worker)
        self._lib.ucp_cleanup(self._context)

    def _create_context(self, transports: str, devices: list[str]) -> int:
        config = ffi.new("handle_t *")
        self._ucp.check(self._lib.ucp_config_read(ffi.NULL, ffi.NULL, config), "read its configuration")
        try:
            chosen = {"NET_DEVICES": ",".join(devices)} if devices else {}
            for name, value in ({"TLS": transports} | chosen | _CONFIGURATION).items():
                status = self._lib.ucp_config_modify(config[0], name.encode(), value.encode())
                self._ucp.check(status, f"set {name} to {value}")
            parameters = ffi.new("ucp_params_t *")
            parameters.field_mask = binding.CONTEXT_FIELDS
            parameters.features = binding.FEATURE_RMA | binding.FEATURE_AM | binding.FEATURE_WAKEUP
            parameters.mt_workers_shared = 1
            context = ffi.new("handle_t *")
            status = self._lib.ucp_init_version(*self._ucp.api, parameters, config[0], context)
            self._ucp.check(status, f"start with the transports {transports}")
        finally:
            self._lib.ucp_config_release(config[0])
        return context[0]

    def _map(self, parameters: Any, doing: str) -> int:
        handle = ffi.new("handle_t *")
        self._ucp.check(self._lib.ucp_mem_map(self._context, parameters, handle), doing)
        return handle[0]

    def _set_notice_handler(self) -> None:
        parameters = ffi.new("ucp_am_handler_param_t *")
        parameters.field_mask = binding.AM_FIELDS
        parameters.id, parameters.cb = _NOTICE, self._callbacks[0]
        status = self._lib.ucp_worker_set_am_recv_handler(self._worker, parameters)
        self._ucp.check(status, "take notices")

    def _notice_callback(self, on_notice: Callable[[bytes], None]) -> Any:
        def notice(_arg: Any, header: Any, length: int, _data: Any, _size: int, _parameters: Any) -> int:
            on_notice(bytes(ffi.buffer(header, length)) if length else b"")
            return binding.OK

        kind = "status_t(void *, const void *, size_t, void *, size_t, const ucp_am_recv_param_t *)"
        return ffi.callback(kind, notice)

    def _error_callback(self, on_error: Callable[[int, str], None]) -> Any:
        def error(_arg: Any, endpoint: int, status: int) -> None:
            on_error(endpoint, self._ucp.words(status))

        return ffi.callback("void(void *, handle_t, status_t)", error)


def _text(characters: Any) -> str:
    return ffi.string(characters).decode()


def library_path(path: str | None) -> str:
    """The libucp to bind to: the one named, else the one that MPI has loaded. Raises `TransferError`."""
    from pdjax.net import mpi

    try:
        mpi.load()
    except mpi.MPIError as error:
        raise TransferError(str(error)) from error
    found = path or mpi.libucp_path()
    if found is None:
        raise TransferError("this MPI has loaded no UCX: use an MPICH with UCX, or name a libucp as ucx_library")
    return found

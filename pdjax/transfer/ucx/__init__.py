"""The UCX backend: one-sided writes, into a peer's mapped memory on one host and by `ucp_put_nbx` across hosts."""

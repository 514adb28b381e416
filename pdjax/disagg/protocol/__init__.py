"""The room protocol, without I/O: messages, states and the two room machines.

Nothing here knows a clock, a socket, MPI, UCX or JAX. A machine takes events and returns actions.
"""

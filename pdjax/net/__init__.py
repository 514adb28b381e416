"""Control links between instances: MPI communicators that are joined and dropped while both sides run."""

"""The command line, ``python -m pdjax.launch``: a module a command, and what puts an instance together."""

"""Prefill and decode apart: the room protocol (`protocol`) and the two roles that bind it to an engine."""

"""The error that everything about reading and converting models raises."""

from __future__ import annotations


class ModelError(ValueError):
    """A model that cannot be used; the sentence says what was wrong, what was expected and what to do."""

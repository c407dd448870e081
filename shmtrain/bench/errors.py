"""What may go wrong with a comparison."""

from __future__ import annotations


class BenchError(Exception):
    """The comparison cannot go on; the message names the group, the rank and what it was asked to do."""

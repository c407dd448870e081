"""Which batches a worker reads: by rule (record i is worker i mod N's), or by a cursor that all share.

The cursor is the job's counter of iterations in the box: batch k of iteration i is number i * iter_size + k
of the endless sequence of each source. An iteration is claimed once, so a record is read once an epoch while
workers join and leave; one that leaves computes what it has claimed. What a worker has claimed and not done
when it dies is lost: a quota, and the next where its readers had come so far. A job that is
resumed goes on at its iteration. While the box is away (--box-grace) workers claim by guess, and may read the
same.
"""

from __future__ import annotations

from typing import Any, Protocol


class Upcoming(Protocol):
    """As exchange.termination.SharedCounting."""

    def upcoming(self, n: int) -> int | None: ...


class Cursor:
    """This worker's part; its data layers are told by ``options`` before the iterations are counted."""

    def __init__(self, iter_size: int) -> None:
        self._iter_size = iter_size
        self._counting: Upcoming | None = None

    def options(self) -> dict[str, Any]:
        """What the nets' data layers are told."""
        return {"claims": self._number}

    def follow(self, counting: Upcoming) -> None:
        """From now on the batches are those of the iterations that ``counting`` claims."""
        self._counting = counting

    def _number(self, n: int) -> int | None:
        """See prototxt.data.claims."""
        step, batch = divmod(n, self._iter_size)
        iteration = self._counting.upcoming(step) if self._counting else None
        return None if iteration is None else iteration * self._iter_size + batch

"""How far reader and net are: counts in memory that both map; while both keep up none needs the kernel.

The reader counts the batches it has written, the net those it has given back; batch n lies in slot n mod
slots. Each may wish for a message when the other's count gets to a number, and only then is sent one.
"""

from __future__ import annotations

from typing import Literal

from prototxt._native import Words

_COUNT, _WISH, _LAYOUTS = {"reader": 0, "net": 1}, {"reader": 2, "net": 3}, 4
_WORDS = 5
COUNTS_BYTES = _WORDS * Words.LINE


class Counts:
    """One side's end of the memory behind ``fd``, which may be closed then. Nothing in it serves as an index.

    layouts  messages so far that say where a batch lies: sent before the count of that batch
    """

    def __init__(self, fd: int, side: Literal["reader", "net"]) -> None:
        other = "net" if side == "reader" else "reader"
        self._words = Words(fd, _WORDS)
        self._mine, self._theirs = _COUNT[side], _COUNT[other]
        self._my_wish, self._their_wish = _WISH[side], _WISH[other]
        self._fulfilled = 0

    def move(self, count: int) -> bool:
        """My count is this now; whether the other wished for a message at it, or before."""
        self._words.store(self._mine, count)
        wish = self._words.load(self._their_wish)
        if not self._fulfilled < wish <= count:
            return False
        self._fulfilled = wish
        return True

    def theirs(self) -> int:
        return self._words.load(self._theirs)

    def wish(self, count: int) -> int:
        """Let the other send a message when its count gets to this, above the last such number; 0: let it be.

        Returns the other's count: when that is below, the message will come.
        """
        self._words.store(self._my_wish, count)
        return self.theirs()

    @property
    def layouts(self) -> int:
        return self._words.load(_LAYOUTS)

    @layouts.setter
    def layouts(self, number: int) -> None:
        self._words.store(_LAYOUTS, number)

"""The progress bar on a terminal: loss, learning rate, images a second, time left, exchange, staleness."""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from tqdm import tqdm

REFRESH = 0.25  # seconds between two changes of the text beside the bar


@dataclass(frozen=True)
class Look:
    """What the bar shows of the newest iteration; exchange in seconds a time, None where nobody meets."""

    loss: float
    rate: float
    exchange: float | None = None
    staleness: int | None = None


class Bar:
    """Shows the job's iterations; silent where ``stream`` is no terminal.

    images   pictures in one iteration of the job (batch x iter_size)
    """

    def __init__(
        self, total: int, start: int, images: int, stream: TextIO | None = None, enabled: bool | None = None
    ) -> None:
        stream = stream if stream is not None else sys.stderr
        shown = stream.isatty() if enabled is None else enabled
        self._images = images
        self._at, self._next = start, 0.0
        self._look: Look | None = None
        self._speed = _Speed(start)
        self._bar: tqdm[None] | None = None
        if shown:
            from tqdm import tqdm  # makes a semaphore in /dev/shm for a moment: only where it is needed

            self._bar = tqdm(
                total=total, initial=start, file=stream, unit="iter", dynamic_ncols=True, leave=True
            )

    @property
    def shown(self) -> bool:
        return self._bar is not None

    def update(self, done: int, look: Look) -> None:
        """Move to ``done`` iterations of the job."""
        if self._bar is None:
            return
        self._look, now = look, time.monotonic()
        if now < self._next and done < (self._bar.total or 0):
            return
        self._next = now + REFRESH
        self._draw(self._bar, done, look, now)

    def _draw(self, bar: tqdm[None], done: int, look: Look, now: float) -> None:
        bar.set_postfix_str(self._text(look, self._speed.at(done, now) * self._images), refresh=False)
        bar.update(done - self._at)
        self._at = done

    def say(self, text: str) -> None:
        """A line above the bar."""
        if self._bar is not None:
            self._bar.write(text, file=self._bar.fp)

    def close(self, done: int | None = None) -> None:
        """Leave the last state on the terminal; closing twice is fine.

        done   iterations of the job: the last ones may be others' than the worker's whose bar this is
        """
        if self._bar is not None:
            if done is not None and self._look:
                self._draw(self._bar, done, self._look, time.monotonic())
            self._bar.close()
            self._bar = None

    def _text(self, look: Look, images: float) -> str:
        text = f"loss {look.loss:.4g}, lr {look.rate:.3g}, {images:,.0f} images/s"
        if look.exchange is not None:
            text += f", exchange {1e3 * look.exchange:.2f} ms, staleness {look.staleness or 0}"
        return text


class _Speed:
    """Iterations a second over about the last two seconds."""

    def __init__(self, start: int) -> None:
        self._marks = [(time.monotonic(), start)]

    def at(self, done: int, now: float) -> float:
        self._marks.append((now, done))
        while len(self._marks) > 2 and self._marks[0][0] < now - 2.0:
            self._marks.pop(0)
        (since, first), (until, last) = self._marks[0], self._marks[-1]
        return (last - first) / (until - since) if until > since else 0.0

"""Changes of weights in fewer bytes: what a wire type makes of a vector, wherever it then lies or travels.

float32   as it is
bfloat16  nearest even
float16   nearest even, what is too large becomes the largest
int8      round(x / s) with s = max|x| / 127 of each 256 elements, as the box's own wire type does it

What is lost stays with the worker and is added to its next change (error feedback): the sum of what has
travelled is the sum of what was to travel, less the last error.

Source: Seide et al., 1-Bit Stochastic Gradient Descent, 2014 (error feedback).
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from shmtrain.exchange.base import F32

U8 = npt.NDArray[np.uint8]
BLOCK = 256
LARGEST = 127
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}


class Narrow:
    """Vectors of ``trained + plain`` floats as ``nbytes`` bytes; the last ``plain`` travel as they are."""

    def __init__(self, wire: str, trained: int, plain: int = 0) -> None:
        self._wire, self._trained, self._plain = wire, trained, plain
        self._blocks = -(-trained // BLOCK)
        each = {"float32": 4 * trained, "int8": trained + 4 * self._blocks}
        self._narrow = each.get(wire, 2 * trained)
        self.nbytes = self._narrow + 4 * plain

    def encode(self, values: F32) -> U8:
        """(trained + plain,) float32, finite, as bytes."""
        out = np.empty(self.nbytes, np.uint8)
        head = values[: self._trained]
        if self._wire == "int8":
            self._encode_int8(head, out)
        elif self._wire in DTYPES:
            limit = torch.finfo(DTYPES[self._wire]).max
            cut = torch.from_numpy(head).clamp(-limit, limit).to(DTYPES[self._wire])
            out[: self._narrow] = cut.view(torch.uint8).numpy()
        else:
            out[: self._narrow] = head.view(np.uint8)
        out[self._narrow :] = values[self._trained :].view(np.uint8)
        return out

    def decode(self, data: U8, out: F32) -> None:
        """The other way round, into (trained + plain,) float32."""
        head = data[: self._narrow]
        if self._wire == "int8":
            self._decode_int8(head, out)
        elif self._wire in DTYPES:
            values = torch.from_numpy(head).view(DTYPES[self._wire])
            torch.from_numpy(out[: self._trained]).copy_(values)
        else:
            out[: self._trained].view(np.uint8)[:] = head
        out[self._trained :].view(np.uint8)[:] = data[self._narrow :]

    def _encode_int8(self, head: F32, out: U8) -> None:
        rows = self._rows(head)
        scales = np.abs(rows).max(axis=1, keepdims=True) / np.float32(LARGEST)
        steps = np.divide(rows, scales, out=np.zeros_like(rows), where=scales > 0)
        whole = np.clip(np.rint(steps), -LARGEST, LARGEST).astype(np.int8)
        out[: self._trained] = whole.reshape(-1)[: self._trained].view(np.uint8)
        out[self._trained : self._narrow] = scales.reshape(-1).view(np.uint8)

    def _decode_int8(self, head: U8, out: F32) -> None:
        scales = np.frombuffer(head[self._trained :].tobytes(), np.float32)
        rows = self._rows(head[: self._trained].view(np.int8).astype(np.float32))
        rows *= scales[:, np.newaxis]
        out[: self._trained] = rows.reshape(-1)[: self._trained]

    def _rows(self, head: F32) -> F32:
        """A copy in whole blocks, (blocks, BLOCK), with zeros behind."""
        rows = np.zeros(self._blocks * BLOCK, np.float32)
        rows[: self._trained] = head
        return rows.reshape(-1, BLOCK)


class Feedback:
    """What a narrow type has lost so far of one worker's changes, (n,) float32."""

    def __init__(self, n: int) -> None:
        self.owed = np.zeros(n, np.float32)
        self.squared_error = self.squared_sum = 0.0

    def encode(self, narrow: Narrow, values: F32, place: slice) -> U8:
        """``values`` and what is owed at ``place`` as bytes; ``values`` become what those bytes say."""
        owed = self.owed[place]
        values[: owed.size] += owed
        wanted = values[: owed.size].copy()
        data = narrow.encode(values)
        narrow.decode(data, values)
        np.subtract(wanted, values[: owed.size], out=owed)
        self.squared_error += float(np.dot(owed, owed))
        self.squared_sum += float(np.dot(wanted, wanted))
        return data

    def told(self) -> str:
        """The error in words; nothing where none was made."""
        if not self.squared_error:
            return ""
        return f", quantising error {(self.squared_error / self.squared_sum) ** 0.5:.2g} of the changes"

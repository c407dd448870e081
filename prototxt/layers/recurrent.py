"""LSTM, RNN and LSTMUnit over streams of time steps, (T, N, ..): T steps of N independent streams.

``cont`` (T, N) is 0 where a stream begins anew: the state before that step counts as zero. What is left of
the state after the last step is the next forward's beginning, without a gradient; with expose_hidden the
caller brings it and gets it as bottoms and tops, without a gradient too, as in Caffe.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from prototxt.fillers import parameter
from prototxt.layers.common import Apply, count, expect, shape_text
from prototxt.registry import Built, LayerSpec, Shape, layer

State = tuple[Tensor, ...]


@dataclass(frozen=True)
class Wiring:
    """Which bottoms a recurrent layer has beyond x and cont."""

    outputs: int
    static: bool
    exposed: bool


class Recurrent(nn.Module):
    """The loop over time, for blobs that begin with W_x, b[, W_static]. Subclasses give state and step."""

    parts: int  # tensors of shape (N, outputs) in the state

    def __init__(self, wiring: Wiring, blobs: list[nn.Parameter]) -> None:
        super().__init__()
        self.wiring = wiring
        self.w_x, self.b = blobs[0], blobs[1]
        self.w_static = blobs[2] if wiring.static else None
        self.state: State = ()

    def forward(self, *bottoms: Tensor) -> Tensor | tuple[Tensor, ...]:
        x, cont, *rest = bottoms
        static = rest.pop(0) if self.wiring.static else None
        state = self.begin(x, rest)
        inputs = self.project(x.flatten(2), None if static is None else static.flatten(1))
        steps = []
        for step, keep in zip(inputs, cont.detach().unsqueeze(2), strict=True):
            state, top = self.step(step, keep, state)
            steps.append(top)
        last = tuple(part.detach() for part in state)
        if self.wiring.exposed:
            return (torch.stack(steps), *(part.unsqueeze(0) for part in last))
        self.state = last
        return torch.stack(steps)

    def begin(self, x: Tensor, given: list[Tensor]) -> State:
        """The state before the first step; zero when there is none for this number of streams."""
        if self.wiring.exposed:
            return tuple(part.detach().squeeze(0) for part in given)
        if self.state and self.state[0].shape[0] == x.shape[1]:
            return tuple(part.to(x) for part in self.state)
        return tuple(x.new_zeros(x.shape[1], self.wiring.outputs) for _ in range(self.parts))

    def project(self, x: Tensor, static: Tensor | None) -> Tensor:
        """What the input and, where there is one, the static input give to every step."""
        y = functional.linear(x, self.w_x, self.b)
        if static is None or self.w_static is None:
            return y
        return y + functional.linear(static, self.w_static)

    def step(self, inputs: Tensor, keep: Tensor, state: State) -> tuple[State, Tensor]:
        raise NotImplementedError


def lstm_step(gates: Tensor, keep: Tensor, cell: Tensor) -> tuple[Tensor, Tensor]:
    """c' = keep f c + i g and h' = o tanh c', from gates (N, 4 H) in the order i, f, o, g."""
    i, f, o, g = gates.chunk(4, 1)
    cell = keep * torch.sigmoid(f) * cell + torch.sigmoid(i) * torch.tanh(g)
    return cell, torch.sigmoid(o) * torch.tanh(cell)


class LSTM(Recurrent):
    parts = 2  # h, c

    def __init__(self, wiring: Wiring, blobs: list[nn.Parameter]) -> None:
        super().__init__(wiring, blobs)
        self.w_h = blobs[-1]

    def step(self, inputs: Tensor, keep: Tensor, state: State) -> tuple[State, Tensor]:
        h, c = state
        c, h = lstm_step(inputs + functional.linear(keep * h, self.w_h), keep, c)
        return (h, c), h


class RNN(Recurrent):
    parts = 1  # h

    def __init__(self, wiring: Wiring, blobs: list[nn.Parameter]) -> None:
        super().__init__(wiring, blobs)
        self.w_h, self.w_o, self.b_o = blobs[-3], blobs[-2], blobs[-1]

    def step(self, inputs: Tensor, keep: Tensor, state: State) -> tuple[State, Tensor]:
        (h,) = state
        h = torch.tanh(inputs + functional.linear(keep * h, self.w_h))
        return (h,), torch.tanh(functional.linear(h, self.w_o, self.b_o))


def _wiring(spec: LayerSpec, bottoms: list[Shape], parts: int) -> Wiring:
    p = spec.recurrent_param
    if p.num_output < 1:
        raise spec.error("num_output must be set")
    hidden = parts if p.expose_hidden else 0
    expect(spec, (2 + hidden, 3 + hidden), 1 + hidden)
    x, cont = bottoms[:2]
    if len(x) < 2 or cont != x[:2]:
        raise spec.error(f"needs bottoms T x N x .. and T x N, not {shape_text(x)} and {shape_text(cont)}")
    static = len(bottoms) > 2 + hidden
    if static and bottoms[2][:1] != x[1:2]:
        raise spec.error(
            f"the static bottom ({shape_text(bottoms[2])}) must have {x[1]} records, one a stream"
        )
    for state in bottoms[len(bottoms) - hidden :]:
        if state != (1, x[1], p.num_output):
            raise spec.error(f"the state must be 1 x {x[1]} x {p.num_output}, not {shape_text(state)}")
    return Wiring(p.num_output, static, bool(p.expose_hidden))


def _blobs(spec: LayerSpec, shapes: list[Shape]) -> list[nn.Parameter]:
    """Matrices by weight_filler, vectors by bias_filler."""
    p = spec.recurrent_param
    return [parameter(shape, p.weight_filler if len(shape) == 2 else p.bias_filler, spec) for shape in shapes]


def _built(module: Recurrent, bottoms: list[Shape], blobs: list[nn.Parameter]) -> Built:
    steps, streams = bottoms[0][:2]
    outputs = module.wiring.outputs
    tops: list[Shape] = [(steps, streams, outputs)]
    if module.wiring.exposed:
        tops += [(1, streams, outputs)] * module.parts
    given = range(len(bottoms) - module.parts, len(bottoms)) if module.wiring.exposed else ()
    return Built(module, tops, blobs, labels=frozenset({1, *given}))


@layer("LSTM")
def lstm(spec: LayerSpec, bottoms: list[Shape]) -> Built:
    """Long short-term memory.

    bottom  x (T, N, ..), cont (T, N), [static (N, ..)], [h, c (1, N, H) with expose_hidden]
    top     h (T, N, H), [h, c after the last step (1, N, H)]
    blobs   W_x (4 H, I), b (4 H,), [W_static (4 H, S)], W_h (4 H, H); gates in the order i, f, o, g
    """
    wiring = _wiring(spec, bottoms, LSTM.parts)
    gates, inputs = 4 * wiring.outputs, count(bottoms[0], 2)
    static: list[Shape] = [(gates, count(bottoms[2], 1))] if wiring.static else []
    blobs = _blobs(spec, [(gates, inputs), (gates,), *static, (gates, wiring.outputs)])
    return _built(LSTM(wiring, blobs), bottoms, blobs)


@layer("RNN")
def rnn(spec: LayerSpec, bottoms: list[Shape]) -> Built:
    """h = tanh(W_h h + W_x x + b), top = tanh(W_o h + b_o).

    bottom  x (T, N, ..), cont (T, N), [static (N, ..)], [h (1, N, H) with expose_hidden]
    top     (T, N, H), [h after the last step (1, N, H)]
    blobs   W_x (H, I), b (H,), [W_static (H, S)], W_h (H, H), W_o (H, H), b_o (H,)
    """
    wiring = _wiring(spec, bottoms, RNN.parts)
    outputs, inputs = wiring.outputs, count(bottoms[0], 2)
    static: list[Shape] = [(outputs, count(bottoms[2], 1))] if wiring.static else []
    square = (outputs, outputs)
    blobs = _blobs(spec, [(outputs, inputs), (outputs,), *static, square, square, (outputs,)])
    return _built(RNN(wiring, blobs), bottoms, blobs)


@layer("LSTMUnit")
def lstm_unit(spec: LayerSpec, bottoms: list[Shape]) -> Built:
    """One step of an LSTM: bottoms c (1, N, H), gates (1, N, 4 H), cont (1, N); tops c, h (1, N, H)."""
    expect(spec, 3, 2)
    cell, gates, cont = bottoms
    if len(cell) != 3 or cell[0] != 1 or gates != (1, cell[1], 4 * cell[2]) or cont != cell[:2]:
        shapes = ", ".join(map(shape_text, bottoms))
        raise spec.error(f"needs bottoms 1 x N x H, 1 x N x 4H and 1 x N, not {shapes}")

    def run(c: Tensor, x: Tensor, keep: Tensor) -> tuple[Tensor, Tensor]:
        c, h = lstm_step(x[0], keep.detach()[0].unsqueeze(1), c[0])
        return c.unsqueeze(0), h.unsqueeze(0)

    return Built(Apply(run), [cell, cell], labels=frozenset({2}))

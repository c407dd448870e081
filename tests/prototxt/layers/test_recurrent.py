"""LSTM and RNN step by step in numpy; the state is carried on, reset by cont, or exposed."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from prototxt.registry import Shape
from tests.prototxt.layers.single import Array, build, noise, run, set_blobs

T, N, INPUTS, S, H = 4, 3, 5, 2, 3
CONT = np.array([[0, 1, 1], [1, 1, 0], [1, 0, 1], [1, 1, 1]], np.float32)


def sigmoid(x: Array) -> Array:
    return np.asarray(1 / (1 + np.exp(-x)))


def lstm(
    x: Array, cont: Array, extra: Array, w: list[Array], state: list[Array]
) -> tuple[Array, list[Array]]:
    h, c = state
    tops = []
    for t in range(len(x)):
        keep = cont[t][:, None]
        i, f, o, g = np.split(x[t] @ w[0].T + w[1] + extra + (keep * h) @ w[-1].T, 4, 1)
        c = keep * sigmoid(f) * c + sigmoid(i) * np.tanh(g)
        h = sigmoid(o) * np.tanh(c)
        tops.append(h)
    return np.stack(tops), [h, c]


def rnn(x: Array, cont: Array, extra: Array, w: list[Array], state: list[Array]) -> tuple[Array, list[Array]]:
    (h,) = state
    tops = []
    for t in range(len(x)):
        h = np.tanh(x[t] @ w[0].T + w[1] + extra + (cont[t][:, None] * h) @ w[-3].T)
        tops.append(np.tanh(h @ w[-2].T + w[-1]))
    return np.stack(tops), [h]


KINDS: dict[str, tuple[Any, int, int, list[Shape]]] = {
    "LSTM": (lstm, 2, 4 * H, [(4 * H, H)]),
    "RNN": (rnn, 1, H, [(H, H), (H, H), (H,)]),
}


def weights(kind: str, static: bool) -> list[Array]:
    _, _, gates, rest = KINDS[kind]
    shapes = [(gates, INPUTS), (gates,), *([(gates, S)] if static else []), *rest]
    return [noise(*shape, seed=20 + i) * 0.6 for i, shape in enumerate(shapes)]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("static", [False, True])
def test_the_state_is_carried_from_one_forward_to_the_next(kind: str, static: bool) -> None:
    step, parts, *_ = KINDS[kind]
    shapes = [(T, N, INPUTS), (T, N), *([(N, S)] if static else [])]
    built = build(f'type: "{kind}" recurrent_param {{ num_output: {H} }}', *shapes)
    w = weights(kind, static)
    set_blobs(built, *w)
    given = noise(N, S, seed=9)
    extra = given @ w[2].T if static else np.zeros(1, np.float32)
    state: list[Array] = [np.zeros((N, H))] * parts
    for forward in range(3):
        x = noise(T, N, INPUTS, seed=forward)
        want, state = step(x, CONT if forward else np.ones((T, N)), extra, w, state)
        arrays = [x, CONT if forward else np.ones((T, N)), *([given] if static else [])]
        np.testing.assert_allclose(run(built, *arrays)[0], want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_an_exposed_state_comes_and_goes_as_blobs(kind: str) -> None:
    step, parts, *_ = KINDS[kind]
    states = [noise(1, N, H, seed=30 + i) for i in range(parts)]
    built = build(
        f'type: "{kind}" recurrent_param {{ num_output: {H} expose_hidden: true }}',
        (T, N, INPUTS),
        (T, N),
        *[(1, N, H)] * parts,
        tops=1 + parts,
    )
    w, x = weights(kind, False), noise(T, N, INPUTS)
    set_blobs(built, *w)
    want, last = step(x, CONT, np.zeros(1, np.float32), w, [s[0] for s in states])
    for _ in range(2):  # nothing is carried on
        top, *made = run(built, x, CONT, *states)
        np.testing.assert_allclose(top, want, rtol=1e-4, atol=1e-5)
        for got, part in zip(made, last, strict=True):
            np.testing.assert_allclose(got[0], part, rtol=1e-4, atol=1e-5)


def test_another_number_of_streams_begins_at_zero() -> None:
    built = build(f'type: "RNN" recurrent_param {{ num_output: {H} }}', (T, N, INPUTS), (T, N))
    w = weights("RNN", False)
    set_blobs(built, *w)
    run(built, noise(T, N, INPUTS), np.ones((T, N)))
    built.tops = [(T, 2, H)]
    x = noise(T, 2, INPUTS)
    want, _ = rnn(x, np.ones((T, 2)), np.zeros(1), w, [np.zeros((2, H))])
    np.testing.assert_allclose(run(built, x, np.ones((T, 2)))[0], want, rtol=1e-4, atol=1e-5)


def test_lstm_unit_is_one_step() -> None:
    built = build('type: "LSTMUnit"', (1, N, H), (1, N, 4 * H), (1, N), tops=2)
    c, gates = noise(1, N, H), noise(1, N, 4 * H, seed=1)
    i, f, o, g = np.split(gates[0], 4, 1)
    cell = CONT[0][:, None] * sigmoid(f) * c[0] + sigmoid(i) * np.tanh(g)
    made = run(built, c, gates, CONT[:1])
    np.testing.assert_allclose(made[0][0], cell, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(made[1][0], sigmoid(o) * np.tanh(cell), rtol=1e-5, atol=1e-6)

"""Eight workers at once, in no order: each algorithm finds the optimum of a strongly convex problem."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from shmtrain.method import METHODS, Method
from tests.shmtrain.crowds import Recipe, Worker, open_job, start

N, WORLD = 50, 8
CURVATURE = np.linspace(0.5, 2.0, N).astype(np.float32)
OPTIMUM = start(99, N)
METHOD = Method(wait_limit=60.0)
FORMS: dict[str, tuple[str, Method, float]] = {
    **{name: (name, METHOD, 0.0) for name, entry in METHODS.items() if entry.box},
    "eamsgd": ("eamsgd", METHOD, 0.9),
    "seasgd with momentum": ("seasgd", METHOD, 0.9),
    "downpour, inverse": ("downpour", replace(METHOD, staleness="inverse"), 0.0),
    "downpour, bounded": ("downpour", replace(METHOD, staleness="bounded:4"), 0.0),
    "downpour, adagrad": ("downpour", replace(METHOD, server="adagrad", server_rate=0.3), 0.0),
    "sync, backups": ("sync", replace(METHOD, backup_workers=2), 0.0),
    "diloco, asynchronous": ("diloco", replace(METHOD, asynchronous=True, outer_momentum=0.5), 0.0),
}


def slope(weights: npt.NDArray[Any], rank: int, step: int) -> Any:
    return CURVATURE * (weights - OPTIMUM)


def live(worker: Worker, steps: int) -> None:
    """To the end of the job, or of ``steps``."""
    for _ in range(steps):
        if getattr(worker.exchange, "upcoming", 0) is None:
            break
        worker.step()
    worker.exchange.finish()


@pytest.mark.parametrize("form", FORMS)
def test_eight_workers_find_the_optimum(address: str, form: str) -> None:
    algorithm, method, momentum = FORMS[form]
    steps, tau = (700, 10) if algorithm == "diloco" else (400, None)
    recipe = Recipe(
        algorithm, WORLD, method, 0.9 / WORLD, tau, momentum=momentum, n=N, gradient=slope, rate=0.05
    )
    if method.backup_workers:  # who is late makes more steps than the others: all end with the job
        recipe = replace(recipe, iterations=steps * (WORLD - method.backup_workers))
        steps *= WORLD
    job = open_job(address, recipe)
    for future in [w.pool.submit(live, w, steps) for w in job.workers if w.pool]:
        future.result(60)
    far = np.abs(start(n=N) - OPTIMUM).max()
    assert np.abs(job.center - OPTIMUM).max() < 0.02 * far

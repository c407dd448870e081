"""Twenty steps of every solver case agree with the original: weights, updates and losses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shmtrain.pycaffe import get_solver

CASES = [
    "AdaDelta_clip", "AdaDelta_exp", "AdaDelta_fixed", "AdaDelta_frozen_clip",
    "AdaDelta_iter2_clip_wd_poly", "AdaDelta_iter3", "AdaDelta_multistep", "AdaGrad_exp",
    "AdaGrad_fixed", "AdaGrad_shared", "AdaGrad_wdL1_step", "AdaGrad_wdL2_inv", "Adam_clip",
    "Adam_delta", "Adam_exp", "Adam_fixed", "Adam_frozen_clip", "Adam_iter2_clip_wd_poly",
    "Adam_multistep", "Adam_sigmoid", "Nesterov_exp", "Nesterov_frozen_clip",
    "Nesterov_iter2_clip_wd_poly", "Nesterov_iter3", "Nesterov_mom0", "Nesterov_multistep",
    "Nesterov_shared", "RMSProp_clip", "RMSProp_exp", "RMSProp_frozen_clip",
    "RMSProp_iter2_clip_wd_poly", "RMSProp_multistep", "RMSProp_sigmoid", "RMSProp_wdL1_step", "SGD_bn",
    "SGD_exp", "SGD_fixed", "SGD_iter2_clip_wd_poly", "SGD_iter3", "SGD_multistep", "SGD_poly",
    "SGD_shared", "SGD_sigmoid", "SGD_step", "SGD_wdL1_step", "SGD_wdL2_inv",
]  # fmt: skip


def assert_agrees(got: Any, want: Any, what: str) -> None:
    """rtol 1e-4 and 1e-5 of the largest value: what summation order explains.

    1e-7 for values that are zero but for rounding: a bias before BatchNorm has no gradient.
    """
    scale = float(np.abs(want).max())
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=max(1e-5 * scale, 1e-7), err_msg=what)


@pytest.mark.parametrize("case", CASES)
def test_twenty_steps_agree_with_the_original(
    case: str, shared: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = shared / "golden" / "solvers"
    monkeypatch.chdir(folder)
    golden = np.load(folder / f"{case}.npz", allow_pickle=False)
    names = [key[2:] for key in golden.files if key.startswith("w/")]
    with get_solver(f"{case}.solver.prototxt") as solver:
        params = {name: solver.net.params[name.rsplit("/")[0]][int(name.rsplit("/")[1])] for name in names}
        for name in names:
            params[name].data[...] = golden[f"w/{name}"][0]
        losses = []
        for step in range(1, 21):
            solver.step(1)
            losses.append(float(solver.net.blobs["loss"].data))
            for name in names:
                assert_agrees(params[name].data, golden[f"w/{name}"][step], f"step {step}: {name}")
                if step == 1 and f"upd0/{name}" in golden.files:
                    assert_agrees(params[name].diff, golden[f"upd0/{name}"], f"update of {name}")
        assert_agrees(losses, golden["last_subbatch_loss"], "losses")


def test_every_solver_case_of_the_reference_is_on_the_list(shared: Path) -> None:
    files = sorted((shared / "golden" / "solvers").glob("*.npz"))
    assert {f.stem for f in files if not f.stem.startswith("snap_")} == set(CASES)

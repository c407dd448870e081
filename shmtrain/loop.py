"""Any torch training loop shares its weights: three lines in it, and no solver file.

exchange = shmtrain.Exchange(model, box="unix:/run/box.sock", algorithm="seasgd")
for batch in data:
    ...; optimizer.step(); exchange.step()
exchange.close()
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import smb
from shmtrain.crowd import Crowd
from shmtrain.exchange import open_exchange
from shmtrain.exchange.base import F32, Meeting, Vectors
from shmtrain.group import COLUMNS, Column, Progress, State
from shmtrain.method import METHODS, Method, check_interval, method, moving_rate, own
from shmtrain.options import ConfigError, MethodOptions

GRADIENTS = ("sync", "allreduce", "hybrid")  # change the gradients before the optimizer takes them
OPTIONS = ("alpha", "tau", "exchange")


class Exchange:
    """One worker's part in an algorithm, for a loop of its own.

    module     a torch module, or its parameters: float32 on the CPU. From here on they are views of one
               vector. A module's floating buffers (BatchNorm's statistics) are averaged too
    box        a connected smb.Box, or an address for smb.connect; None: as smb.connect() finds one
    algorithm  as --algorithm of the command line
    job        the name that the workers of one training share
    rank, workers  this one and how many there are; by default from RANK and WORLD_SIZE, else 0 of 1
    optimizer  for easgd, sync, allreduce, hybrid and downpour's adagrad, which act between backward and the
               update: they are called by its step
    options    alpha, tau, exchange and the fields of method.Method, as on the command line

    The first worker of a job gives its weights, all others take them. Raises ConfigError, and smb.SmbError
    in every call: after smb.NonFinite this worker has diverged. Workers on one machine see one another die.
    eamsgd, which needs a solver's own momentum, and the MPI ways are for solver files alone. Close it, or use
    it in a ``with``.
    """

    def __init__(
        self,
        module: nn.Module | Iterable[Tensor],
        box: smb.Box | str | None = None,
        algorithm: str = "seasgd",
        *,
        job: str = "job",
        rank: int | None = None,
        workers: int | None = None,
        optimizer: torch.optim.Optimizer | None = None,
        **options: Any,
    ) -> None:
        rank = int(os.environ.get("RANK", "0")) if rank is None else rank
        workers = int(os.environ.get("WORLD_SIZE", "1")) if workers is None else workers
        if not 0 <= rank < workers:
            raise ConfigError(f"rank {rank} is not one of {workers} workers")
        self.algorithm, self._job = algorithm, job
        self._method, self._told = _options(algorithm, workers, options)
        self._needs_gradients = algorithm in GRADIENTS or self._method.server == "adagrad"
        if optimizer is None and (self._needs_gradients or algorithm == "easgd"):
            raise ConfigError(f"{algorithm} acts between backward and the update: give optimizer=...")
        self._flat = _Flat(module)
        self._own_box = not isinstance(box, smb.Box)
        self.box: smb.Box = box if isinstance(box, smb.Box) else smb.connect(box) if box else smb.connect()
        self._closed = False
        self._steps = 0
        self._crowd = self._enter(rank, workers)
        self._center = self._meet()
        rate = float(optimizer.param_groups[0]["lr"]) if optimizer else 0.01
        self._exchange = open_exchange(algorithm, self._meeting(rate))
        self._hook = optimizer.register_step_pre_hook(self._before_update) if optimizer else None
        self._exchange.before_forward(0)

    # The loop --------------------------------------------------------------------------------------------

    def step(self) -> None:
        """After ``optimizer.step()``: what the algorithm does between two iterations."""
        self._exchange.after_update(self._steps)
        self._steps += 1
        self._crowd.progress.put(self._crowd.rank, Column.DONE, self._steps)
        self._exchange.before_forward(self._steps)

    def _before_update(self, *_: object) -> None:
        if self._needs_gradients:
            self._flat.gather_gradients()
        self._exchange.gradients_ready(self._steps)
        if self.algorithm in GRADIENTS:
            self._flat.spread_gradients()

    @property
    def stats(self) -> Any:
        """Seconds, count and staleness of the exchanges: exchange.base.ExchangeStats."""
        return self._exchange.stats

    @contextmanager
    def holding_center(self) -> Iterator[None]:
        """Let the module have the job's weights for a while: those that are to be tested and saved."""
        mine = self._flat.weights.clone()
        self._exchange.center(self._flat.weights.numpy())
        try:
            yield
        finally:
            self._flat.weights.copy_(mine)

    def close(self) -> None:
        """End this worker's part: the center has all of its updates then. Twice is fine."""
        if self._closed:
            return
        self._closed = True
        if self._hook is not None:
            self._hook.remove()
        self._exchange.finish()
        getattr(self._exchange, "close", lambda: None)()
        self._end()

    def _end(self) -> None:
        if self._own_box:
            self.box.close()

    def __enter__(self) -> Exchange:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
        elif not self._closed:
            self._closed = True
            self._end()

    # What is kept ----------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """This worker's place in the algorithm; weights and optimizer have state_dicts of their own.

        common  what the workers have in common, in the box or alike at each
        """
        vectors = {name: torch.from_numpy(array.copy()) for name, array in self._vectors().items()}
        common = {
            name: torch.from_numpy(np.array(vector if isinstance(vector, np.ndarray) else vector.read()))
            for name, vector in self._common().items()
        }
        return {
            "algorithm": self.algorithm,
            "parameters": self._flat.shapes,
            "steps": self._steps,
            "vectors": vectors,
            "common": common,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from ``state_dict``. Raises ValueError when it does not fit; nothing is changed then."""
        steps = self._check_head(state)
        mine = self._vectors()
        shared = {name: v for name, v in self._common().items() if isinstance(v, smb.Segment)}
        kept = {name: _taken(state, "vectors", name, array.size) for name, array in mine.items()}
        common = {name: _taken(state, "common", name, segment.count) for name, segment in shared.items()}
        for name, segment in shared.items():
            segment.write(common[name])
        for name, array in mine.items():
            array[:] = kept[name]
        self._steps = steps
        getattr(self._exchange, "resume", lambda steps: None)(steps)

    def _check_head(self, state: object) -> int:
        """The steps that a state was saved after. Raises ValueError when it is not one for this worker."""
        if not isinstance(state, dict) or not {"algorithm", "steps", "vectors"} <= state.keys():
            raise ValueError("this is no state_dict of a shmtrain.Exchange")
        if state["algorithm"] != self.algorithm:
            raise ValueError(f"the state is one of {state['algorithm']}, not of {self.algorithm}")
        if (theirs := state.get("parameters", self._flat.shapes)) != self._flat.shapes:
            raise ValueError(f"the state is another model's: {_unlike(theirs, self._flat.shapes)}")
        steps = state["steps"]
        if not isinstance(steps, int) or steps < 0:
            raise ValueError(f"the state's steps are {steps!r}: not a number from 0 on")
        return steps

    def _common(self) -> dict[str, Any]:
        common: dict[str, Any] = getattr(self._exchange, "common", dict)()
        return common

    def _vectors(self) -> dict[str, Any]:
        vectors: dict[str, Any] = getattr(self._exchange, "vectors", dict)()
        return vectors

    # The start -------------------------------------------------------------------------------------------

    def _enter(self, rank: int, workers: int) -> Crowd:
        table = self.box.create(
            f"{self._job}/progress",
            count=workers * COLUMNS,
            dtype="int64",
            lifetime="attached",
            or_attach=True,
        )
        progress = _Watched(table, workers)
        progress.put(rank, Column.PID, os.getpid())
        progress.put(rank, Column.STATE, State.TRAINING)
        return Crowd(self.box, self._job, rank, workers, progress, self._method.wait_limit)

    def _meet(self) -> smb.Segment:
        weights = self._flat.weights.numpy()
        center = self.box.create(
            f"{self._job}/center", count=weights.size, lifetime="attached", initial=weights, or_attach=True
        )
        if not center.created:
            center.read(weights)
        return center

    def _meeting(self, rate: float) -> Meeting:
        crowd, told = self._crowd, self._told
        alpha = told.get("alpha")
        return Meeting(
            center=self._center,
            vectors=self._flat.vectors(),
            alpha=lambda: alpha or moving_rate(self.algorithm, crowd.rows.active, self._method),
            tau=told.get("tau") or METHODS[self.algorithm].tau,
            way=told.get("exchange") or "fused",
            method=self._method,
            crowd=crowd,
            threads=1,
            iterations=sys.maxsize,
            base_rate=rate,
            open_pair=self._open_pair,
            joined=lambda: crowd.progress.put(crowd.rank, Column.STATE, State.FINISHED),
        )

    def _open_pair(self) -> tuple[smb.Segment, smb.Segment]:
        key = f"{self._job}/delta/{self._crowd.rank}"
        own = self.box.create(key, count=self._center.count, lifetime="owner")
        return own, self.box.attach(f"{self._job}/center")


def _options(algorithm: str, workers: int, options: dict[str, Any]) -> tuple[Method, dict[str, Any]]:
    told = {name: options.pop(name) for name in OPTIONS if name in options}
    unknown = options.keys() - MethodOptions.__dataclass_fields__.keys()
    if unknown:
        raise ConfigError(f"unknown options: {', '.join(sorted(unknown))}")
    if algorithm in METHODS and not METHODS[algorithm].box:
        raise ConfigError(f"{algorithm} meets by MPI: it is for solver files under mpirun alone")
    way = told.get("exchange") or "fused"
    filled = method(algorithm, workers, "alpha" in told, MethodOptions(**options), way)
    own(algorithm, told)
    if not 0 < told.get("alpha", 0.5) < 1 or told.get("tau", 1) < 1:
        raise ConfigError(f"alpha must lie between 0 and 1, tau must be at least 1: {told}")
    check_interval(filled, told.get("tau", METHODS[algorithm].tau))
    return filled, told


def _taken(state: dict[str, Any], part: str, name: str, size: int) -> F32:
    """A vector of a state. Raises ValueError when it is missing or another's."""
    vectors = state.get(part)
    found = vectors.get(name) if isinstance(vectors, dict) else None
    if not isinstance(found, Tensor) or found.numel() != size or not found.is_floating_point():
        what = f"{found.numel()} of {found.dtype}" if isinstance(found, Tensor) else "none"
        raise ValueError(
            f"the state has no {name!r} of {size} floats ({what}): was it saved with these options?"
        )
    return found.detach().cpu().to(torch.float32).reshape(-1).numpy()


def _unlike(theirs: Any, mine: list[tuple[int, ...]]) -> str:
    """Where two lists of shapes differ first, in words."""
    theirs = list(theirs) if isinstance(theirs, (list, tuple)) else []
    if len(theirs) != len(mine):
        return f"{len(theirs)} tensors, not {len(mine)}"
    index = next(i for i, (a, b) in enumerate(zip(theirs, mine, strict=True)) if a != b)
    return f"its tensor {index} is {theirs[index]}, not {mine[index]}"


class _Watched(Progress):
    """The workers' table where no launcher buries the dead: their pids tell, on one machine."""

    def rows(self) -> Any:
        rows = super().rows()
        for rank in range(len(rows.table)):
            if rows.pid(rank) and not rows.gone(rank) and _ended(rows.pid(rank)):
                self.bury(rank)
                rows = super().rows()
        return rows

    def bury(self, rank: int) -> None:
        self.put(rank, Column.STATE, State.DEAD)


def _ended(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][:1] in ("Z", "X")
    except OSError:
        return True


class _Flat:
    """Parameters and floating buffers as views of one vector: trained, frozen, buffers."""

    def __init__(self, module: nn.Module | Iterable[Tensor]) -> None:
        parameters = list(module.parameters() if isinstance(module, nn.Module) else module)
        buffers = list(module.buffers()) if isinstance(module, nn.Module) else []
        self._trained = [p for p in parameters if p.requires_grad]
        frozen = [p for p in parameters if not p.requires_grad]
        floating = [b for b in buffers if b.is_floating_point()]
        tensors = [*self._trained, *frozen, *floating]
        for tensor in tensors:
            if tensor.dtype != torch.float32 or tensor.device.type != "cpu":
                raise ConfigError(
                    f"a tensor is {tensor.dtype} on {tensor.device}: float32 on the CPU is shared"
                )
        if not self._trained:
            raise ConfigError("there is no parameter to train")
        self.shapes = [tuple(t.shape) for t in tensors]
        self.weights = torch.cat([t.detach().reshape(-1) for t in tensors])
        self._trained_stop = sum(p.numel() for p in self._trained)
        self._buffers_start = self.weights.numel() - sum(b.numel() for b in floating)
        self.gradient = torch.zeros_like(self.weights)
        for tensor, view in zip(tensors, self._views(self.weights, tensors), strict=True):
            tensor.data = view

    @staticmethod
    def _views(flat: Tensor, like: list[Tensor]) -> Iterator[Tensor]:
        start = 0
        for tensor in like:
            yield flat[start : start + tensor.numel()].view(tensor.shape)
            start += tensor.numel()

    def vectors(self) -> Vectors:
        return Vectors(
            weights=self.weights.numpy(),
            gradient=self.gradient.numpy(),
            trained=self._trained_stop,
            statistics=self._buffers_start,
        )

    def gather_gradients(self) -> None:
        for parameter, view in zip(self._trained, self._views(self.gradient, self._trained), strict=True):
            if parameter.grad is None:
                view.zero_()
            else:
                view.copy_(parameter.grad)

    def spread_gradients(self) -> None:
        for parameter, view in zip(self._trained, self._views(self.gradient, self._trained), strict=True):
            if parameter.grad is None:
                parameter.grad = view.clone()
            else:
                parameter.grad.copy_(view)

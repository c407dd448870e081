"""The test phase: the test nets on the center's weights, averaged over test_iter batches each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch

from prototxt.net import Net
from shmtrain.config import TrainConfig
from shmtrain.debug import watched_forward
from shmtrain.learner import Learner, open_net
from shmtrain.log import Log, number, outputs
from shmtrain.params import F32
from shmtrain.settings import TestRun


@dataclass(frozen=True)
class Score:
    """One test net's means: ``values`` by output name (a list where an output has several elements)."""

    net: int
    loss: float | None
    values: dict[str, list[float]] = field(default_factory=dict)


class Interrupted(Exception):
    """A stop was requested while a test ran."""


class Tester:
    """The test nets of one training, on weights of their own: the training net's, or a copy of the center.

    ``poll`` is asked before every batch and raises Interrupted when the test must end.
    """

    def __init__(self, learner: Learner, log: Log) -> None:
        self._learner, self._log = learner, log
        self._config: TrainConfig = learner.config
        self.nets: list[Net] = []
        for index, test in enumerate(self._config.tests):
            log.info(f"Creating test net (#{index}) specified by {test.net.label}")
            net = open_net(test.net, self._config, learner.role)
            self.nets.append(net)
            for path in self._config.start.weights:
                log.info(f"Finetuning from {path}")
                net.copy_from(path)

    def test_all(self, iteration: int, weights: F32 | None, poll: Callable[[], None]) -> list[Score]:
        """Test every net; ``weights`` (n,) is the center, None for the training net's own."""
        if weights is None:
            return self._test_each(iteration, poll)
        with self._learner.params.holding(weights):
            return self._test_each(iteration, poll)

    def _test_each(self, iteration: int, poll: Callable[[], None]) -> list[Score]:
        pairs = zip(self.nets, self._config.tests, strict=True)
        return [self._test(i, net, run, iteration, poll) for i, (net, run) in enumerate(pairs)]

    def _test(self, index: int, net: Net, run: TestRun, iteration: int, poll: Callable[[], None]) -> Score:
        self._log.info(f"Iteration {iteration}, Testing net (#{index})")
        net.share_with(self._learner.net)
        loss = 0.0
        sums: dict[str, F32] = {}
        with torch.no_grad():
            for _ in range(run.iterations):
                poll()
                outcome = watched_forward(net, self._log) if self._config.run.debug_info else net.run()
                loss += float(outcome.loss.detach())
                for name, value in outcome.outputs.items():
                    values = value.detach().reshape(-1).numpy().astype(np.float32)
                    sums[name] = sums[name] + values if name in sums else values
        means = {name: (total / run.iterations).tolist() for name, total in sums.items()}
        mean_loss = loss / run.iterations if self._config.schedule.test_compute_loss else None
        self._report(net, mean_loss, means)
        return Score(index, mean_loss, means)

    def _report(self, net: Net, loss: float | None, means: dict[str, list[float]]) -> None:
        if loss is not None:
            self._log.info(f"Test loss: {number(loss)}")
        for line in output_lines(net, means):
            self._log.info(f"    Test net output {line}")

    def close(self) -> None:
        """End the nets' readers; closing twice is fine."""
        for net in self.nets:
            net.close()


def output_lines(net: Net, values: dict[str, list[float]]) -> list[str]:
    """The log's lines of net outputs: one a value, the outputs alphabetical, as the original counts them."""
    weights = net.blob_loss_weights
    flat = [(name, value) for name in sorted(values) for value in values[name]]
    return outputs(
        [name for name, _ in flat],
        [value for _, value in flat],
        [weights.get(name, 0.0) for name, _ in flat],
    )

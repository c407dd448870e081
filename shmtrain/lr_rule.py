"""The learning rate of N workers that share max_iter, so that equal samples give equal accuracy.

With N workers each makes only max_iter/N local updates: at the rate of one worker the center goes a shorter
way on the same samples. The rule multiplies the rate that the solver's policy gives for the job's iteration.
"""

from __future__ import annotations

from dataclasses import dataclass

DEFAULT_POWER = 0.75
DEFAULT_WARMUP = 50
DEFAULT_RULE = f"power:{DEFAULT_POWER}"


@dataclass(frozen=True)
class LrRule:
    """rate = policy rate x N^power, reached in a straight line from the policy's own rate.

    power   0 leaves the rate alone, 1 is the linear rule (Goyal et al. 2017)
    warmup  steps of one worker over which the factor grows from 1; 0 for none
    """

    power: float = DEFAULT_POWER
    warmup: int = DEFAULT_WARMUP

    def factor(self, workers: int, iteration: int) -> float:
        """What the policy's rate is multiplied with at the job's ``iteration`` (from 0) of ``workers``.

        The job's iterations count the steps of all workers, so that a resumed job doesn't warm up again.
        Exactly 1 for one worker, so that its arithmetic is the original's.
        """
        if workers == 1 or self.power == 0:
            return 1.0
        full = self._full(workers)
        step = iteration // workers
        return full if step >= self.warmup else 1.0 + (full - 1.0) * (step + 1) / (self.warmup + 1)

    def _full(self, workers: int) -> float:
        return float(pow(float(workers), self.power))

    def describe(self, workers: int) -> str:
        """The line that the log shows at the start."""
        if workers == 1 or self.power == 0:
            return "the solver's own rate"
        full = self._full(workers)
        text = f"the solver's rate x {workers}^{self.power:g} = x {full:.3g}"
        return text + (f" after {self.warmup} warm-up steps of each worker" if self.warmup else "")


def parse_lr_rule(text: str, warmup: int = DEFAULT_WARMUP) -> LrRule:
    """``none``, ``linear`` or ``power:P`` with 0 <= P <= 1.5. Raises ValueError with the words to show."""
    if warmup < 0:
        raise ValueError(f"--warmup {warmup} is below 0")
    if text == "none":
        return LrRule(0.0, 0)
    if text == "linear":
        return LrRule(1.0, warmup)
    name, _, value = text.partition(":")
    try:
        power = float(value) if name == "power" else -1.0
    except ValueError:
        power = -1.0
    if not 0 <= power <= 1.5:
        raise ValueError(f"--lr-rule {text!r} is none of none, linear, power:P with P from 0 to 1.5")
    return LrRule(power, warmup)

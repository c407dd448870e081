"""The process-wide settings that the original's Python face has: mode, device, random seed."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class _Settings:
    """seed  of the next net, None for one from the clock; each net built takes one further."""

    seed: int | None = None


_settings = _Settings()


def set_mode_cpu() -> None:
    """Compute on the CPU: the only mode, so nothing changes."""


def set_mode_gpu() -> None:
    """Raises RuntimeError: this build computes on the CPU alone."""
    raise RuntimeError("set_mode_gpu: nets run on the CPU only; use set_mode_cpu")


def set_device(device: int) -> None:
    """Raises RuntimeError: this build computes on the CPU alone."""
    raise RuntimeError(f"set_device({device}): nets run on the CPU only; use set_mode_cpu")


def set_random_seed(seed: int) -> None:
    """Seed the fillers and layers of the nets built from now on."""
    _settings.seed = seed


def next_seed() -> int | None:
    """The seed for one more net; None where none was set."""
    seed = _settings.seed
    if seed is not None:
        _settings.seed = seed + 1
    return seed


def layer_type_list() -> list[str]:
    """The layer types that nets can have, alphabetical."""
    from prototxt.registry import layer_types

    return layer_types()


def solver_count() -> int:
    return 1


def solver_rank() -> int:
    return 0

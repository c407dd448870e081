"""``shmtrain device-query``: processor, memory, instruction sets, torch, and GPUs where there are."""

from __future__ import annotations

import argparse
import json
import os
import platform
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from shmtrain.commands.common import command_parser, reported

# Those that torch and its libraries choose their kernels by, in the order of their age.
INSTRUCTIONS = (
    "sse4_2", "avx", "f16c", "fma", "avx2", "avx512f", "avx512bw", "avx512vl", "avx512_vnni", "avx512_bf16",
    "avx_vnni", "avx512_fp16", "amx_tile", "amx_bf16", "amx_int8", "asimd", "asimdhp", "asimddp", "sve",
    "sve2", "bf16", "i8mm",
)  # fmt: skip


def main(argv: Sequence[str]) -> int:
    """The command; returns its exit code."""
    args = parser().parse_args(argv)
    return reported("device-query", lambda: _run(args))


def parser() -> argparse.ArgumentParser:
    """The command's options."""
    p = command_parser(
        "device-query",
        "Say what this machine computes with: processor, cores, memory, instruction sets, torch and its "
        "threads, GPUs where there are.",
        "shmtrain device-query",
    )
    p.add_argument("--json", action="store_true", help="one JSON object instead of lines")
    return p


def _run(args: argparse.Namespace) -> None:
    found = {"cpu": cpu(), "torch": torch_build(), "gpus": gpus()}
    if args.json:
        print(json.dumps(found))
        return
    for line in lines(found):
        print(line)


def cpu(proc: Path = Path("/proc")) -> dict[str, Any]:
    """Model, cores (of the machine, and those this process may use), memory in bytes, instruction sets."""
    fields: dict[str, str] = {}
    for line in _text(proc / "cpuinfo").splitlines():
        name, _, value = line.partition(":")
        fields.setdefault(name.strip(), value.strip())
    flags = set((fields.get("flags") or fields.get("Features") or "").split())
    memory = {
        line.split(":")[0]: int(line.split()[1]) * 1024
        for line in _text(proc / "meminfo").splitlines()
        if len(line.split()) > 1 and line.split()[1].isdigit()
    }
    return {
        "model": fields.get("model name") or platform.processor() or platform.machine(),
        "cores": os.cpu_count() or 1,
        "usable_cores": len(os.sched_getaffinity(0)),
        "memory": memory.get("MemTotal", 0),
        "available": memory.get("MemAvailable", 0),
        "instructions": [name for name in INSTRUCTIONS if name in flags],
    }


def _text(path: Path) -> str:
    """A file of /proc; nothing where it cannot be read."""
    try:
        return path.read_text()
    except OSError:
        return ""


def torch_build() -> dict[str, Any]:
    """torch's version, its threads, and the instruction set that its kernels use here."""
    import torch

    return {
        "version": torch.__version__,
        "threads": torch.get_num_threads(),
        "interop_threads": torch.get_num_interop_threads(),
        "kernels": torch.backends.cpu.get_cpu_capability(),
        "mkldnn": torch.backends.mkldnn.is_available(),  # type: ignore[no-untyped-call]
        "mkl": torch.backends.mkl.is_available(),  # type: ignore[no-untyped-call]
        "cuda": torch.version.cuda,
    }


def gpus() -> list[dict[str, Any]]:
    """Name, compute capability, memory in bytes and processors of each GPU that torch sees."""
    import torch

    if not torch.cuda.is_available():
        return []
    found = []
    for index in range(torch.cuda.device_count()):
        p = torch.cuda.get_device_properties(index)
        free, total = torch.cuda.mem_get_info(index)
        found.append(
            {
                "name": p.name,
                "capability": f"{p.major}.{p.minor}",
                "memory": total,
                "free": free,
                "processors": p.multi_processor_count,
            }
        )
    return found


def lines(found: dict[str, Any]) -> list[str]:
    """The findings for people."""
    cpu_, torch_ = found["cpu"], found["torch"]
    with_ = [name for name in ("mkldnn", "mkl") if torch_[name]]
    built = f"built for CUDA {torch_['cuda']}" if torch_["cuda"] else "built without CUDA"
    rows = [
        ("processor", cpu_["model"]),
        ("cores", f"{cpu_['cores']}, of which this process may use {cpu_['usable_cores']}"),
        ("memory", f"{_gib(cpu_['memory'])}, {_gib(cpu_['available'])} of it available"),
        ("instruction sets", " ".join(cpu_["instructions"]) or "unknown"),
        ("torch", f"{torch_['version']}, {built}; {' '.join(['kernels for', torch_['kernels'], *with_])}"),
        ("threads", f"{torch_['threads']} in an operation, {torch_['interop_threads']} operations at once"),
    ]
    for index, gpu in enumerate(found["gpus"]):
        text = f"{gpu['name']}, compute capability {gpu['capability']}, {gpu['processors']} multiprocessors, "
        rows.append((f"GPU {index}", f"{text}{_gib(gpu['memory'])}, {_gib(gpu['free'])} of it free"))
    if not found["gpus"]:
        rows.append(("GPUs", "none that torch sees"))
    width = max(len(name) for name, _ in rows)
    return [f"{name:<{width}}  {text}" for name, text in rows]


def _gib(count: int) -> str:
    return f"{count / 2**30:.1f} GiB"

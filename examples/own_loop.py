"""A training loop of one's own whose workers share weights: own_loop.py --workers 2 --algorithm sync.

Each worker fits a sine to samples of its own. What is tested is the weights that they share.
"""

from __future__ import annotations

import argparse
import multiprocessing
import tempfile

import torch
from torch import nn

import shmtrain
import smb


def samples(count: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.rand(count, 1, generator=torch.Generator().manual_seed(seed)) * 6 - 3
    return x, torch.sin(x)


def train(rank: int, workers: int, address: str, algorithm: str) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(rank)
    model = nn.Sequential(nn.Linear(1, 32), nn.Tanh(), nn.Linear(32, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    x, y = samples(256, seed=rank)
    options = {"rank": rank, "workers": workers, "optimizer": optimizer}
    with shmtrain.Exchange(model, address, algorithm, **options) as exchange:
        for _ in range(200):
            optimizer.zero_grad()
            nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
            exchange.step()
        if rank == 0:
            with exchange.holding_center(), torch.no_grad():
                x, y = samples(1000, seed=10_000)
                print(f"{algorithm}, {workers} workers: {exchange.stats.summary()}")
                print(f"mean squared error of the shared weights: {nn.functional.mse_loss(model(x), y):.4f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--algorithm", default="seasgd")
    arguments = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder, smb.serve(unix=f"{folder}/box.sock") as daemon:
        given = (arguments.workers, daemon.addresses[0], arguments.algorithm)
        workers = [context.Process(target=train, args=(r, *given)) for r in range(arguments.workers)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        raise SystemExit(max(abs(worker.exitcode or 0) for worker in workers))


if __name__ == "__main__":
    main()

"""A worker that joins a job which runs already: it takes a row in the job's table and starts from the center.

How the job shares its weights is in the table's segment, put there by whoever began it: the solver file of
one that joins says what net it trains, and the job how. Loads no torch before it has its row.
"""

from __future__ import annotations

import json
import os
import sys
from contextlib import ExitStack
from dataclasses import asdict, replace
from typing import Any

import smb
from shmtrain.config import TrainConfig
from shmtrain.grace import LastingProgress
from shmtrain.group import rows_lock
from shmtrain.handover import BoxPlace, Console, Handover
from shmtrain.lifeline import HandedDown
from shmtrain.log import Log
from shmtrain.lr_rule import LrRule
from shmtrain.method import METHODS, Method
from shmtrain.options import ConfigError
from shmtrain.settings import Sharing, Start

SPARE = 16  # rows of a job's table for workers that come later
PATIENCE = 30.0  # seconds until others that join have taken their rows
FAILED = 1


def description(config: TrainConfig, tickets: int) -> bytes:
    """What the job's table tells those that join."""
    return json.dumps({"sharing": asdict(config.sharing), "tickets": tickets}).encode()


def room(config: TrainConfig, tickets: int) -> dict[str, Any]:
    """What a job's table is made with: rows for those that join, where there is a box that they can reach."""
    if config.sharing.smb is None:
        return {}
    return {"spare": SPARE, "meta": description(config, tickets)}


def run(config: TrainConfig, console: Console) -> int:
    """Join the job and train until it ends, or until this worker is told to leave; the exit code."""
    told_by_user = config.sharing
    if told_by_user.smb is None or told_by_user.job is None:
        raise ConfigError("--join needs --smb ADDR and --job NAME: which job, and in which box")
    with Log([sys.stderr], config.run.log) as told, ExitStack() as stack:
        try:
            box = stack.enter_context(
                smb.connect(told_by_user.smb, name="joining", reconnect=told_by_user.grace)
            )
            handover = _take_row(box, config, console)
        except (smb.SmbError, ConfigError) as error:
            told.error(f"Cannot join: {error}")
            return FAILED
        stack.callback(os.close, handover.launcher.fd)
        sharing = handover.config.sharing
        began = f"{sharing.workers} worker" + "s" * (sharing.workers > 1)
        told.info(
            f"Worker {handover.rank} (pid {os.getpid()}) joins job {handover.job} ({sharing.algorithm}),"
            f" which began with {began}"
        )
        from shmtrain.worker import take_part

        return take_part(handover)


def _take_row(box: smb.Box, config: TrainConfig, console: Console) -> Handover:
    """Raises ConfigError and SmbError when there is no such job or no room in it."""
    address, job = str(config.sharing.smb), str(config.sharing.job)
    try:
        progress = LastingProgress.attach(box, job)
    except smb.UnknownKey:
        raise ConfigError(f"no job {job!r} runs in the box at {address}") from None
    sharing, tickets = _described(progress.meta, config.sharing)
    with box.lock(rows_lock(job), PATIENCE):
        rank = progress.take_row(os.getpid())
    if rank is None:
        raise ConfigError(f"job {job!r} has no room for another worker: all {progress.size} rows are taken")
    return Handover(
        config=replace(config, sharing=sharing, start=Start(weights=(), snapshot=None, resume=False)),
        console=console,
        rank=rank,
        job=job,
        box=BoxPlace(address, False, ""),
        tickets=tickets,
        launcher=HandedDown(os.pidfd_open(os.getpid())),
        pid=os.getpid(),
        joining=True,
    )


def _described(meta: bytes, mine: Sharing) -> tuple[Sharing, int]:
    """How the job shares, by way of this worker's own address. Raises ConfigError when it takes nobody in."""
    if not meta:
        raise ConfigError("nobody can join this job: it was begun without a box of its own (--smb)")
    try:
        told: dict[str, Any] = json.loads(meta)
        told["sharing"] |= {
            "method": Method(**told["sharing"]["method"]),
            "lr_rule": LrRule(**told["sharing"]["lr_rule"]),
            "smb": mine.smb,
            "job": mine.job,
            "box_grace": mine.box_grace,
        }
        sharing, tickets = Sharing(**told["sharing"]), int(told["tickets"])
    except (ValueError, TypeError, KeyError) as error:
        raise ConfigError(f"the job was begun by another version of shmtrain ({error})") from error
    if sharing.algorithm not in METHODS:
        raise ConfigError(f"the job's algorithm {sharing.algorithm!r} is unknown here")
    return sharing, tickets

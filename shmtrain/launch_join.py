"""A worker that joins a job which runs already: it takes a row in the job's table and starts from the center.

How the job shares its weights is in the table's segment, put there by whoever began it: the solver file of
one that joins says what net it trains, and the job how. Loads no torch before it has its row.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
from contextlib import ExitStack, suppress
from dataclasses import asdict, replace
from types import FrameType
from typing import Any, NoReturn

import smb
from shmtrain.config import TrainConfig
from shmtrain.grace import LastingProgress
from shmtrain.group import Column, State, rows_lock
from shmtrain.handover import BoxPlace, Console, Handover
from shmtrain.launch_marks import announce
from shmtrain.lifeline import HandedDown
from shmtrain.log import Log
from shmtrain.lr_rule import LrRule
from shmtrain.method import METHODS, Method
from shmtrain.options import ConfigError
from shmtrain.settings import Sharing, Start
from shmtrain.tempdir import sockets

SPARE = 16  # rows of a job's table for workers that come later
PATIENCE = 30.0  # seconds until others that join have taken their rows
ANSWER = 5.0  # seconds for a box to say whether the job is in it
OK, FAILED = 0, 1


def description(config: TrainConfig, tickets: int) -> bytes:
    """What the job's table tells those that join."""
    sharing = config.sharing
    told = {"sharing": asdict(sharing), "tickets": tickets, "embedded": sharing.smb is None}
    return json.dumps(told).encode()


def room(config: TrainConfig, tickets: int) -> dict[str, Any]:
    """What a job's table is made with: rows for those that join.

    Workers that keep step do it in another way where others may come: only in a box of its own.
    """
    if config.sharing.smb is None and not METHODS[config.sharing.algorithm].claims_freely:
        return {}
    return {"spare": SPARE, "meta": description(config, tickets)}


class _Told(BaseException):
    """SIGTERM has come before this worker trains."""


def _leave(number: int, frame: FrameType | None) -> NoReturn:
    raise _Told


def run(config: TrainConfig, console: Console) -> int:
    """Join the job and train until it ends, or until this worker is told to leave; the exit code."""
    if config.sharing.job is None:
        raise ConfigError("--join needs --job NAME, and --smb ADDR where the job's box is not its own")
    signal.signal(signal.SIGTERM, _leave)  # the training puts its own in its place
    with Log([sys.stderr], config.run.log) as told, ExitStack() as stack:
        handover = None
        try:
            address = config.sharing.smb or _find(config.sharing.job)
            box = stack.enter_context(smb.connect(address, name="joining", reconnect=config.sharing.grace))
            handover = _take_row(box, address, config, console)
            stack.callback(os.close, handover.launcher.fd)
            return _train(handover, told)
        except (smb.SmbError, ConfigError) as error:
            told.error(f"Cannot join: {error}")
            return FAILED
        except _Told:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            if handover is not None:
                with suppress(smb.SmbError):
                    LastingProgress.attach(box, handover.job).put(handover.rank, Column.STATE, State.LEFT)
            told.info("Told to leave: this worker ends before it has trained")
            return OK


def _train(handover: Handover, told: Log) -> int:
    sharing = handover.config.sharing
    began = f"{sharing.workers} worker" + "s" * (sharing.workers > 1)
    told.info(
        f"Worker {handover.rank} (pid {os.getpid()}) joins job {handover.job} ({sharing.algorithm}),"
        f" which began with {began}"
    )
    from shmtrain.worker import take_part

    return take_part(handover)


def _find(job: str) -> str:
    """The address of the box in which a job of this user's runs that holds its box itself, on this machine.

    Raises ConfigError when there is none, or more than one.
    """
    found = [address for path in sockets() if _runs_in(address := f"unix:{path}", job)]
    if len(found) > 1:
        raise ConfigError(f"{len(found)} jobs are called {job!r}: choose one by --smb {' or '.join(found)}")
    if found:
        return found[0]
    raise ConfigError(
        f"no job {job!r} of yours that holds its box itself runs on this machine (looked in"
        f" {tempfile.gettempdir()}): name the box with --smb ADDR, as the job's log has it"
    )


def _runs_in(address: str, job: str) -> bool:
    with suppress(smb.SmbError, OSError), smb.connect(address, name="joining", timeout=ANSWER) as box:
        LastingProgress.attach(box, job)
        return True
    return False


def _take_row(box: smb.Box, address: str, config: TrainConfig, console: Console) -> Handover:
    """Raises ConfigError and SmbError when there is no such job or no room in it."""
    job = str(config.sharing.job)
    try:
        progress = LastingProgress.attach(box, job)
    except smb.UnknownKey:
        raise ConfigError(f"no job {job!r} runs in the box at {address}") from None
    sharing, tickets = _described(progress.meta, replace(config.sharing, smb=address))
    with box.lock(rows_lock(job), PATIENCE):
        rank = progress.rows().vacant
        if rank is None:
            size = progress.size
            raise ConfigError(f"job {job!r} has no room for another worker: all {size} rows are taken")
        announce(box, job, rank)
        progress.take_row(rank, os.getpid())
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
        raise ConfigError("nobody can join this job: its workers keep step, and it was begun without --smb")
    try:
        told: dict[str, Any] = json.loads(meta)
        told["sharing"] |= {
            "method": Method(**told["sharing"]["method"]),
            "lr_rule": LrRule(**told["sharing"]["lr_rule"]),
            "smb": mine.smb,
            "job": mine.job,
            "box_grace": 0.0 if told["embedded"] else mine.box_grace,
        }
        sharing, tickets = Sharing(**told["sharing"]), int(told["tickets"])
    except (ValueError, TypeError, KeyError) as error:
        raise ConfigError(f"the job was begun by another version of shmtrain ({error})") from error
    if sharing.algorithm not in METHODS:
        raise ConfigError(f"the job's algorithm {sharing.algorithm!r} is unknown here")
    return sharing, tickets

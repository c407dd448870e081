"""The command line of ``shmtrain``. Loads no torch before a training or timing begins.

Exit codes: 0 done or stopped early on request, 1 a failed run, 2 wrong usage.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from importlib import import_module
from typing import TYPE_CHECKING, cast

from shmtrain.method import METHODS, SERVERS, WAYS, WIRES
from shmtrain.options import BATCH, DATA, PRECISIONS

if TYPE_CHECKING:
    from shmtrain.options import MethodOptions, Options

TERMINATIONS = ("counter", "master", "fastest", "mean")
EFFECTS = ("stop", "snapshot", "none")
OK, FAILED, USAGE = 0, 1, 2

# name: (module, what it does); its main(arguments) runs it and returns the exit code, parser() is its parser
COMMANDS = {
    "test": ("shmtrain.commands.test", "a net with its weights over batches of its data: outputs, means"),
    "time": ("shmtrain.timing", "forward and backward milliseconds of each layer"),
    "classify": ("shmtrain.commands.classify", "the most probable classes of images"),
    "extract-features": ("shmtrain.commands.features", "a net's blobs over its data, to LMDB, HDF5 or .npz"),
    "summary": ("shmtrain.commands.summary", "a net's layers: shapes, parameters, multiply-adds"),
    "draw": ("shmtrain.commands.draw", "a net as a picture: SVG, PNG, PDF"),
    "upgrade": ("shmtrain.commands.upgrade", "files of earlier formats in today's"),
    "device-query": ("shmtrain.commands.devices", "what this machine computes with"),
    "data": ("shmtrain.data_cli", "databases of images, MNIST, CIFAR-10; their means; what they hold"),
    "compare": ("shmtrain.compare.command", "the same training by several ways, side by side: table, plots"),
    "simulate": ("shmtrain.simulate.cli", "machines that are not at hand: speed, staleness"),
    "bench": ("shmtrain.bench.cli", "the box against MPI and gloo on the same vectors"),
    "completion": ("shmtrain.commands.completion", "a script for bash, zsh or fish that completes all this"),
}

EXAMPLES = """\
examples:
  shmtrain solver.prototxt                              one worker: the original's loop
  shmtrain solver.prototxt --workers 4                  four workers that share weights through a memory box
  shmtrain solver.prototxt --workers 4 --smb unix:PATH  the same through a box that `smb serve` holds
  mpirun -n 4 shmtrain solver.prototxt                  each process is a worker; torchrun and srun, too
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    named = COMMANDS.get(arguments[0]) if arguments else None
    try:
        return _command(named[0], arguments[1:]) if named else _train(arguments)
    except KeyboardInterrupt:
        print("shmtrain: interrupted", file=sys.stderr)
        return FAILED


def parser() -> argparse.ArgumentParser:
    """The options of a training."""
    p = argparse.ArgumentParser(
        prog="shmtrain",
        usage="shmtrain SOLVER.prototxt [options] | shmtrain COMMAND ...",
        description="Train a Caffe solver on torch; workers share weights through a memory box.",
        epilog=_epilog(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    p.add_argument(
        "solver", metavar="SOLVER.prototxt", help="the solver file; its paths are relative to here"
    )
    _add_sharing(p)
    _add_method(p)
    _add_start(p)
    _add_run(p)
    return p


def _epilog() -> str:
    width = max(map(len, COMMANDS))
    lines = (f"  {name:<{width}}  {does}" for name, (_, does) in COMMANDS.items())
    return "\n".join(["other commands (each has a --help):", *lines, "", EXAMPLES])


def _command(module: str, argv: Sequence[str]) -> int:
    """Load and run another command; what it needs (torch, often) is loaded only then."""
    return cast(int, import_module(module).main(argv))


def _add_sharing(p: argparse.ArgumentParser) -> None:
    g = p.add_argument_group("workers and how they share")
    g.add_argument("--workers", type=int, metavar="N", help="worker processes on this host (1)")
    g.add_argument(
        "--smb",
        metavar="ADDR",
        help="memory box: unix:PATH or HOST:PORT, several with commas (one in the launcher)",
    )
    g.add_argument(
        "--box-grace", type=float, default=60.0, metavar="S", help="how long an outside box may be away (60)"
    )
    g.add_argument("--job", metavar="NAME", help="the job's name, prefix of its keys in the box (made up)")
    g.add_argument(
        "--join", action="store_true", help="be one more worker of the running --job, by its own options"
    )
    g.add_argument("--algorithm", choices=tuple(METHODS), default="seasgd", help="how they meet (seasgd)")
    g.add_argument("--exchange", choices=WAYS, help="seasgd: in one pass, or what overlaps it (fused)")
    g.add_argument("--alpha", "--moving-rate", type=float, metavar="A", help="moving rate, fixed (beta/N)")
    g.add_argument(
        "--tau", "--update-interval", type=int, metavar="T", help="steps between exchanges (1; diloco 100)"
    )
    g.add_argument(
        "--termination", choices=TERMINATIONS, default="counter",
        help="max_iter shared by a counter, or one of the paper's rules (counter)",
    )  # fmt: skip
    g.add_argument("--lr-rule", metavar="RULE", help="for N workers: none, linear, power:P (the algorithm's)")
    g.add_argument("--warmup", type=int, default=50, metavar="STEPS", help="until that rate is reached (50)")
    g.add_argument("--threads", type=int, metavar="T", help="torch threads of each worker (cores/N)")
    g.add_argument("--data", choices=DATA, default="split", help="each its share, or what it claims (split)")
    g.add_argument(
        "--batch", choices=BATCH, default="each",
        help="the net's batch is each worker's own, or that of all together (each)",
    )  # fmt: skip
    g.add_argument("--share-data", action="store_true", help="one reader feeds all workers of a machine")
    g.add_argument("--stuck", type=float, default=60.0, metavar="S", help="name a worker idle for S s (60)")


def _add_method(p: argparse.ArgumentParser) -> None:
    """One option a field of MethodOptions; what belongs to another algorithm is refused."""
    g = p.add_argument_group("options of single algorithms")
    g.add_argument(
        "--beta",
        type=float,
        metavar="B",
        help="elastic: alpha is beta/N as workers come and go (0.9; fused, hybrid: alpha from 0.2 on)",
    )
    g.add_argument(
        "--warm-start", type=int, metavar="K", help="elastic, downpour: one worker alone for K (0)"
    )
    g.add_argument(
        "--staleness", metavar="POLICY",
        help="asynchronous: none, inverse, exponential:R, drop:S, bounded:S (none)",
    )  # fmt: skip
    g.add_argument("--n-fetch", type=int, metavar="F", help="downpour: steps between two reads (1)")
    g.add_argument("--n-push", type=int, metavar="P", help="downpour: steps between two pushes (1)")
    g.add_argument("--server", choices=SERVERS, help="downpour: how the center takes a push (sgd)")
    g.add_argument("--server-rate", type=float, metavar="R", help="downpour: rate of adagrad (0.003)")
    g.add_argument("--backup-workers", type=int, metavar="B", help="sync: so many may come too late (0)")
    g.add_argument("--group-size", type=int, metavar="G", help="hybrid: workers of a synchronous group (2)")
    g.add_argument("--bucket-mib", type=float, metavar="M", help="allreduce, hybrid: MiB at once (4)")
    g.add_argument("--outer-lr", type=float, metavar="R", help="diloco: rate of the outer step (0.9; 0.7)")
    g.add_argument("--outer-momentum", type=float, metavar="M", help="diloco: its momentum (0.6; 0.5)")
    g.add_argument("--asynchronous", action="store_true", default=None, help="diloco: nobody waits")
    g.add_argument(
        "--outer-buffer", type=int, metavar="N", help="diloco, asynchronous: pushes a momentum (N)"
    )
    g.add_argument("--fragments", type=int, metavar="P", help="diloco: parts exchanged in turns (1)")
    g.add_argument("--overlap", type=int, metavar="K", help="diloco: steps until a mean is taken (0)")
    g.add_argument(
        "--dynamic", action="store_true", default=None, help="diloco: slower workers make fewer steps a round"
    )
    g.add_argument(
        "--wire",
        choices=WIRES,
        help="elastic, hybrid: increments, remotely (float32); diloco: changes (int8)",
    )
    g.add_argument("--wait-limit", type=float, metavar="S", help="longest wait for other workers (300)")


def _add_start(p: argparse.ArgumentParser) -> None:
    g = p.add_argument_group("what to start from")
    one = g.add_mutually_exclusive_group()
    one.add_argument("--snapshot", metavar="F", help="go on from this .solverstate")
    one.add_argument("--weights", metavar="F[,F]", help="start from these .caffemodel files")
    one.add_argument("--resume", action="store_true", help="go on from the newest whole snapshot, if any")
    g.add_argument("--max-iter", type=int, metavar="N", help="instead of the solver's max_iter")
    g.add_argument("--seed", type=int, metavar="N", help="instead of the solver's random_seed")
    g.add_argument("--level", type=int, default=0, help="of the training net's state")
    g.add_argument("--stage", default="", metavar="S[,S]", help="added to the training net's state")


def _add_run(p: argparse.ArgumentParser) -> None:
    g = p.add_argument_group("the run")
    g.add_argument(
        "--precision", choices=PRECISIONS, default="float32",
        help="bf16: layers that may work in bfloat16; the weights stay float32 (float32)",
    )  # fmt: skip
    g.add_argument("--compile", action="store_true", help="let torch's compiler join layers of the net")
    g.add_argument("--log-dir", metavar="DIR", help="log, metrics and each worker's log go there")
    g.add_argument("--tensorboard", metavar="DIR", help="write TensorBoard events there")
    g.add_argument("--no-progress", action="store_true", help="no progress bar on a terminal")
    g.add_argument("--sigint-effect", choices=EFFECTS, default="stop", help="of Ctrl-C (stop)")
    g.add_argument("--sighup-effect", choices=EFFECTS, default="snapshot", help="of SIGHUP (snapshot)")


def _train(argv: Sequence[str]) -> int:
    p = parser()
    _check_command(p, argv)
    args = p.parse_args(argv)
    from prototxt.errors import PrototxtError
    from shmtrain import launch
    from shmtrain.config import TrainConfig
    from shmtrain.environment import workers_here
    from shmtrain.handover import Console
    from shmtrain.options import ConfigError

    if not args.stuck > 0:  # NaN, too
        p.error(f"--stuck {args.stuck:g}: must be above 0 seconds")
    if args.join and args.workers not in (None, 1):
        p.error(
            f"--workers {args.workers} with --join: it is one worker; start it once for each that shall join"
        )
    try:
        place, workers = workers_here(args.workers, args.algorithm)
        options = replace(options_of(args, workers), by_machine=place is not None)
        config = TrainConfig.load(args.solver, options)
        return launch.run(config, Console(progress=not args.no_progress, stuck=args.stuck), place)
    except ConfigError as error:
        p.error(str(error))
    except (PrototxtError, OSError) as error:
        print(f"shmtrain: {error}", file=sys.stderr)
        return FAILED


def _check_command(p: argparse.ArgumentParser, argv: Sequence[str]) -> None:
    """A first word that is neither a file nor a command ends with the nearest of those that there are."""
    word = argv[0] if argv else ""
    if not word.replace("-", "").isalpha() or word.startswith("-") or os.path.exists(word):
        return
    if word == "train":
        p.error(
            "no command is called 'train': `caffe train --solver=F --snapshot=S` is `shmtrain F --snapshot S`"
        )
    import difflib

    near = difflib.get_close_matches(word, COMMANDS, 1)
    hint = f"; did you mean {near[0]!r}?" if near else f" (commands: {', '.join(COMMANDS)})"
    p.error(f"{word!r} is neither a solver file here nor a command{hint}")


def options_of(args: argparse.Namespace, workers: int) -> Options:
    """The part of the command line that the configuration is made of."""
    from shmtrain.options import Options

    return Options(
        workers=workers,
        algorithm=args.algorithm,
        exchange=args.exchange,
        method=_method_options(args),
        alpha=args.alpha,
        tau=args.tau,
        termination=args.termination,
        lr_rule=args.lr_rule,
        warmup=args.warmup,
        smb=args.smb,
        job=args.job,
        join=args.join,
        box_grace=args.box_grace,
        share_data=args.share_data,
        data=args.data,
        batch=args.batch,
        weights=() if args.weights is None else (args.weights,),
        snapshot=args.snapshot,
        resume=args.resume,
        level=args.level,
        stages=tuple(s for s in args.stage.split(",") if s),
        sigint_effect=args.sigint_effect,
        sighup_effect=args.sighup_effect,
        threads=args.threads,
        seed=args.seed,
        max_iter=args.max_iter,
        log_dir=args.log_dir,
        tensorboard=args.tensorboard,
        precision=args.precision,
        compile=args.compile,
    )


def _method_options(args: argparse.Namespace) -> MethodOptions:
    from dataclasses import fields

    from shmtrain.options import MethodOptions

    return MethodOptions(**{field.name: getattr(args, field.name) for field in fields(MethodOptions)})


if __name__ == "__main__":
    sys.exit(main())

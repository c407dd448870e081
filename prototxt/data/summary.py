"""What an LMDB of Datum records holds, counted in a process of its own: a broken file kills only that."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from dataclasses import dataclass

from prototxt._native import datum_head
from prototxt.data.lmdb_source import open_lmdb
from prototxt.errors import DataError


@dataclass(frozen=True)
class Summary:
    """shapes: how often each occurs, "encoded" for encoded records; labels: how often each occurs."""

    records: int
    first_key: str
    last_key: str
    bytes: int
    shapes: dict[str, int]
    labels: dict[int, int]


def summarize(source: str) -> Summary:
    """Read every record; raises DataError naming the first that is no Datum, or how the reading died."""
    # With this process's search path: a new interpreter would look in the working directory first.
    code = "import sys; _, source, *sys.path = sys.argv; from prototxt.data.summary import main; main(source)"
    words = [sys.executable, "-c", code, source, *sys.path]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode == 2:
        raise DataError(done.stdout)
    if done.returncode:
        raise DataError(f"reading {source} ended with code {done.returncode} {done.stderr[-500:]}".strip())
    values = json.loads(done.stdout)
    labels = {int(label): count for label, count in values.pop("labels").items()}
    return Summary(**values, labels=labels)


def main(source: str) -> None:
    """The process's part: print a summary as JSON; exit code 2 with the error's text instead."""
    try:
        print(json.dumps(_count(source)), end="")
    except DataError as error:
        print(error, end="")
        sys.exit(2)


def _count(source: str) -> dict[str, object]:
    shapes: Counter[str] = Counter()
    labels: Counter[int] = Counter()
    keys: list[bytes] = []
    total = 0
    with open_lmdb(source) as env, env.begin() as txn:
        for key, value in txn.cursor():
            keys = [*keys[:1], key]
            total += len(value)
            try:
                sides, label, encoded, *_ = datum_head(value)
            except ValueError as error:
                raise DataError(f"{source}: record {sum(shapes.values())} (key {key!r}) {error}") from error
            shapes["encoded" if encoded else "x".join(map(str, sides))] += 1
            labels[label] += 1
    return {
        "records": sum(shapes.values()),
        "first_key": keys[0].decode(errors="replace"),
        "last_key": keys[-1].decode(errors="replace"),
        "bytes": total,
        "shapes": dict(shapes),
        "labels": dict(sorted(labels.items())),
    }

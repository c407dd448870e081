"""What a database of Datum records holds, counted in a process of its own: a broken file kills only that."""

from __future__ import annotations

from collections import Counter
from contextlib import closing
from dataclasses import dataclass

from prototxt._native import datum_head
from prototxt.data.apart import run_apart
from prototxt.data.store import backend_of, open_store
from prototxt.errors import DataError


@dataclass(frozen=True)
class Summary:
    """shapes: how often each occurs, "encoded" for encoded records; labels: how often each occurs."""

    backend: str
    records: int
    first_key: str
    last_key: str
    bytes: int
    shapes: dict[str, int]
    labels: dict[int, int]


def summarize(source: str) -> Summary:
    """Read every record; raises DataError naming the first that is no Datum, or how the reading died."""
    values = run_apart(__name__, "count", source, source=source)
    labels = {int(label): count for label, count in values.pop("labels").items()}
    return Summary(**values, labels=labels)


def count(source: str) -> dict[str, object]:
    """The summary's fields, for the process of its own."""
    shapes: Counter[str] = Counter()
    labels: Counter[int] = Counter()
    keys: list[bytes] = []
    total = 0
    backend = backend_of(source)
    with closing(open_store(backend, source)) as store:
        for key, value in store.items():
            keys = [*keys[:1], key]
            total += len(value)
            try:
                sides, label, encoded, *_ = datum_head(value)
            except ValueError as error:
                raise DataError(f"{source}: record {sum(shapes.values())} (key {key!r}) {error}") from error
            shapes["encoded" if encoded else "x".join(map(str, sides))] += 1
            labels[label] += 1
    return {
        "backend": backend,
        "records": sum(shapes.values()),
        "first_key": keys[0].decode(errors="replace"),
        "last_key": keys[-1].decode(errors="replace"),
        "bytes": total,
        "shapes": dict(shapes),
        "labels": dict(sorted(labels.items())),
    }

"""How a daemon's log looks: lines for people, or one JSON object a line for programs."""

from __future__ import annotations

import json
import logging
import time
from typing import Any

FORMATS = ("text", "json")
TEXT = "%(asctime)s %(levelname)s %(message)s"
_OWN = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


class JsonFormatter(logging.Formatter):
    """One object a line: time (UTC, ISO 8601), level, logger, message, and the call's ``extra``."""

    def format(self, record: logging.LogRecord) -> str:
        moment = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line: dict[str, Any] = {
            "time": f"{moment}.{int(record.msecs):03}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        line.update((name, value) for name, value in vars(record).items() if name not in _OWN)
        return json.dumps(line, default=str)


def configure(shape: str, verbose: bool) -> None:
    """Log to stderr from now on: warnings and errors, with ``verbose`` what clients do too."""
    out = logging.StreamHandler()
    out.setFormatter(JsonFormatter() if shape == "json" else logging.Formatter(TEXT))
    logging.basicConfig(level=logging.INFO if verbose else logging.WARNING, handlers=[out])

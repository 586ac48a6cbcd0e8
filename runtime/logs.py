"""The log of every process of the node: lines for people, or JSON records for machines."""

import enum
import logging
import os
import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any, TextIO

import msgspec

OURS = "shoal"
"""Parent of all our loggers. They log from INFO on, the loggers of libraries from WARNING on."""


class LogFormat(enum.StrEnum):
    """How log records are written."""

    TEXT = "text"
    JSON = "json"


class JsonFormatter(logging.Formatter):
    """One JSON object per record and line.

    Its keys are ``time`` (UTC, ISO 8601), ``level``, ``process``, ``logger`` and ``message``, those
    of the record's ``extra={"fields": {...}}``, and ``exception`` if the record has one.

    Args:
        process: name of the process.
    """

    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        """Return the object."""
        fields: Mapping[str, Any] = getattr(record, "fields", {})
        time = datetime.fromtimestamp(record.created, UTC)
        entry = {
            "time": time.isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "process": self._process,
            "logger": record.name,
            "message": record.getMessage().strip(),
            **fields,
        }
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return msgspec.json.encode(entry).decode()


def configure_logging(
    process: str, log_format: LogFormat, stream: TextIO | None = None, *, prefix: bool = True
) -> None:
    """Write this process's log records in the node's format.

    Args:
        process: its name, for the reader.
        log_format: with JSON, the records of all libraries are written like ours.
        stream: where records are written; None: stderr.
        prefix: whether lines of text begin with the process's name.
    """
    handler = logging.StreamHandler(stream or sys.stderr)
    if log_format is LogFormat.JSON:
        handler.setFormatter(JsonFormatter(process))
        _take_over()
    else:
        start = f"{process}: " if prefix else ""
        handler.setFormatter(logging.Formatter(f"{start}%(message)s"))
    logging.basicConfig(handlers=[handler], level=logging.WARNING, force=True)
    logging.getLogger(OURS).setLevel(logging.INFO)
    set_vllm_level(None)


def set_vllm_level(default: int | None = logging.ERROR) -> None:
    """Give vLLM's loggers the level of ``VLLM_LOGGING_LEVEL``, which vLLM reads in any case.

    vLLM does so only when it has a configuration, and some of its modules warn at their import.

    Args:
        default: the level if the variable has none; None: the level stays as it is.
    """
    asked = os.environ.get("VLLM_LOGGING_LEVEL", "").upper()
    level = logging.getLevelNamesMapping().get(asked, default)
    if level is not None:
        logging.getLogger("vllm").setLevel(level)


def _take_over() -> None:
    """Make libraries that brought their own handlers (such as vLLM) use ours."""
    for logger in logging.root.manager.loggerDict.values():
        if isinstance(logger, logging.Logger) and logger.handlers:
            logger.handlers.clear()
            logger.propagate = True
    logging.captureWarnings(True)

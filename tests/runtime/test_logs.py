import io
import json
import logging
import warnings
from collections.abc import Iterator

import pytest

from shoal.runtime.logs import LogFormat, configure_logging, set_vllm_level
from shoal.runtime.protocol.messages import Treatment
from shoal.runtime.protocol.messages.views import SwitchView


@pytest.fixture
def stream() -> Iterator[io.StringIO]:
    """Where the log goes; the loggers are as before afterwards."""
    root = logging.getLogger()
    handlers = root.handlers[:]
    levels = {of: of.level for of in (root, *map(logging.getLogger, ("shoal", "vllm")))}
    logging.getLogger("vllm").setLevel(logging.NOTSET)  # as before it is imported
    yield io.StringIO()
    root.handlers[:] = handlers
    for logger, level in levels.items():
        logger.setLevel(level)
    logging.captureWarnings(False)


def test_lines_for_people_name_the_process(stream: io.StringIO) -> None:
    configure_logging("engine 1 runner", LogFormat.TEXT, stream)
    logging.getLogger("shoal.engine").info("all %s", "well")
    assert stream.getvalue() == "engine 1 runner: all well\n"


def test_the_process_that_the_user_started_needs_no_name(stream: io.StringIO) -> None:
    configure_logging("shoal", LogFormat.TEXT, stream, prefix=False)
    logging.getLogger("shoal.serve").info("  ready")
    assert stream.getvalue() == "  ready\n"


@pytest.mark.parametrize("log_format", LogFormat)
def test_others_are_heard_when_something_is_wrong(
    log_format: LogFormat, stream: io.StringIO
) -> None:
    configure_logging("controller", log_format, stream)
    logging.getLogger("somebody").info("chatter")
    logging.getLogger("shoal.controller").debug("details")
    assert stream.getvalue() == ""
    logging.getLogger("somebody").warning("smoke")
    assert "smoke" in stream.getvalue()


@pytest.mark.parametrize(("level", "heard"), [("ERROR", False), ("warning", True), ("wrong", True)])
def test_vllm_has_its_level_before_it_has_a_configuration(
    level: str, heard: bool, stream: io.StringIO, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", level)
    configure_logging("engine 1 runner", LogFormat.TEXT, stream)
    logging.getLogger("vllm.triton_utils").warning("smoke")
    assert ("smoke" in stream.getvalue()) == heard


@pytest.mark.parametrize(("level", "set_to"), [("info", 20), ("wrong", 40), (None, 40)])
def test_vllm_has_a_level_before_it_is_imported(
    level: str | None, set_to: int, stream: io.StringIO, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("VLLM_LOGGING_LEVEL", raising=False)
    if level is not None:
        monkeypatch.setenv("VLLM_LOGGING_LEVEL", level)
    set_vllm_level()
    assert logging.getLogger("vllm").level == set_to


def test_a_record_is_one_object(stream: io.StringIO) -> None:
    configure_logging("controller", LogFormat.JSON, stream)
    view = SwitchView(
        3, 0.0, [(0,), (1,)], [(0, 1)], Treatment.HARD, "done", None, 0.25, 1, 0, 0, 0, "load"
    )
    logging.getLogger("shoal.controller").info("  a\nb", extra={"fields": {"switch": view}})
    (line,) = stream.getvalue().splitlines()
    record = json.loads(line)
    assert record.pop("time").endswith("+00:00")
    switch = record.pop("switch")
    assert (switch["after"], switch["treatment"], switch["reason"]) == ([[0, 1]], "hard", "load")
    assert record == {
        "level": "info",
        "process": "controller",
        "logger": "shoal.controller",
        "message": "a\nb",
    }


def test_an_exception_stays_in_its_record(stream: io.StringIO) -> None:
    configure_logging("controller", LogFormat.JSON, stream)
    try:
        raise LookupError("nothing here")
    except LookupError:
        logging.getLogger("shoal.controller").exception("failed")
    (line,) = stream.getvalue().splitlines()
    assert "LookupError: nothing here" in json.loads(line)["exception"]


def test_libraries_with_handlers_of_their_own_write_json_too(stream: io.StringIO) -> None:
    loud = logging.getLogger("loud")
    own = io.StringIO()
    loud.addHandler(logging.StreamHandler(own))
    loud.propagate = False
    configure_logging("front end 0", LogFormat.JSON, stream)
    loud.warning("hear me")
    with pytest.warns(UserWarning, match="old"):
        warnings.warn("old", stacklevel=1)
    assert own.getvalue() == ""
    assert json.loads(stream.getvalue())["logger"] == "loud"


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({}, "switch 3: [0] [1] -> [0,1] (load, hard) took 14.2 ms; requests: 3 paused, 1 moved"),
        ({"reason": ""}, "switch 3: [0] [1] -> [0,1] (hard) took 14.2 ms; "),
        ({"paused": 0, "moved": 0}, "took 14.2 ms; requests: none concerned"),
        ({"error": "engine 1 died"}, "failed after 14.2 ms: engine 1 died; requests: 3 paused"),
    ],
)
def test_a_switch_in_one_line(change: dict[str, object], line: str) -> None:
    fields: dict[str, object] = {
        "epoch": 3,
        "at": 0.0,
        "before": [(0,), (1,)],
        "after": [(0, 1)],
        "treatment": "hard",
        "outcome": "done",
        "error": None,
        "duration_seconds": 0.0142,
        "paused": 3,
        "resumed": 0,
        "drained": 0,
        "moved": 1,
        "reason": "load",
    }
    assert line in SwitchView(**(fields | change)).line()  # type: ignore[arg-type]

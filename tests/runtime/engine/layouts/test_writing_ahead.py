"""When tables are written while another layout runs: not while anything may read them."""

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from shoal.runtime.engine.layouts import writing_ahead
from shoal.runtime.engine.layouts.writing_ahead import WritingAhead


class Device:
    """A GPU that is played: what was queued on each stream ends when the test says so."""

    def __init__(self) -> None:
        self.log = list[str]()
        self.ended = set[str]()
        """The streams on which everything has ended."""
        self.stream = "steps"

    def event(self) -> Any:
        """Return an event that is recorded on the current stream."""
        of = SimpleNamespace(stream="")

        def record() -> None:
            of.stream = self.stream
            self.ended.discard(self.stream)

        def synchronize() -> None:
            self.log.append(f"wait for {of.stream}")
            self.ended.add(of.stream)

        return SimpleNamespace(
            record=record, query=lambda: of.stream in self.ended, synchronize=synchronize
        )

    @contextmanager
    def on(self, stream: str) -> Iterator[None]:
        self.stream = stream
        yield
        self.stream = "steps"

    def write(self) -> None:
        self.log.append(f"write on {self.stream}")


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    device = Device()
    monkeypatch.setattr(writing_ahead, "current_platform", SimpleNamespace(is_cuda=lambda: True))
    monkeypatch.setattr(writing_ahead.torch.cuda, "Event", device.event)
    monkeypatch.setattr(writing_ahead.torch.cuda, "Stream", lambda: "beside")
    monkeypatch.setattr(writing_ahead.torch.cuda, "stream", device.on)
    return device


@pytest.fixture
def model_runner(device: Device) -> Any:
    table = SimpleNamespace(apply_staged_writes=device.write)
    return SimpleNamespace(req_states=table, block_tables=table)


def test_both_tables_are_written_beside_the_other_layout_s_steps(
    device: Device, model_runner: Any
) -> None:
    assert WritingAhead().write(model_runner)
    assert device.log == ["write on beside"] * 2


def test_nothing_is_written_while_the_layout_s_last_step_runs(
    device: Device, model_runner: Any
) -> None:
    ahead = WritingAhead()
    ahead.leave()
    assert not ahead.write(model_runner)
    assert device.log == []
    device.ended.add("steps")
    assert ahead.write(model_runner)


def test_nothing_is_written_while_the_last_write_runs(device: Device, model_runner: Any) -> None:
    ahead = WritingAhead()
    ahead.write(model_runner)
    assert not ahead.write(model_runner)
    device.ended.add("beside")
    assert ahead.write(model_runner)


def test_nothing_is_written_between_the_layout_s_first_step_and_the_end_of_its_last(
    device: Device, model_runner: Any
) -> None:
    ahead = WritingAhead()
    ahead.go_on()
    assert not ahead.write(model_runner)
    ahead.leave()
    assert not ahead.write(model_runner)
    device.ended.add("steps")
    assert ahead.write(model_runner)


def test_a_step_waits_once_until_all_is_written(device: Device, model_runner: Any) -> None:
    ahead = WritingAhead()
    ahead.join()
    ahead.write(model_runner)
    ahead.join()
    ahead.join()
    assert device.log[2:] == ["wait for beside"]
    assert ahead.write(model_runner), "it has ended"

"""Signals that ask a node to end: counted, and seen by who waits."""

import os
import signal
from multiprocessing.connection import wait

import pytest

from shoal.runtime.node.end_signals import EndSignals


def woken(signals: EndSignals) -> bool:
    return bool(wait([signals.wakeup], 0))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_each_is_counted_and_wakes_once(number: signal.Signals) -> None:
    signals = EndSignals()
    with signals.caught():
        assert not woken(signals)
        for times in (1, 2):
            os.kill(os.getpid(), number)
            assert (signals.count, woken(signals)) == (times, True)
            signals.rest()
            assert not woken(signals)
        signals.rest()


def test_handlers_are_put_back() -> None:
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    with EndSignals().caught():
        assert signal.getsignal(signal.SIGTERM) != before[1]
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before

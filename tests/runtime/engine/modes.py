"""Lets a group run its steps in the modes that a test wants, and counts them."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from shoal.policies.values.layouts import Unit
from shoal.runtime.protocol.messages import Mode
from tests.runtime.engine import probes
from tests.runtime.engine.real_node import RealNode
from tests.runtime.engine.scripted_shift import Script


@contextmanager
def scripted(node: RealNode, group: Unit, script: Script) -> Iterator[Counter[Mode]]:
    """While active, leaders choose by a script; then a group's steps by mode are in the counter.

    What members of the group computed alone counts as well, in TP. All is over at the end.

    Raises:
        AssertionError: the members of the group did not run as many steps by sequence.
    """
    node.probe_all(probes.take_modes)
    node.script(script)
    modes = Counter[Mode]()
    yield modes
    node.script(Script.TP)
    ran = [Counter(node.probe(engine, probes.take_modes)) for engine in group.engines]
    assert all(counts[Mode.SP] == ran[0][Mode.SP] for counts in ran), "another mode"
    modes.update(ran[0])

"""A comparison of every engine's books with the controller's, exact while requests run.

An engine's answer describes the moment at which it answers. Messages between two processes keep
their order. So the answer must equal the controller's books at the time of the question, changed by
what the engine has reported since then, but not by what it has been told since then.
"""

from collections.abc import Iterable, Mapping, Sequence

import msgspec

from shoal.policies.values.layouts import Unit
from shoal.runtime.protocol import messages as m


class _Expected(msgspec.Struct):
    lent: set[int]
    leases: dict[Unit, int]


class Audit:
    """One run of ``AuditNode``.

    Args:
        call: number of the caller's call.
        peer: the caller.
        deadline: clock time after which engines that have not answered count as broken.
    """

    def __init__(self, call: int, peer: str, deadline: float) -> None:
        self.call = call
        self.peer = peer
        self.deadline = deadline
        self.problems: list[str] = []
        self._expected: dict[int, _Expected] = {}

    def ask(self, engine: int, lent: set[int], leases: Mapping[Unit, int]) -> None:
        """Note what the books say when an engine is sent the question.

        Args:
            engine: the engine that is asked.
            lent: ids of the blocks that it has lent.
            leases: virtual blocks of every group that it leads.
        """
        self._expected[engine] = _Expected(set(lent), dict(leases))

    def lent(self, engine: int, blocks: Sequence[int]) -> None:
        """Follow an engine's report that it lent blocks."""
        if engine in self._expected:
            self._expected[engine].lent.update(blocks)

    def closed(self, group: Unit, blocks: int) -> None:
        """Follow a leader's report that it returned virtual blocks."""
        expected = self._expected.get(group.leader)
        if expected is not None:
            expected.leases[group] = expected.leases.get(group, 0) - blocks

    def answer(self, message: m.Integrity) -> None:
        """Compare an engine's answer with what the books expect."""
        if message.call != self.call or message.engine not in self._expected:
            return
        expected = self._expected.pop(message.engine)
        self.problems += message.problems
        name = f"engine {message.engine}"
        wrong = expected.lent.symmetric_difference(message.lent)
        if wrong:
            self.problems.append(f"{name}: lent blocks differ from the books: {sorted(wrong)[:8]}")
        for group, blocks in message.leases:
            known = expected.leases.get(group, 0)
            if blocks != known:
                unit = list(group.engines)
                self.problems.append(
                    f"{name}: unit {unit} holds {blocks} blocks, the books say {known}"
                )

    def lose(self, engines: Iterable[int]) -> None:
        """Expect no answers from dead engines."""
        for engine in engines:
            self._expected.pop(engine, None)

    def time_out(self) -> None:
        """Count engines that have not answered as broken."""
        for engine in sorted(self._expected):
            self.problems.append(f"engine {engine}: did not answer the audit")
        self._expected.clear()

    @property
    def done(self) -> bool:
        """Whether no engine still has to answer."""
        return not self._expected

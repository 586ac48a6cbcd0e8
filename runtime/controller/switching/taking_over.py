"""The books of requests whose next unit has been told to go on with them.

Requests stand still until their unit hears of them, and those of several sources mostly stop at
about the same time. So all that need not be done before ``Import`` is sent waits until nothing is
left to be sent.
"""

from collections.abc import Iterable, Sequence

from shoal.runtime.controller.books.books import Books
from shoal.runtime.controller.books.capacity import Capacity
from shoal.runtime.controller.books.carry_book import Carry
from shoal.runtime.controller.books.environment import Environment
from shoal.runtime.controller.books.request import continued
from shoal.runtime.protocol import messages as m
from shoal.runtime.protocol.transport import front_identity


class TakingOver:
    """Chooses the requests that a unit takes over, and notes that it has them.

    Args:
        env: the transport to front ends, and the time.
        books: the book of requests.
        capacity: what each unit holds.
    """

    def __init__(self, env: Environment, books: Books, capacity: Capacity) -> None:
        self._transport, self._clock = env.transport, env.clock
        self._requests = books.requests
        self._capacity = capacity
        self._owed: list[tuple[Carry, list[m.CarriedRequest]]] = []

    def foresee(self, carry: Carry) -> None:
        """Look by now which of the announced requests their destination can hold."""
        fitting = self._that_fit(carry, carry.announced.values())
        carry.fitting = {each.request_id for each in fitting}

    def choose(self, carry: Carry) -> list[m.CarriedRequest]:
        """Return the exported requests that go on in their destination, as it is to be told."""
        known = self._requests
        coming = [
            e for e in carry.exported if e.request_id in carry.ids and known.find(e.request_id)
        ]
        fitting = {e.request_id for e in coming if e.is_rest}.intersection(carry.fitting)
        others = [each for each in coming if each.request_id not in fitting]
        fitting.update(each.request_id for each in self._that_fit(carry, others))
        return [
            each if carry.is_allotted else each.whole(carry.announced)
            for each in coming
            if each.request_id in fitting
        ]

    def _that_fit(
        self, carry: Carry, described: Iterable[m.CarriedRequest]
    ) -> list[m.CarriedRequest]:
        idle, found = self._capacity.idle(carry.destination), list[m.CarriedRequest]()
        for each in described:
            request = self._requests.find(each.request_id)
            if request is None:
                continue
            tokens = each.whole(carry.announced).tokens
            if idle.can_hold(continued(request, tokens, self._clock()).seen):
                found.append(each)
        return found

    def owe(self, carry: Carry, taken: Sequence[m.CarriedRequest]) -> None:
        """Remember that ``Import`` has been sent for some requests of a carry."""
        self._owed.append((carry, [each.whole(carry.announced) for each in taken]))

    def can_wait(self, message: m.ToController) -> bool:
        """Return whether a message can be taken before the books are done."""
        if isinstance(message, m.Load):
            owed = (carry for carry, _ in self._owed)
            return not any(message.unit in (each.source, each.destination) for each in owed)
        return isinstance(message, m.Exported)

    def note(self) -> None:
        """Do the books, and tell front ends where requests go on."""
        owed, self._owed = self._owed, []
        for carry, taken in owed:
            placed = dict[int, list[str]]()
            for each in taken:
                request = self._requests.find(each.request_id)
                assert request is not None
                grown = continued(request, each.tokens, self._clock())
                self._requests.carry(grown, carry.destination)
                placed.setdefault(grown.client, []).append(grown.id)
            for client, ids in placed.items() if not carry.destination.tier else ():
                told = m.CarriedOn(ids, carry.destination)
                self._transport.to_control(front_identity(client), told)

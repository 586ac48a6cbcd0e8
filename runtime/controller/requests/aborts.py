"""Tells units to forget requests, wherever the requests are."""

from collections import defaultdict
from collections.abc import Iterable

from shoal.policies.values.layouts import Unit
from shoal.runtime.controller.books.books import Books
from shoal.runtime.protocol import messages as m
from shoal.runtime.protocol.transport import ControllerTransport


def send_aborts(transport: ControllerTransport, books: Books, request_ids: Iterable[str]) -> None:
    """Tell every unit that has these requests, or expects them, to forget them.

    While a unit reads the KV of a request, only this unit is told: the blocks that it reads must
    not get other content, so the unit that has them keeps them until the carry is over.

    Args:
        transport: carries messages to engines.
        books: says where the requests are; they leave the book of carries, but no other.
        request_ids: the requests; those on no unit are skipped.
    """
    by_unit: defaultdict[Unit, list[str]] = defaultdict(list)
    for request_id in request_ids:
        units = (books.requests.where(request_id), books.carries.take(request_id))
        for unit in units:
            if unit is not None:
                by_unit[unit].append(request_id)
    for unit, ids in by_unit.items():
        transport.to_engine(unit.leader, m.AbortRequests(unit, ids))

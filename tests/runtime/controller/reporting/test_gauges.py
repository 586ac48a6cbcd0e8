"""Gauges that the controller reads from its books."""

import msgspec

from shoal.runtime.protocol.messages import SpExchange, Startup
from tests.runtime.loopback_node import LoopbackNode


def test_engines_are_counted_by_how_they_exchange_in_sp() -> None:
    node = LoopbackNode(4)
    node.settle()

    def counts() -> dict[tuple[str, ...], float]:
        return {s.labels: s.value for s in node.metric("shoal_sp_exchange")}

    none = dict.fromkeys(((layout, by) for layout in ("tp2", "tp4") for by in SpExchange), 0)
    assert counts() == none
    for engine in list(node.controller.books.engines)[:3]:
        assert engine.ready is not None
        said = {"tp2": SpExchange.PEER, "tp4": SpExchange.COLLECTIVE}
        startup = Startup(sp_exchanges=said)
        ready = msgspec.structs.replace(engine.ready, startup=startup)
        node.controller.books.engines.serve(ready)
    assert counts() == none | {("tp2", "peer"): 3, ("tp4", "collective"): 3}

"""How many requests a node runs, as those see it who send it lines: what is parked counts."""

from http import HTTPStatus
from types import SimpleNamespace
from typing import Any

from shoal.runtime.protocol.messages import NodeMetrics
from shoal.runtime.protocol.messages.metrics import Family, Kind, Sample
from shoal.server.batch.file_job import FIXED_WINDOW, _running
from shoal.server.batch.worker_door import running_on

STATES = {"running": 3.0, "waiting": 100.0, "paused": 100.0, "parked": 40.0}


async def test_a_batch_worker_counts_what_waits_in_the_hosts_memory() -> None:
    samples = [Sample((str(e), state), count) for e in (0, 1) for state, count in STATES.items()]
    families = [
        Family("shoal_engine_requests", Kind.GAUGE, "", ("engine", "state"), samples),
        Family("shoal_other", Kind.GAUGE, "", ("state",), [Sample(("running",), 7.0)]),
    ]

    async def get_metrics() -> NodeMetrics:
        return NodeMetrics(1, families, [])

    control: Any = SimpleNamespace(get_metrics=get_metrics)
    assert await running_on(control) == 2 * (3 + 40)


async def test_run_batch_counts_it_too_and_takes_any_server() -> None:
    page = [
        b'vllm:num_requests_running{engine="0",model_name="m"} 3.0',
        b'vllm:num_requests_waiting{engine="0",model_name="m"} 100.0',
        b'shoal_engine_requests{engine="0",state="parked"} 40.0',
        b'shoal_engine_requests{engine="0",state="paused"} 100.0',
    ]

    def sender(*lines: bytes, status: HTTPStatus = HTTPStatus.OK) -> Any:
        async def get(_: str) -> Any:
            return SimpleNamespace(status=status, body=b"\n".join(lines))

        return SimpleNamespace(get=get)

    assert await _running(sender(*page)) == 43
    assert await _running(sender(*page[:2])) == 3, "a server that is no node of Shoal"
    assert await _running(sender(status=HTTPStatus.NOT_FOUND)) == FIXED_WINDOW // 2

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
import zmq.asyncio

from shoal.policies.values.layouts import alone
from shoal.runtime.config import Addresses
from shoal.runtime.protocol.controller_client import CallError, ControlClient
from shoal.runtime.protocol.messages import (
    AuditDone,
    AuditNode,
    CallFailed,
    CarriedOn,
    CountRefused,
    Ended,
    GetLayout,
    KillEngines,
    LayoutView,
    Message,
    Note,
    Outcome,
    Placed,
    PoolLimits,
    SetLayout,
    SwitchDone,
    ToControllerControl,
    Treatment,
    decode_control,
    encode,
)
from shoal.runtime.protocol.messages.views import SwitchView

SWITCH = SwitchView(
    epoch=7,
    at=0.0,
    before=[(0,), (1,)],
    after=[(0, 1)],
    treatment=Treatment.HARD,
    outcome="done",
    error=None,
    duration_seconds=0.5,
    paused=2,
    resumed=0,
    drained=0,
)


def view(call: int) -> LayoutView:
    return LayoutView(call, [], [], [], waiting=call, policy="manual", ready=True, reason=None)


class Controller:
    """The controller's end of the channel, played by a test."""

    def __init__(self, address: str) -> None:
        self.socket = zmq.asyncio.Context.instance().socket(zmq.ROUTER)
        self.socket.bind(address)
        self.peer = b""

    async def receive(self) -> ToControllerControl:
        self.peer, payload = await self.socket.recv_multipart()
        return decode_control(payload)

    async def send(self, message: Message) -> None:
        await self.socket.send_multipart([self.peer, encode(message)])

    async def answer(self, make: Callable[[int], Message]) -> ToControllerControl:
        request = await self.receive()
        assert not hasattr(request, "engine")
        await self.send(make(request.call))  # type: ignore[union-attr]
        return request


@pytest.fixture
async def ends(tmp_path: Path) -> AsyncIterator[tuple[Controller, ControlClient, list[Note]]]:
    addresses = Addresses(tmp_path)
    controller = Controller(addresses.control)
    notes: list[Note] = []
    async with ControlClient(addresses, 3, notes.append) as client:
        yield controller, client, notes
    controller.socket.close(linger=0)


Ends = tuple[Controller, ControlClient, list[Note]]


async def test_a_layout_is_asked_for_by_name(ends: Ends) -> None:
    controller, client, _ = ends
    layout, request = await asyncio.gather(client.get_layout(), controller.answer(view))
    assert isinstance(request, GetLayout)
    assert layout == view(request.call)
    assert controller.peer == b"front-3"


async def test_a_switch_carries_every_argument_and_returns_what_happened(ends: Ends) -> None:
    controller, client, _ = ends
    switch, request = await asyncio.gather(
        client.set_layout([(0, 1), (2,)], Treatment.HARD, 9.0, layouts=["pp2", "dp"]),
        controller.answer(lambda call: SwitchDone(call, SWITCH)),
    )
    assert switch == SWITCH
    assert isinstance(request, SetLayout)
    assert request.layouts == ["pp2", "dp"]
    assert (request.units, request.treatment, request.timeout_seconds) == (
        [[0, 1], [2]],
        Treatment.HARD,
        9.0,
    )


async def test_an_audit_returns_the_problems(ends: Ends) -> None:
    controller, client, _ = ends
    problems, request = await asyncio.gather(
        client.audit(), controller.answer(lambda call: AuditDone(call, ["leak"]))
    )
    assert problems == ["leak"]
    assert isinstance(request, AuditNode)


async def test_a_refused_request_is_reported_for_the_count(ends: Ends) -> None:
    controller, client, _ = ends
    await client.count_refused(Outcome.CALLER_FULL)
    assert await controller.receive() == CountRefused(Outcome.CALLER_FULL)


async def test_a_refusal_raises_with_its_status(ends: Ends) -> None:
    controller, client, _ = ends
    call = asyncio.create_task(client.set_layout([[0]], Treatment.SEQUENTIAL, 1.0))
    await controller.answer(lambda call: CallFailed(call, 400, "engine 1 is in no unit"))
    with pytest.raises(CallError, match="engine 1 is in no unit") as caught:
        await call
    assert caught.value.status == 400


async def test_answers_find_their_calls_in_any_order(ends: Ends) -> None:
    controller, client, _ = ends
    first = asyncio.create_task(client.get_layout())
    one = await controller.receive()
    second = asyncio.create_task(client.get_layout())
    two = await controller.receive()
    assert isinstance(one, GetLayout)
    assert isinstance(two, GetLayout)
    await controller.send(view(two.call))
    await controller.send(view(one.call))
    assert (await first).call == one.call
    assert (await second).call == two.call


async def test_no_answer_is_a_timeout_and_a_late_one_is_ignored(ends: Ends) -> None:
    controller, client, _ = ends
    with pytest.raises(CallError, match="did not answer") as caught:
        await client.get_layout(timeout=0.0)
    assert caught.value.status == 504
    # Whether the request left before its caller gave up does not matter: no answer may confuse.
    asked = asyncio.create_task(client.get_layout())
    request = await controller.receive()
    while not asked.done():
        assert isinstance(request, GetLayout)
        await controller.send(view(request.call - 1))
        await controller.send(view(request.call))
        done, _ = await asyncio.wait({asked}, timeout=0.05)
        if not done:
            request = await controller.receive()
    assert (await asked).call == request.call


async def test_notes_come_in_order(ends: Ends) -> None:
    controller, client, notes = ends
    sent: list[Note] = [Placed(f"r{k}", alone(k)) for k in range(5)]
    sent += [Ended("r5", Outcome.EXPIRED, 504, "too late"), PoolLimits("full", {"batch": "enough"})]
    call = asyncio.create_task(client.get_layout())
    request = await controller.receive()
    for note in sent:
        await controller.send(note)
    await controller.send(CarriedOn(["r1", "r3"], alone(7)))
    sent += [Placed("r1", alone(7)), Placed("r3", alone(7))]
    assert isinstance(request, GetLayout)
    await controller.send(view(request.call))
    await call
    assert notes == sent


async def test_an_answer_of_another_kind_is_an_error(ends: Ends) -> None:
    controller, client, _ = ends
    call = asyncio.create_task(client.get_layout())
    await controller.answer(lambda call: AuditDone(call, []))
    with pytest.raises(CallError, match="AuditDone"):
        await call


async def test_a_broken_link_fails_the_calls_in_progress_and_the_later_ones(ends: Ends) -> None:
    controller, client, _ = ends
    call = asyncio.create_task(client.get_layout())
    await controller.receive()
    await controller.send(KillEngines({0: 0}, "not for a front end"))
    with pytest.raises(CallError, match="broken"):
        await call
    with pytest.raises(CallError, match="broken"):
        await client.get_layout()


async def test_leaving_fails_what_is_pending(tmp_path: Path) -> None:
    async with ControlClient(Addresses(tmp_path), 0, [].append) as client:
        call = asyncio.create_task(client.get_layout())
        await asyncio.sleep(0)
    with pytest.raises(CallError) as caught:
        await call
    assert caught.value.status == 503

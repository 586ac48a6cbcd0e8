"""A controller that the live page can ask: its answers are those of a real one in virtual time."""

from typing import Any

from shoal.runtime.protocol.controller_client import CallError
from shoal.runtime.protocol.messages import GetLayout, GetMetrics, LayoutView, NodeMetrics
from shoal.server.operator.page.page_events import About
from tests.runtime.loopback_node import LoopbackNode

ABOUT = About(model="demo", engines=2, max_group=2, max_pp=1, since=1000.0)


class Control:
    """The calls of a ``ControlClient`` to a loopback node.

    Attributes:
        asked: how often the layout was asked for.
        error: raised instead of an answer.
    """

    def __init__(self, node: LoopbackNode) -> None:
        self.node = node
        self.asked = 0
        self.error: CallError | None = None

    async def get_layout(self, *, named: int = 0) -> LayoutView:
        self.asked += 1
        if self.error is not None:
            raise self.error
        view = self._answer(GetLayout, named)
        assert isinstance(view, LayoutView)
        return view

    async def get_metrics(self) -> NodeMetrics:
        metrics = self._answer(GetMetrics)
        assert isinstance(metrics, NodeMetrics)
        return metrics

    def _answer(self, *call: Any) -> Any:
        number = self.node.call(*call)
        self.node.settle()
        reply = self.node.reply(number)
        self.node.network.control_replies.clear()  # or it would keep all of them
        return reply

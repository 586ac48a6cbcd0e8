"""A tier's books while its copies are under way; the test says when each copy ends, and how."""

from collections.abc import Sequence

from shoal.policies.values.layouts import Unit, alone
from shoal.runtime.engine.agent.results import Copied
from shoal.runtime.engine.agent.tier_core import Arriving, TierCore
from shoal.runtime.protocol.messages import CarriedRequest

ENGINE, BLOCKS = 0, 4
OWN = alone(ENGINE)


class Copy:
    """Ends when the test says so."""

    result: Copied | None = None

    def ended(self) -> Copied | None:
        return self.result


class Tier(TierCore):
    def __init__(self) -> None:
        super().__init__(ENGINE, BLOCKS)
        self.begun: list[Copy] = []

    def _begin(self, source: Unit, requests: Sequence[Arriving]) -> Copy:
        self.begun.append(Copy())
        return self.begun[-1]

    def take_in(self, request_id: str) -> None:
        """Adopt a request of two blocks, and begin to copy it."""
        self.expect(request_id, ())
        request = CarriedRequest(request_id, [7], 8, {ENGINE: [[11, 12]]}, 9)
        assert self.adopt(OWN, request, with_kv=True) is not None
        self.copy()


def test_blocks_of_a_request_that_has_gone_are_free_when_its_copy_has_ended() -> None:
    tier = Tier()
    tier.take_in("r")
    tier.abort(["r", "r"])
    assert (tier.num_requests, tier.load.free_blocks) == (0, BLOCKS - 2)
    tier.begun[0].result = Copied([], 1, 0.0)
    assert [copied.request_ids for copied in tier.copied()] == [[]]
    assert tier.load.free_blocks == BLOCKS
    assert tier.check_integrity() == []


def test_a_copy_that_fails_ends_its_requests() -> None:
    tier = Tier()
    tier.take_in("r")
    tier.begun[0].result = Copied([], 0, 0.0, "lost")
    assert [copied.request_ids for copied in tier.copied()] == [["r"]]
    assert (tier.num_requests, tier.load.free_blocks) == (0, BLOCKS)
    assert tier.check_integrity() == []


def test_a_copy_that_fails_is_nothing_to_a_request_that_has_come_again() -> None:
    tier = Tier()
    tier.take_in("r")
    tier.abort(["r"])
    tier.take_in("r")
    first, second = tier.begun
    first.result = Copied([], 0, 0.0, "lost")
    tier.copied()
    assert (tier.num_requests, tier.load.free_blocks) == (1, BLOCKS - 2)
    second.result = Copied([], 1, 0.0)
    assert [copied.request_ids for copied in tier.copied()] == [["r"]]
    assert [each.request_id for each in tier.export(["r"])] == ["r"]
    assert tier.check_integrity() == []

"""What members of a group find comes together, and a member that fails is no endless wait."""

from queue import Empty, SimpleQueue
from types import SimpleNamespace

import pytest

from shoal.loadgen.bench.member_processes import gathered


def test_what_all_members_have_found_is_given_by_name() -> None:
    out: SimpleQueue[tuple[str, int]] = SimpleQueue()
    for found in (("a", 1), ("b", 2), ("b", 3), ("a", 4), ("c", 5)):
        out.put(found)
    assert list(gathered(2, 2, [], out)) == [("b", [2, 3]), ("a", [1, 4])]


def test_a_member_that_has_failed_ends_the_wait() -> None:
    def get(timeout: float) -> None:
        raise Empty

    failed, out = SimpleNamespace(exitcode=1), SimpleNamespace(get=get)
    with pytest.raises(SystemExit, match="a member has failed"):
        list(gathered(1, 2, [failed], out))

from collections.abc import Callable

import pytest
from starlette.requests import Request

from shoal.server.batch.list_answers import RefusedError, lifetime_of, limit_of


def limit(text: str) -> int:
    scope = {"type": "http", "query_string": f"limit={text}".encode(), "headers": []}
    return limit_of(Request(scope), 20, 100)


def seconds(value: object) -> int:
    return lifetime_of(value, "created_at", "expires_after")


def test_a_list_has_as_many_objects_as_asked_for() -> None:
    assert [limit(text) for text in ("1", "100", "007")] == [1, 100, 7]


def test_files_expire_when_asked_for_in_a_form_or_in_json() -> None:
    assert [seconds("3600"), seconds(2_592_000)] == [3600, 2_592_000]


@pytest.mark.parametrize("read", [limit, seconds])
@pytest.mark.parametrize(
    "text",
    [
        *("", "0", "-1", "x", "1.5", "101x", "2592001", "\u0663"),
        "0000000019999999999999999999",  # its first digits are few
        "9" * 5000,  # more digits than Python makes an integer of
    ],
)
def test_other_numbers_are_refused(read: Callable[[str], int], text: str) -> None:
    with pytest.raises(RefusedError) as refused:
        read(text)
    assert refused.value.status == 400

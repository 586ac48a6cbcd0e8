"""JSON objects as bodies bring them; what is refused of them is in ``test_body_checks.py``."""

import json

import pytest

from shoal.server.gate.bounds import BoundsError
from shoal.server.gate.json_objects import decode_object


def test_json_may_nest_as_deep_as_it_is_said() -> None:
    decode_object(b'{"a": ' + b"[" * 11 + b"]" * 11 + b"}", 12)
    with pytest.raises(BoundsError, match="more than 12 deep"):
        decode_object(b'{"a": ' + b"[" * 12 + b"]" * 12 + b"}", 12)


def test_brackets_in_text_are_no_nesting() -> None:
    text = "[{" * 50
    assert decode_object(json.dumps({"a": text}).encode(), 12) == {"a": text}

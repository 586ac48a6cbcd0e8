"""Finds keys that an object of JSON text names twice: decoders silently keep the last value.

This works by counting: if a text names more keys than its decoded objects have, it names one twice.
Counting takes a small part of the time of decoding with a hook for objects, which is done only to
find the key's name.
"""

import json
import re
from collections.abc import Iterable, Mapping
from typing import Any

_BEFORE_A_VALUE = re.compile(rb'"\s*+:')
_STRING = rb'"(?:[^"\\]++|\\.)*+"'
_UP_TO_A_KEY = re.compile(rb'(?:[^"]++|' + _STRING + rb"(?!\s*+:))*+" + _STRING)
"""Matches everything up to and including the next key, without reading any part twice."""


_NESTS = frozenset({dict, list})


class _Repeated(Exception):
    """Ends the search for a key; its argument is the key."""


def repeated_key(text: bytes, decoded: Mapping[str, Any]) -> str | None:
    """Return a key that an object of a JSON text has twice; None if there is no such key.

    Args:
        text: valid JSON.
        decoded: the decoded text, with one value for each key.
    """
    keys = _keys_of(decoded, text.count(b"{"))
    # These quick counts include what is inside strings, so they may be too high.
    if text.count(b":") == keys or len(_BEFORE_A_VALUE.findall(text)) == keys:
        return None
    if _keys_in(text) == keys:
        return None
    try:
        json.loads(text, object_pairs_hook=_unique)
    except _Repeated as found:
        return str(found.args[0])
    return None


def _keys_of(decoded: Mapping[str, Any], objects: int) -> int:
    """Return the number of keys in a decoded text with at most ``objects`` objects.

    The search ends once that many objects are found, because a list of token ids is long.
    """
    keys = 0
    found: list[Mapping[str, Any]] = [decoded]
    lists: list[list[Any]] = []
    while objects and (found or lists):
        values: Iterable[Any]
        if found:
            node = found.pop()
            objects -= 1
            keys += len(node)
            values = node.values()
        else:
            values = lists.pop()
            if _NESTS.isdisjoint(map(type, values)):
                continue  # no step of Python for each token id
        for value in values:
            if isinstance(value, dict):
                found.append(value)
            elif isinstance(value, list):
                lists.append(value)
    return keys


def _keys_in(text: bytes) -> int:
    keys = position = 0
    while match := _UP_TO_A_KEY.match(text, position):
        keys += 1
        position = match.end()
    return keys


def _unique(pairs: list[tuple[str, Any]]) -> None:
    seen = set()
    for key, _ in pairs:
        if key in seen:
            raise _Repeated(key)
        seen.add(key)

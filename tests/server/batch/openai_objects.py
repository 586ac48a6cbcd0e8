"""Whether an answer is what the ``openai`` package's own types say of it, to the last field."""

from collections.abc import Iterator
from typing import Any

import openai
from pydantic import BaseModel

OF_A_LIST = {"object", "first_id", "last_id"}
"""What OpenAI's documentation has in a list, and the package's type leaves out."""


def problems(
    kind: type[BaseModel], answer: dict[str, Any], beyond: frozenset[str] = frozenset()
) -> list[str]:
    """Return how an answer differs from a type.

    The package itself takes whatever comes: it neither asks for a field nor minds an unknown one.

    Args:
        kind: the package's type.
        answer: what the server said.
        beyond: fields that the answer may have although the type does not know them.

    Raises:
        pydantic.ValidationError: a field is missing, or is of another type.
    """
    parsed = kind.model_validate(answer, strict=True)
    return [name for name in _unknown(parsed, "") if name not in beyond]


def _unknown(value: object, path: str) -> Iterator[str]:
    """Yield the paths of the fields that no type knows."""
    if isinstance(value, list):
        for one in value:
            yield from _unknown(one, path)
    if isinstance(value, BaseModel):
        for name in value.model_extra or {}:
            yield path + name
        for name in type(value).model_fields:
            yield from _unknown(getattr(value, name), f"{path}{name}.")


def list_problems(kind: type[BaseModel], answer: dict[str, Any]) -> list[str]:
    """Return how a list of objects of a type differs from the package's type of lists."""
    page: Any = openai.pagination.SyncCursorPage
    return problems(page[kind], answer, frozenset(OF_A_LIST))

"""vLLM's streams of the Responses API, which here end with an event where they fail.

vLLM tries to make an event of the error, but none of its events can hold one: the stream would
break off.
"""

from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Any

from pydantic import BaseModel, ValidationError

Generate = Callable[..., AsyncGenerator[Any, None]]

FAILED = "the request failed in its engine"


class ErrorEvent(BaseModel):
    """OpenAI's event ``error``."""

    type: str = "error"
    code: str = "500"
    message: str = FAILED
    param: str | None = None
    sequence_number: int


def tell_failures(generate: Generate) -> Generate:
    """Wrap vLLM's ``responses_stream_generator`` so that its last event is OpenAI's ``error``.

    Where the controller knows more, ``held_responses.py`` puts its reason into the event.
    """

    async def generated(*arguments: Any, **options: Any) -> AsyncGenerator[Any, None]:
        told = 0
        try:
            async with aclosing(generate(*arguments, **options)) as events:
                async for event in events:
                    told += 1
                    yield event
        except ValidationError:  # of the event that cannot be
            yield ErrorEvent(sequence_number=told)

    return generated

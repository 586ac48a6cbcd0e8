"""Images in the messages of a chat: inside the body, or on a host that the operator names.

vLLM fetches any URL by default, so a client could have the server ask its own network. Here a body
brings its images along (``data:`` URLs), and only the hosts of ``--allowed-media-domains`` are
asked for others.
"""

import re
from collections.abc import Iterator, Mapping
from typing import Any

from shoal.server.gate.bounds import Bounds, BoundsError

IMAGE_PART = "image_url"
"""Type of a part that is an image, and the key that has its URL."""

_KEYS = frozenset({"type", IMAGE_PART})
_URL_KEYS = frozenset({"url", "detail"})
_INSIDE = "data:image/"
_ON_A_HOST = re.compile(r"https?://([A-Za-z0-9.-]+)(?::[0-9]+)?(?:[/?#]|$)")
"""A URL about whose host no two parsers disagree."""


def check_image(param: str, part: Mapping[str, Any], bounds: Bounds) -> None:
    """Refuse an image that is not plainly one, or that would have to come from elsewhere.

    A part with a ``uuid`` is refused, too: vLLM would take the images of all parts with that
    ``uuid`` for one, whoever sends them.

    Args:
        param: the field of the body.
        part: the part of a message, whose type is ``IMAGE_PART``.
        bounds: say which hosts are asked for images.

    Raises:
        BoundsError: the part has other keys, or its URL is refused.
    """
    image = part.get(IMAGE_PART)
    if not isinstance(image, dict) or not (part.keys() <= _KEYS and image.keys() <= _URL_KEYS):
        raise BoundsError(
            param, f'an image is {{"type": "{IMAGE_PART}", "{IMAGE_PART}": {{"url"}}}}'
        )
    url = image.get("url")
    if not isinstance(url, str):
        raise BoundsError(param, f"{IMAGE_PART}.url must be text")
    host = _ON_A_HOST.match(url)
    if not (url.startswith(_INSIDE) or (host and host[1].lower() in bounds.image_hosts)):
        raise BoundsError(
            param,
            f"{IMAGE_PART} must be a {_INSIDE} URL: the server asks only the hosts of its "
            "--allowed-media-domains for others",
        )


def image_chars(messages: Any) -> int:
    """Return how many characters of the messages of a chat, or of several chats, are images."""
    return sum(len(part[IMAGE_PART]["url"]) for part in _images(messages))


def _images(messages: Any) -> Iterator[Mapping[str, Any]]:
    """Yield the parts that ``check_image`` has let through."""
    for message in messages if isinstance(messages, list) else ():
        if isinstance(message, list):
            yield from _images(message)
        elif isinstance(message, dict) and isinstance(message.get("content"), list):
            for part in message["content"]:
                if isinstance(part, dict) and part.get("type") == IMAGE_PART:
                    yield part

"""Which images a body may bring, and that no URL leads the server where its operator does not."""

import json
from dataclasses import replace
from typing import Any

import pytest

from shoal.server.gate.body_checks import check_body
from shoal.server.gate.bounds import DEFAULTS, BoundsError

INSIDE = "data:image/png;base64,iVBORw0KGgo="
BOUNDS = replace(DEFAULTS, images=True, image_hosts=frozenset({"pictures.example.com"}))


def image(url: Any = INSIDE, **keys: Any) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url}, **keys}


def chat(*parts: Any, **fields: Any) -> bytes:
    return json.dumps({"messages": [{"role": "user", "content": list(parts)}], **fields}).encode()


def refused(body: bytes, bounds: Any = BOUNDS) -> str:
    with pytest.raises(BoundsError) as caught:
        check_body(body, bounds)
    assert len(str(caught.value)) < 200
    return str(caught.value)


@pytest.mark.parametrize(
    "part",
    [
        image(),
        image("http://pictures.example.com/a.png"),
        image("https://Pictures.Example.com:8443/a.png?size=1#x"),
        {"type": "image_url", "image_url": {"url": INSIDE, "detail": "low"}},
    ],
)
def test_images_inside_the_body_and_of_named_hosts_are_taken(part: dict[str, Any]) -> None:
    text = {"type": "text", "text": "What is this?"}
    check_body(chat(part, text, part), BOUNDS)
    several = {"messages": [[{"role": "user", "content": [part]}]]}
    check_body(json.dumps(several).encode(), BOUNDS)
    assert "the model takes text" in refused(chat(part), DEFAULTS)


@pytest.mark.parametrize(
    "url",
    [
        "http://10.0.0.1/",
        "https://example.com/a.png",
        "http://pictures.example.com.evil.example/",
        "http://pictures.example.com@10.0.0.1/",
        "http://10.0.0.1\\@pictures.example.com/",
        "http://pictures.example.com\\@10.0.0.1/",
        "http://pictures.example.com:80@10.0.0.1/",
        " http://pictures.example.com/",
        "HTTP://pictures.example.com/",
        "ftp://pictures.example.com/",
        "file:///etc/passwd",
        "data:text/html;base64,PGI+",
        "/etc/passwd",
        "",
        7,
        None,
    ],
)
def test_the_server_asks_no_other_host(url: Any) -> None:
    assert "image_url" in refused(chat(image(url)))


@pytest.mark.parametrize(
    "part",
    [
        image(uuid="1"),
        image(image_embeds="gASV"),
        {"type": "image_url", "image_url": INSIDE},
        {"type": "image_url", "image_url": {"url": INSIDE, "uuid": "1"}},
        {"type": "image_url"},
        {"image_url": {"url": INSIDE}},
        {"type": "text", "text": "x", "image_url": {"url": INSIDE}},
        {"type": "input_image", "image_url": INSIDE},
        {"type": "video_url", "video_url": {"url": "data:video/mp4;base64,"}},
        {"type": "input_audio", "input_audio": {"data": ""}},
    ],
)
def test_nothing_but_plain_images_is_taken(part: dict[str, Any]) -> None:
    refused(chat(part))


def test_images_are_taken_in_chats_alone() -> None:
    item = {"role": "user", "content": [image()]}
    for field in ("input", "previous_input_messages"):
        refused(json.dumps({field: [item]}).encode())
    refused(json.dumps({"messages": [{"role": "tool", "output": [image()]}]}).encode())


def test_an_image_counts_as_no_text() -> None:
    bounds = replace(BOUNDS, prompt_tokens=4, chars_per_token=25)
    large = INSIDE + "A" * 200
    check_body(chat(image(large), {"type": "text", "text": "x" * 20}), bounds)
    text = {"type": "text", "text": "data:image/png;base64," + "A" * 200}
    assert "characters" in refused(chat(image(), text), bounds)

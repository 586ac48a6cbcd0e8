"""Images in chats, through the front end of a node: taken, bounded, and refused by name."""

import base64
import io
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from threading import Thread
from typing import Any

import httpx
import pytest

from tests.models.image_families import picture, write_image_family
from tests.server.node import ServedNode, served_node

TOKENS_OF_AN_IMAGE = 19
"""Sixteen that the encoder makes, and three around them."""


def inside(seed: int, side: int = 112) -> str:
    """Return an image as a URL that contains it."""
    with io.BytesIO() as stream:
        picture(seed, side).save(stream, "PNG")
        return f"data:image/png;base64,{base64.b64encode(stream.getvalue()).decode()}"


def image(url: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url}}


TEXT = {"type": "text", "text": "What is this?"}
ONE, TWO = image(inside(1)), image(inside(2))
IMAGE_BYTES = 112 * 112 * 3 * 4
"""Of the features of one image in the tests' float32."""


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedNode]:
    model = tmp_path_factory.mktemp("models") / "idefics3"
    write_image_family(model, "idefics3")
    options = ("--engines", "2", "--served-model-name", "m", "--limit-mm-per-prompt")
    limits = ('{"image": 3}', "--max-image-bytes", str(2 * IMAGE_BYTES + (64 << 10)))
    cache = tmp_path_factory.mktemp("c")  # of a short name: sockets are below it
    with served_node(cache, str(model), *options, *limits) as found:
        yield found


@pytest.fixture(scope="module")
def client(node: ServedNode) -> Iterator[httpx.Client]:
    with node.client() as found:
        yield found


def ask(client: httpx.Client, *parts: dict[str, Any], **more: Any) -> httpx.Response:
    messages = [{"role": "user", "content": list(parts)}]
    body = {"model": "m", "messages": messages, "max_tokens": 4, **more}
    return client.post("/v1/chat/completions", json=body)


def refusal(answer: httpx.Response) -> str:
    assert answer.status_code == 400, answer.text
    return str(answer.json()["error"]["message"])


def test_images_become_tokens_of_the_prompt(client: httpx.Client) -> None:
    counts = []
    for parts in ((TEXT,), (TEXT, ONE), (TWO, TEXT, ONE)):
        answer = ask(client, *parts)
        assert answer.status_code == 200, answer.text
        counts.append(answer.json()["usage"]["prompt_tokens"])
    none, one, two = counts
    assert one - none >= TOKENS_OF_AN_IMAGE
    assert two - one >= TOKENS_OF_AN_IMAGE


def test_features_of_a_request_are_bounded(client: httpx.Client) -> None:
    for parts, n in (((ONE, TWO, ONE), 1), ((ONE, TWO), 2)):
        assert "--max-image-bytes" in refusal(ask(client, *parts, n=n))
    assert ask(client, ONE, TWO).status_code == 200


def test_more_images_than_allowed_are_refused(client: httpx.Client) -> None:
    assert "3 image" in refusal(ask(client, *[ONE] * 4))


@pytest.mark.parametrize(
    "part",
    [
        image("file:///etc/hostname"),
        image("https://example.com/a.png"),
        {"type": "video_url", "video_url": {"url": "data:video/mp4;base64,AAAA"}},
        {"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}},
        {**ONE, "uuid": "1"},
        image("data:image/png;base64,AAAA"),
        image("data:image/svg+xml;base64,PHN2Zy8+"),
    ],
)
def test_other_parts_are_refused(client: httpx.Client, part: dict[str, Any]) -> None:
    refusal(ask(client, TEXT, part))


def test_a_host_that_is_not_named_is_not_asked(client: httpx.Client) -> None:
    asked = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            self.send_error(404)

    server = HTTPServer(("127.0.0.1", 0), Handler)
    Thread(target=server.serve_forever, daemon=True).start()
    try:
        refusal(ask(client, image(f"http://127.0.0.1:{server.server_port}/a.png")))
    finally:
        server.shutdown()
        server.server_close()
    assert asked == []

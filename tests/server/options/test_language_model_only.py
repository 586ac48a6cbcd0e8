"""The text of a multimodal model, served without what sees images."""

import json
from pathlib import Path

import pytest
from transformers import AutoConfig

from tests.random_checkpoint import CheckpointSpec, model_config, write_checkpoint
from tests.server.node import ServedNode

PICTURE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}


def test_text_is_served_and_an_image_refused(tmp_path_factory: pytest.TempPathFactory) -> None:
    model = tmp_path_factory.mktemp("models") / "idefics3"
    write_multimodal(model)
    node = ServedNode(
        tmp_path_factory.mktemp("c"),  # of a short name: sockets are below it
        *(str(model), "--engines", "2", "--language-model-only"),
    )
    try:
        assert node.url, node.lines
        with node.client() as client:
            for content, status in (("Hello", 200), ([PICTURE], 400)):
                request = {
                    "model": str(model),
                    "messages": [{"role": "user", "content": content}],
                    "max_tokens": 4,
                }
                answer = client.post("/v1/chat/completions", json=request)
                assert answer.status_code == status, answer.text
        assert "image_url" in answer.json()["error"]["message"]
    finally:
        node.stop()


def write_multimodal(path: Path) -> None:
    """Write a model of text and images whose text is a Llama's."""
    spec = CheckpointSpec(layers=1)
    write_checkpoint(path, spec)
    config = AutoConfig.for_model("idefics3", text_config=model_config(spec)).to_dict()
    config |= {"architectures": ["Idefics3ForConditionalGeneration"], "dtype": "float32"}
    (path / "config.json").write_text(json.dumps(config))

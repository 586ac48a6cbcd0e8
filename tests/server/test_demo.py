"""The demo checkpoint and the small variants that other tests compare tokens on."""

import json
import multiprocessing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from server.demo import (
    DEMO,
    SPECIAL_TOKENS,
    Architecture,
    CheckpointSpec,
    ensure_demo_model,
    write_checkpoint,
)
from tests.variety import ends_in_loop, is_varied

PROMPTS = (
    "Hello",
    "The engines of a node",
    "def main():\n    return",
    "user: What is a block table?\nassistant: ",
    "A request stays in the pool until a unit can start it. " * 12,
)

SPECS = {
    "demo": DEMO,
    "llama-1-kv-head": CheckpointSpec(kv_heads=1, layers=2, seed=1),
    "llama-2-kv-heads": CheckpointSpec(kv_heads=2, layers=2, seed=2),
    "llama-8-kv-heads": CheckpointSpec(kv_heads=8, layers=2, seed=3),
    "qwen2": CheckpointSpec(Architecture.QWEN2, layers=2),
    "qwen3": CheckpointSpec(Architecture.QWEN3, layers=2),
    "qwen3-tied": CheckpointSpec(Architecture.QWEN3, layers=2, tied_embeddings=True),
}


@pytest.fixture(scope="module", params=SPECS)
def checkpoint(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[CheckpointSpec, Path]:
    spec = SPECS[request.param]
    path = tmp_path_factory.mktemp("checkpoints") / request.param
    write_checkpoint(path, spec)
    return spec, path


def greedy(path: Path, tokens: int = 32) -> list[list[int]]:
    tokenizer = AutoTokenizer.from_pretrained(path)
    model = AutoModelForCausalLM.from_pretrained(path)
    outputs = []
    for prompt in PROMPTS:
        encoded = tokenizer(prompt, return_tensors="pt")
        length = encoded["input_ids"].shape[1]
        output = model.generate(**encoded, max_new_tokens=tokens, do_sample=False)
        outputs.append(output[0, length:].tolist())
    return outputs


def test_transformers_loads_every_weight(checkpoint: tuple[CheckpointSpec, Path]) -> None:
    spec, path = checkpoint
    model, report = AutoModelForCausalLM.from_pretrained(path, output_loading_info=True)
    assert type(model).__name__.lower() == f"{spec.architecture}forcausallm"
    assert not any(report[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert model.config.num_key_value_heads == spec.kv_heads
    assert model.config.rope_parameters["rope_theta"] == 10_000.0


def test_tokenizer_gives_text_back(checkpoint: tuple[CheckpointSpec, Path]) -> None:
    spec, path = checkpoint
    tokenizer = AutoTokenizer.from_pretrained(path)
    assert len(tokenizer) == spec.vocab_size
    assert tokenizer.convert_tokens_to_ids(list(SPECIAL_TOKENS)) == [0, 1, 2]
    for text in (*PROMPTS, "Grüße, 世界 \U0001f41f"):
        assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def test_chat_template_shows_messages_and_tools(checkpoint: tuple[CheckpointSpec, Path]) -> None:
    tokenizer = AutoTokenizer.from_pretrained(checkpoint[1])
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    chat = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert chat == "system: Be brief.\nuser: Hi\nassistant: "
    tools = [{"type": "function", "function": {"name": "look_up"}}]
    assert "look_up" in tokenizer.apply_chat_template(messages, tools=tools, tokenize=False)


def test_greedy_output_varies(checkpoint: tuple[CheckpointSpec, Path]) -> None:
    spec, path = checkpoint
    outputs = greedy(path)
    assert is_varied(outputs)
    assert not any(set(output) & set(range(len(SPECIAL_TOKENS))) for output in outputs), spec


def test_variety_check_sees_a_model_that_loops(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "model", DEMO)
    file = tmp_path / "model" / "model.safetensors"
    tensors = load_file(file)
    # Without attention and MLP the next token depends on the last one alone.
    mute = {
        name: np.zeros_like(t) for name, t in tensors.items() if "o_proj" in name or "down" in name
    }
    save_file({**tensors, **mute, "lm_head.weight": tensors["model.embed_tokens.weight"]}, file)
    outputs = greedy(tmp_path / "model")
    assert all(map(ends_in_loop, outputs))
    assert not is_varied(outputs)


@pytest.mark.parametrize("period", [1, 2, 3, 4])
def test_variety_check_sees_a_loop_after_a_varied_start(period: int) -> None:
    tokens = [*range(20), *(100 + k % period for k in range(12))]
    assert ends_in_loop(tokens)
    assert not ends_in_loop([*tokens[:-1], 7])
    assert not is_varied([tokens, list(range(32))])


def test_variety_check_accepts_distinct_tokens() -> None:
    assert is_varied([list(range(32)), list(range(100, 132))])


def test_second_call_writes_nothing(tmp_path: Path) -> None:
    path = ensure_demo_model(tmp_path)
    before = snapshot(tmp_path)
    assert ensure_demo_model(tmp_path) == path
    assert snapshot(tmp_path) == before


def snapshot(directory: Path) -> dict[str, tuple[int, int]]:
    return {
        str(path): (path.stat().st_ino, path.stat().st_mtime_ns) for path in directory.rglob("*")
    }


def test_default_place_is_the_users_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert ensure_demo_model().parent == tmp_path / "xdg" / "shoal"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert ensure_demo_model().parent == tmp_path / "home" / ".cache" / "shoal"


def test_concurrent_starts_agree_on_one_complete_checkpoint(tmp_path: Path) -> None:
    with multiprocessing.get_context("spawn").Pool(3) as pool:
        paths = pool.map(ensure_demo_model, [tmp_path] * 3)
    assert len(set(paths)) == 1
    assert list(tmp_path.iterdir()) == [paths[0]]
    assert json.loads((paths[0] / "config.json").read_text())["model_type"] == "llama"


def test_failed_writing_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_space(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("server.demo.save_file", no_space)
    with pytest.raises(OSError, match="No space left"):
        ensure_demo_model(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_same_spec_gives_the_same_files(tmp_path: Path) -> None:
    for name in ("one", "two"):
        write_checkpoint(tmp_path / name, SPECS["qwen2"])
    for file in (tmp_path / "one").iterdir():
        assert file.read_bytes() == (tmp_path / "two" / file.name).read_bytes()


def test_seeds_give_different_weights(tmp_path: Path) -> None:
    for seed in (1, 2):
        write_checkpoint(tmp_path / str(seed), CheckpointSpec(layers=1, seed=seed))
    one, two = (load_file(tmp_path / str(seed) / "model.safetensors") for seed in (1, 2))
    assert one.keys() == two.keys()
    assert not np.array_equal(one["model.embed_tokens.weight"], two["model.embed_tokens.weight"])


def test_existing_directory_is_not_overwritten(tmp_path: Path) -> None:
    with pytest.raises(FileExistsError):
        write_checkpoint(tmp_path, DEMO)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"heads": 8, "kv_heads": 3}, "8 heads cannot share 3 KV heads evenly"),
        ({"architecture": Architecture.QWEN2, "head_dim": 64}, "Qwen2 has no head_dim"),
    ],
)
def test_impossible_shapes_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        CheckpointSpec(**fields)

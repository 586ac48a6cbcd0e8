"""The random checkpoints that tests compare tokens on."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.random_checkpoint import SPECIAL_TOKENS, Architecture, CheckpointSpec, write_checkpoint
from tests.variety import ends_in_loop, is_varied

PROMPTS = (
    "Hello",
    "The engines of a node",
    "def main():\n    return",
    "user: What is a block table?\nassistant: ",
    "A request stays in the pool until a unit can start it. " * 12,
)

SPECS = {
    "llama": CheckpointSpec(),
    "llama-1-kv-head": CheckpointSpec(kv_heads=1, layers=2, seed=1),
    "llama-2-kv-heads": CheckpointSpec(kv_heads=2, layers=2, seed=2),
    "llama-8-kv-heads": CheckpointSpec(kv_heads=8, layers=2, seed=3),
    "qwen2": CheckpointSpec(Architecture.QWEN2, layers=2),
    "qwen3": CheckpointSpec(Architecture.QWEN3, layers=2),
    "qwen3-tied": CheckpointSpec(Architecture.QWEN3, layers=2, tied_embeddings=True),
    "qwen3-moe": CheckpointSpec(Architecture.QWEN3_MOE, layers=3),
    "mixtral": CheckpointSpec(Architecture.MIXTRAL, layers=2),
    "glm4-moe": CheckpointSpec(Architecture.GLM4_MOE, layers=3),
    "deepseek-v2": CheckpointSpec(Architecture.DEEPSEEK_V2, layers=3, kv_heads=8),
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
    assert type(model).__name__ == spec.architecture.class_name
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
    write_checkpoint(tmp_path / "model", CheckpointSpec())
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
        write_checkpoint(tmp_path, CheckpointSpec())


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

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from shoal.server.gate.body_checks import check_body
from shoal.server.gate.bounds import DEFAULTS, BoundsError
from tests.work_counts import bytecodes

SMALL = replace(
    DEFAULTS,
    prompt_tokens=8,
    chars_per_token=16,
    messages=3,
    tools=2,
    choices=4,
    logprobs=5,
    stops=2,
    stop_chars=6,
    words=2,
    token_ids=3,
    identifier_chars=10,
    template_values=2,
    grammar_bytes=400,
    grammar_nesting=6,
    regex_chars=12,
    nesting=12,
)


def check(**fields: Any) -> None:
    check_body(json.dumps(fields).encode(), SMALL)


def refused(**fields: Any) -> BoundsError:
    with pytest.raises(BoundsError) as caught:
        check(**fields)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 200
    return caught.value


def nested(depth: int) -> Any:
    value: Any = {}
    for _ in range(depth - 1):
        value = {"properties": value}
    return value


def said(text: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": text}]


TOOL = {"type": "function", "function": {"name": "f", "parameters": {}}}


@pytest.mark.parametrize(
    "fields",
    [
        {"prompt": "x" * 128, "n": 4, "logprobs": 5, "prompt_logprobs": 0, "stop": ["ab", "cd"]},
        {"prompt": [1] * 8, "logit_bias": {"1": 1, "2": 1, "3": 1}, "stop": "x"},
        {"prompt": [[1], [2]], "n": 2},
        {"prompt": ["a", "b", "c", "d"]},
        {"prompt": [], "n": 4},
        {"messages": said("hello"), "logprobs": True, "top_logprobs": 5, "tools": [TOOL] * 2},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}, "ho"]}]},
        {"messages": said("x"), "chat_template_kwargs": {"thinking": False, "level": "low"}},
        {"messages": said("x"), "chat_template": None, "kv_transfer_params": None},
        {"input": [{"type": "function_call_output", "call_id": "1", "output": "text"}]},
        {"input": "x" * 128, "cache_salt": "0123456789"},
        {"prompt": "x", "response_format": {"type": "json_schema", "json_schema": nested(5)}},
        {"prompt": "x", "structured_outputs": {"regex": "[a-z]{1,5}"}},
        {"prompt": "x", "structured_outputs": {"json": '{"type": "object"}'}},
        {"prompt": "x", "structured_outputs": {"json": {"default": {"json": "no JSON"}}}},
        {"tokens": [1] * 8},
        {"prompt": "x", "top_k": 2**63 - 1, "seed": -(2**63), "length_penalty": -1.5},
        {"prompt": "x", "structured_outputs": {"json": {"maximum": 2**64 - 1}}},
        {"input": [{"role": "assistant", "content": [{"type": "output_text", "text": "x"}]}]},
        {"input": [{"role": "assistant", "content": "x"}, {"role": "user", "content": []}]},
        {"messages": [{"role": "assistant", "content": [{"type": "refusal", "refusal": "x"}]}]},
        {"messages": said("x"), "tools": [TOOL], "tool_choice": TOOL},
        {"input": "x", "tools": [{"type": "function", "name": "f"}], "tool_choice": TOOL},
        {"prompt": 7, "n": [2], "stop": 3, "tools": None, "logit_bias": []},
    ],
)
def test_what_is_within_bounds_or_vllms_to_judge_passes(fields: dict[str, Any]) -> None:
    check(**fields)


@pytest.mark.parametrize(
    ("param", "fields"),
    [
        ("n", {"n": 5}),
        ("n", {"n": 10**100}),
        ("n", {"n": "2"}),  # what vLLM would read as a number, no bound would see
        ("n", {"n": 2.0}),
        ("best_of", {"best_of": "2"}),
        ("top_logprobs", {"top_logprobs": "2"}),
        ("length_penalty", {"length_penalty": "1e9"}),
        ("messages", {"messages": None}),
        ("messages", {"messages": [{"role": "assistant", "tool_calls": 5}]}),
        ("messages", {"messages": "x"}),
        ("tools", {"tools": 0}),
        ("best_of", {"best_of": 5}),
        ("n", {"prompt": "x", "n": 5}),
        ("prompt", {"prompt": ["x"] * 5}),
        ("prompt", {"prompt": ["x", "y"], "n": 3}),
        ("prompt", {"prompt": [1] * 9}),
        ("prompt", {"prompt": [[1], [1] * 9]}),
        ("prompt", {"prompt": "x" * 129}),
        ("prompt", {"prompt": ["x" * 80, "x" * 80]}),
        ("messages", {"messages": said("x") * 4}),
        ("messages", {"messages": said("x" * 129)}),
        ("input", {"input": "x" * 129}),
        ("input", {"input": said("x") * 4}),
        ("instructions", {"instructions": "x" * 129}),
        ("logprobs", {"logprobs": 6}),
        ("logprobs", {"logprobs": -1}),
        ("top_logprobs", {"top_logprobs": 6}),
        ("prompt_logprobs", {"prompt_logprobs": 6}),
        ("prompt_logprobs", {"prompt_logprobs": -1}),
        ("stop", {"stop": ["a", "b", "c"]}),
        ("stop", {"stop": "x" * 7}),
        ("stop", {"stop": ["x" * 7]}),
        ("bad_words", {"bad_words": ["a", "b", "c"]}),
        ("logit_bias", {"logit_bias": {str(k): 1 for k in range(4)}}),
        ("stop_token_ids", {"stop_token_ids": [1] * 4}),
        ("allowed_token_ids", {"allowed_token_ids": [1] * 4}),
        ("logprob_token_ids", {"logprob_token_ids": [1] * 4}),
        ("tokens", {"tokens": [1] * 9}),
        ("user", {"user": "x" * 11}),
        ("request_id", {"request_id": "x" * 11}),
        ("cache_salt", {"cache_salt": "x" * 11}),
        ("metadata", {"metadata": {str(k): "" for k in range(3)}}),
        ("tools", {"tools": [TOOL] * 3}),
        ("tools", {"tools": [{**TOOL, "x": "y" * 400}]}),
        ("response_format", {"response_format": nested(8)}),
        ("response_format", {"response_format": {"pattern": "x" * 13}}),
        ("structured_outputs.regex", {"structured_outputs": {"regex": "x" * 13}}),
        ("structured_outputs.json", {"structured_outputs": {"json": json.dumps(nested(8))}}),
        (
            "structured_outputs.json",
            {"structured_outputs": {"json": json.dumps({"pattern": "x" * 13})}},
        ),
        ("structured_outputs.json", {"structured_outputs": {"json": "no JSON"}}),
        ("structured_outputs", {"structured_outputs": {"choice": ["x" * 50] * 9}}),
        ("chat_template_kwargs", {"chat_template_kwargs": {"a": 1, "b": 2, "c": 3}}),
        ("chat_template_kwargs", {"chat_template_kwargs": {"a": [1]}}),
        ("chat_template_kwargs", {"chat_template_kwargs": {"a": "x" * 7}}),
        ("chat_template_kwargs", {"chat_template_kwargs": ["a"]}),
        ("length_penalty", {"length_penalty": -1e76}),
        ("length_penalty", {"length_penalty": 11}),
        ("length_penalty", {"length_penalty": 10**400}),
        ("top_k", {"top_k": 2**63}),
        ("seed", {"seed": -(2**63) - 1}),
        ("repetition_detection", {"repetition_detection": {"min_count": 2**64}}),
    ],
)
def test_what_is_beyond_a_bound_is_refused_by_its_name(param: str, fields: dict[str, Any]) -> None:
    error = refused(**fields)
    assert error.param == param
    assert str(error).startswith(f"{param}: ")


@pytest.mark.parametrize(
    "name",
    [
        *("chat_template", "prompt_embeds", "mm_processor_kwargs", "media_io_kwargs"),
        *("kv_transfer_params", "ec_transfer_params", "vllm_xargs"),
    ],
)
@pytest.mark.parametrize("value", [{}, {"a": 1}, "", "text", [], False])
def test_fields_that_reach_what_is_not_for_strangers_are_refused(name: str, value: Any) -> None:
    assert refused(prompt="x", **{name: value}).param == name


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image_url", "image_url": {"url": "http://10.0.0.1/"}},
        {"image_url": "http://10.0.0.1/"},
        {"type": "text", "text": "x", "image_url": "http://10.0.0.1/"},
        {"type": "text", "text": "x", "uuid": "1", "audio_url": {"url": "file:///etc/passwd"}},
        {"type": "input_audio", "input_audio": {"data": ""}},
        {"type": "video_url", "video_url": {"url": "data:video/jpeg;base64,"}},
        {"type": "image_embeds", "image_embeds": "gASV"},
        {"type": "prompt_embeds", "data": "gASV"},
        {"type": "input_file", "file_url": "http://10.0.0.1/"},
        {"type": "file", "file": {"file_id": "1"}},
        {"type": "computer_screenshot", "image_url": "http://10.0.0.1/"},
        {"type": ["image_url"]},
        {"type": {"a": 1}},
        {"type": None, "image_url": "http://10.0.0.1/"},
    ],
)
@pytest.mark.parametrize("route", ["messages", "input", "output"])
def test_nothing_but_text_is_taken(part: dict[str, Any], route: str) -> None:
    message: dict[str, Any] = {"role": "user", "content": [{"type": "text", "text": "x"}, part]}
    if route == "output":
        message = {"type": "computer_call_output", "call_id": "1", "output": part}
    assert refused(**{"messages" if route == "messages" else "input": [message]})


@pytest.mark.parametrize(
    "kind", ["mcp", "web_search", "code_interpreter", "file_search", None, [1]]
)
def test_tools_that_the_server_would_have_to_call_are_refused(kind: Any) -> None:
    tools = [{"type": kind, "server_label": "x", "server_url": "http://10.0.0.1/"}]
    assert refused(input="x", tools=tools).param == "tools"


@pytest.mark.parametrize("value", [[], "text", True, 7])
def test_a_constraint_is_an_object(value: Any) -> None:
    """vLLM looks into it before it knows what it is."""
    assert refused(prompt="x", structured_outputs=value).param == "structured_outputs"


@pytest.mark.parametrize("parts", [[], ["x"], [{"type": "refusal", "refusal": "x"}], [None]])
def test_an_earlier_answer_of_a_response_begins_with_text(parts: Any) -> None:
    """vLLM takes the text of its first part, whatever that is."""
    item = {"type": "message", "role": "assistant", "content": parts}
    assert refused(input=[*said("x"), item]).param == "input"


def test_an_output_in_parts_is_one_of_the_client_s() -> None:
    """vLLM takes it for one of its own if it says who created it, and then knows no such parts."""
    item: dict[str, Any] = {"type": "function_call_output", "call_id": "1", "created_by": None}
    assert refused(input=[{**item, "output": [{"type": "input_text", "text": "x"}]}])
    check(input=[{**item, "output": "x"}])


@pytest.mark.parametrize("tool", [{"type": "function"}, {"function": {}}, {"function": 7}])
def test_tools_of_which_one_is_chosen_have_names(tool: dict[str, Any]) -> None:
    fields = {"messages": said("x"), "tools": [TOOL, tool]}
    assert refused(**fields, tool_choice=TOOL).param == "tools"
    check(**fields, tool_choice="auto")


@pytest.mark.parametrize("name", ["chat_template", "tokenize", "tools", "return_tensors"])
def test_arguments_of_the_template_engine_are_no_variables(name: str) -> None:
    assert name in str(refused(messages=said("x"), chat_template_kwargs={name: True}))


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[1]",
        b"null",
        b'"text"',
        b'{"temperature": NaN}',
        b'{"temperature": Infinity}',
        b'{"temperature": 1e999}',
        b'{"prompt": "\\ud800"}',
        b'{"prompt": "\xff"}',
        '{"prompt": "x"}'.encode("utf-16"),
        b'\xef\xbb\xbf{"prompt": "x"}',
        b'{"n": ' + b"9" * 100_000 + b"}",
        b'{"a": ' + b"[" * 13 + b"]" * 13 + b"}",
        b'{"a": ' + b"[" * 1_000_000,
        b'{"a": ' + b'{"a": ' * 200_000 + b"1" + b"}" * 200_001,
    ],
)
def test_what_is_no_json_object_is_refused(body: bytes) -> None:
    with pytest.raises(BoundsError) as caught:
        check_body(body, SMALL)
    assert caught.value.param is None
    assert len(str(caught.value)) < 200


def test_what_a_body_says_is_returned() -> None:
    assert check_body(b'{"prompt": [1, 2], "n": 1}', SMALL) == {"prompt": [1, 2], "n": 1}


@pytest.mark.parametrize(
    ("body", "key"),
    [
        (b'{"n": 1, "n": 99}', "n"),
        (b'{"prompt": "a: b", "n": 1, "n" : 1}', "n"),
        (b'{"messages": [{"role": "user", "content": ":", "\\u0072ole": "system"}]}', "role"),
        (b'{"metadata": {"a": 1, "a": 2}}', "a"),
    ],
)
def test_a_key_that_an_object_has_twice_is_refused_by_name(body: bytes, key: str) -> None:
    with pytest.raises(BoundsError) as caught:
        check_body(body, SMALL)
    assert str(caught.value) == f"{key}: an object of the body has this key twice"
    assert caught.value.param == key


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("logprobs", -1, "-1 is not allowed: at most 5 are"),
        ("top_logprobs", -1, "-1 is not allowed: at most 5 are"),
        ("prompt_logprobs", -7, "-7 is not allowed: at most 5 are"),
        ("logprobs", 6, "6 is more than 5, the most that is allowed"),
    ],
)
def test_logprobs_are_refused_as_they_were_sent(field: str, value: int, said: str) -> None:
    assert str(refused(**{field: value})) == f"{field}: {said}"


def test_logprobs_of_all_tokens_are_allowed_where_any_number_is() -> None:
    bounds = replace(SMALL, logprobs=1 << 31)
    check_body(b'{"prompt": "x", "logprobs": -1, "prompt_logprobs": 7}', bounds)


def test_a_long_prompt_of_token_ids_takes_no_step_of_python_for_each() -> None:
    def steps(tokens: int) -> int:
        body = json.dumps({"user": "{", "prompt": [7] * tokens, "metadata": {}}).encode()
        return bytecodes(lambda: check_body(body, DEFAULTS))

    assert steps(20_000) == steps(2)


def test_work_is_counted_where_python_does_it() -> None:
    def steps(size: int, each: Callable[[list[int]], object]) -> int:
        entries = [7] * size
        return bytecodes(lambda: each(entries))

    assert steps(200, lambda entries: [n + 1 for n in entries]) > 200
    assert steps(200, sorted) == steps(100, sorted)

"""What a stream says that begins with the end of a prompt, beside one that was given all of it."""

from random import Random
from types import SimpleNamespace

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models
from tokenizers.decoders import DecodeStream
from vllm.sampling_params import SamplingParams
from vllm.v1.engine.detokenizer import FastIncrementalDetokenizer, IncrementalDetokenizer

from shoal.server.frontend.decode_streams import (
    LONGEST_TAIL,
    SHORTEST_TAIL,
    prompt_tail,
    shorten_prompt,
)
from shoal.server.options.serve_options import DEMO_CHECKPOINT

_PIECES = ("\u2581the", "\u2581cat", "s", ".", "\u2581", "\u65e5", "\u00e9t\u00e9", "\u2581\u00df")


def bytes_of_words() -> Tokenizer:
    """Return a tokenizer of the kind of GPT-2, Llama 3 and Qwen: its pieces are of bytes."""
    return Tokenizer.from_file(f"{DEMO_CHECKPOINT}/tokenizer.json")


def words_or_bytes() -> Tokenizer:
    """Return one of the kind of Llama 2 and Gemma: pieces of text, and bytes beside them."""
    names = ["<unk>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *_PIECES]
    vocabulary = {name: number for number, name in enumerate(names)}
    made = Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>", byte_fallback=True))
    made.add_special_tokens([AddedToken("</s>", special=True)])
    made.decoder = decoders.Sequence(
        [
            decoders.Replace("\u2581", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return made


TOKENIZERS = {"bytes": bytes_of_words(), "words": words_or_bytes()}


@pytest.fixture(params=TOKENIZERS)
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    return TOKENIZERS[request.param]


def said(tokenizer: Tokenizer, prompt: list[int], outputs: list[int]) -> list[str | None]:
    """Return what a stream makes of each output token; the kind of an error ends the list."""
    stream = DecodeStream(ids=prompt, skip_special_tokens=True)
    texts: list[str | None] = []
    try:
        texts.extend(stream.step(tokenizer, token) for token in outputs)
    except Exception as error:  # noqa: BLE001 - tokenizers raises no other kind
        texts.append(str(error).partition(".")[0])
    return texts


def prompt_of(tokenizer: Tokenizer, random: Random, length: int) -> list[int]:
    """Return ids such as tokenizers make of text; the last character may lack some of its bytes."""
    ids: list[int] = []
    while len(ids) < length:
        piece = random.choice([*_PIECES, *"a\u00df\u8a9e\U0001f600\ufffd", "</s>"])
        known = tokenizer.token_to_id(piece)
        names = [f"<0x{byte:02X}>" for byte in piece.encode()] if known is None else [piece]
        found = [tokenizer.token_to_id(name) for name in names]
        ids += tokenizer.encode(piece).ids if None in found else found
    return ids[:length]


def test_what_it_says_does_not_depend_on_the_rest_of_the_prompt(tokenizer: Tokenizer) -> None:
    random, shortened = Random(0), 0
    for _ in range(3000):
        prompt = prompt_of(tokenizer, random, random.randrange(1, 60))
        outputs = [random.randrange(tokenizer.get_vocab_size()) for _ in range(8)]
        tail = list(prompt_tail(tokenizer, prompt, skip_special_tokens=True))
        assert prompt[-len(tail) :] == tail
        assert said(tokenizer, tail, outputs) == said(tokenizer, prompt, outputs), (prompt, outputs)
        shortened += len(tail) < len(prompt)
    assert shortened > 1000


def test_of_pieces_of_bytes_it_does_not_whatever_the_ids() -> None:
    random, tokenizer = Random(0), TOKENIZERS["bytes"]
    for _ in range(3000):
        prompt, outputs = (
            [random.randrange(tokenizer.get_vocab_size()) for _ in range(count)]
            for count in (random.randrange(1, 40), 8)
        )
        tail = list(prompt_tail(tokenizer, prompt, skip_special_tokens=True))
        assert said(tokenizer, tail, outputs) == said(tokenizer, prompt, outputs), (prompt, outputs)


def test_it_does_on_fewer_tokens_than_are_kept() -> None:
    tokenizer = TOKENIZERS["words"]
    the, cat = (tokenizer.token_to_id(piece) for piece in _PIECES[:2])
    assert said(tokenizer, [the, the], [cat]) == [" cat"]
    assert said(tokenizer, [], [cat]) == ["cat"]


def test_a_long_prompt_is_cut_to_a_few_tokens(tokenizer: Tokenizer) -> None:
    word = tokenizer.token_to_id(_PIECES[0]) or tokenizer.encode(" the").ids[0]
    tail = prompt_tail(tokenizer, [word] * 50_000, skip_special_tokens=True)
    assert len(tail) == SHORTEST_TAIL


def test_it_is_cut_where_there_is_text() -> None:
    tokenizer = TOKENIZERS["words"]
    the, end = tokenizer.token_to_id(_PIECES[0]), tokenizer.token_to_id("</s>")
    prompt = [the] * 100 + [end] * 9
    assert len(prompt_tail(tokenizer, prompt, skip_special_tokens=True)) == 10
    assert len(prompt_tail(tokenizer, prompt, skip_special_tokens=False)) == SHORTEST_TAIL


def test_a_prompt_without_a_place_to_cut_is_kept() -> None:
    tokenizer = TOKENIZERS["words"]
    the, first = tokenizer.token_to_id(_PIECES[0]), tokenizer.token_to_id("<0xE6>")
    for prompt in ([], [the] * (SHORTEST_TAIL - 1), [the] * 100 + [first] * LONGEST_TAIL):
        assert prompt_tail(tokenizer, prompt, skip_special_tokens=True) is prompt


def detokenizer(prompt: list[int] | None) -> FastIncrementalDetokenizer:
    request = SimpleNamespace(
        request_id="r", prompt_token_ids=prompt, sampling_params=SamplingParams()
    )
    tokenizer = SimpleNamespace(_tokenizer=TOKENIZERS["bytes"])
    return FastIncrementalDetokenizer(tokenizer, request)


def test_vllms_detokenizer_goes_on_from_the_end_of_its_prompt() -> None:
    prompt = TOKENIZERS["bytes"].encode("Once upon a time there was a cat.").ids * 9
    outputs = TOKENIZERS["bytes"].encode(" It was grey.").ids
    whole, short = detokenizer(prompt), detokenizer(prompt)
    before = short.stream
    shorten_prompt(short, prompt)
    assert short.stream is not before
    for made in (whole, short):
        made.update(outputs, stop_terminated=False)
    assert short.output_text == whole.output_text == " It was grey."


def test_other_detokenizers_are_left_alone() -> None:
    none = IncrementalDetokenizer()
    shorten_prompt(none, [1, 2, 3])
    assert not hasattr(none, "stream")
    for made, prompt, told in ((detokenizer([1] * 9), None, 0), (detokenizer([1] * 9), [1] * 9, 1)):
        made.update([2] * told, stop_terminated=False)
        before = made.stream
        shorten_prompt(made, prompt)
        assert made.stream is before

"""Prompts have exactly the tokens asked for, and share exactly what they should."""

import json
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from aiohttp import web
from tokenizers import Tokenizer, models, pre_tokenizers

from shoal.loadgen.client import Client, ClientError, Settings
from shoal.loadgen.prompts import WORDS, Prompts, text_prompts, token_prompts
from shoal.loadgen.workload import Arrival, Block
from tests.loadgen.stand_in import StandIn, events, stand_in, stream

OVERHEAD = 5


@pytest_asyncio.fixture
async def server() -> AsyncIterator[StandIn]:
    async with stand_in() as running:
        yield running


def client(server: StandIn) -> Client:
    return Client(Settings(server.url), time.monotonic)


def arrival(tokens: int, *prefix: Block) -> Arrival:
    return Arrival(0.0, tokens, 1, prefix=prefix)


def common(one: Any, other: Any) -> int:
    pairs = enumerate(zip(one, other, strict=False))
    return next((k for k, (a, b) in pairs if a != b), min(len(one), len(other)))


def test_lengths_are_exact_and_prompts_repeat_with_the_seed() -> None:
    prompts = Prompts(range(100, 1000), seed=1)
    made = [prompts.make(k, arrival(n)) for k, n in enumerate((1, 7, 5000))]
    assert [len(prompt) for prompt in made] == [1, 7, 5000]
    assert made[2] == Prompts(range(100, 1000), seed=1).make(2, arrival(5000))
    assert made[2] != Prompts(range(100, 1000), seed=2).make(2, arrival(5000))
    assert all(100 <= token < 1000 for token in made[2])


def test_prompts_of_their_own_have_nothing_in_common() -> None:
    prompts = Prompts(range(10**6), seed=0)
    assert common(prompts.make(0, arrival(100)), prompts.make(1, arrival(100))) == 0


def test_the_same_blocks_are_the_same_tokens() -> None:
    a, b, c = (Block(name, 512) for name in "abc")
    prompts = Prompts(range(10**6), seed=0)
    first = prompts.make(0, arrival(1200, a, b))
    assert common(first, prompts.make(1, arrival(2000, a, b, c))) == 1024
    assert common(first, prompts.make(2, arrival(600, a, b))) == 600
    assert common(first, prompts.make(3, arrival(1024, a, c))) == 512
    assert len(prompts.make(4, arrival(600, a, b))) == 600


async def test_token_ids_are_those_of_the_servers_tokenizer(server: StandIn) -> None:
    async def tokenize(_: web.Request) -> web.Response:
        return web.json_response({"tokens": [7, 9, 9, 8]})

    async with client(server) as one:
        unknown = (await token_prompts(one, 0)).make(0, arrival(500))
        server.routes["/tokenize"] = tokenize
        known = (await token_prompts(one, 0)).make(0, arrival(500))
    assert set(known) == {7, 8, 9}
    assert min(unknown) >= 100


def word_tokens(text: str, single: frozenset[str]) -> list[int]:
    """Tokenise a text: one token a word that is known, and two of any other."""
    words = [f" {word}" for word in text.split()]
    return [token for word in words for token in ([1] if word in single else [1, 2])]


@pytest.mark.parametrize("single", [frozenset(WORDS), frozenset(WORDS[:10])])
async def test_text_has_the_tokens_that_the_server_counts(
    server: StandIn, single: frozenset[str]
) -> None:
    async def tokenize(request: web.Request) -> web.Response:
        return web.json_response({"tokens": word_tokens((await request.json())["prompt"], single)})

    async def answer(request: web.Request) -> web.StreamResponse:
        prompt = (await request.json())["prompt"]
        return await stream(request, *events(len(word_tokens(prompt, single)) + OVERHEAD, 1))

    server.routes["/tokenize"] = tokenize
    server.answer = answer
    async with client(server) as one:
        prompts = await text_prompts(one, 0)
    text = prompts.make(0, arrival(100))
    assert len(word_tokens(str(text), single)) + OVERHEAD == 100
    assert len(str(prompts.make(0, arrival(1))).split()) == 1


async def test_texts_without_exact_lengths_are_refused(server: StandIn) -> None:
    async def tokenize(request: web.Request) -> web.Response:
        # A token for every four characters: words run into each other.
        text = (await request.json())["prompt"]
        return web.json_response({"tokens": list(range(len(text) // 4))})

    server.routes["/tokenize"] = tokenize
    async with client(server) as one:
        with pytest.raises(ClientError, match="no exact length"):
            await text_prompts(one, 0)


async def test_a_local_tokenizer_serves_as_well(server: StandIn, tmp_path: Path) -> None:
    words = {word.strip(): k for k, word in enumerate(WORDS)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="the"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    path = tmp_path / "tokenizer.json"
    tokenizer.save(str(path))

    async def answer(request: web.Request) -> web.StreamResponse:
        body = await request.json()
        return await stream(request, *events(len(tokenizer.encode(body["prompt"])) + OVERHEAD, 1))

    server.answer = answer
    async with client(server) as one:
        prompts = await text_prompts(one, 0, path)
        with pytest.raises(ClientError, match="answered 404"):
            await text_prompts(one, 0)
        path.write_text(json.dumps({}))
        with pytest.raises(ClientError, match="cannot read"):
            await text_prompts(one, 0, path)
    assert len(tokenizer.encode(str(prompts.make(0, arrival(64))))) + OVERHEAD == 64

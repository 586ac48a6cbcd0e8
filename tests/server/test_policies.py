"""The layout follows the load, through the public API, and no stream notices but in time."""

import asyncio
import re
from collections.abc import Iterator

import httpx
import openai
import pytest

from tests.server.node import ServedNode, served_node

MODEL = "shoal-demo"
TOKENS = 200


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedNode]:
    cache = tmp_path_factory.mktemp("cache")
    arguments = ("--fake-step-ms", "5", "--max-model-len", "256", "--max-sp", "2")
    with served_node(cache, *arguments) as served:
        yield served


@pytest.fixture
def http(node: ServedNode) -> Iterator[httpx.Client]:
    with node.client() as client:
        yield client


async def stream(client: openai.AsyncOpenAI, prompt: str) -> str:
    chunks = await client.completions.create(
        model=MODEL, prompt=prompt, max_tokens=TOKENS, stream=True
    )
    return "".join([chunk.choices[0].text async for chunk in chunks])


async def streams(url: str, prompts: list[str]) -> list[str]:
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        return list(await asyncio.gather(*(stream(client, prompt) for prompt in prompts)))


def test_a_stream_goes_on_while_its_engine_is_drained(node: ServedNode, http: httpx.Client) -> None:
    (whole,) = asyncio.run(streams(node.url, ["Leaves"]))
    http.post("/admin/layout", json={"units": [[0], [1]]}).raise_for_status()
    text, drained = "", -1
    with openai.OpenAI(base_url=f"{node.url}/v1", api_key="none") as client:
        while drained < 0:  # until a look comes before the request's end
            assert text in ("", whole)
            text = ""
            for chunk in client.completions.create(
                model=MODEL, prompt="Leaves", max_tokens=TOKENS, stream=True
            ):
                text += chunk.choices[0].text
                engines = http.get("/admin/layout").json()["engines"] if drained < 0 else []
                for engine in (each["engine"] for each in engines if each["requests"]):
                    drained = engine
                    http.post("/admin/drain", json={"engines": [engine]}).raise_for_status()
    assert text == whole
    while (engine := http.get("/admin/layout").json()["engines"][drained])["requests"]:
        pass  # the engine's word may be on its way; the test's time limit bounds this
    assert engine["drained"]
    assert http.post("/admin/layout", json={"units": [[0, 1]]}).status_code == 409
    http.post("/admin/resume", json={"engines": [drained]}).raise_for_status()
    http.post("/admin/layout", json={"units": [[0, 1]]}).raise_for_status()


def test_a_stream_goes_on_while_its_request_moves(node: ServedNode, http: httpx.Client) -> None:
    (whole,) = asyncio.run(streams(node.url, ["Moves"]))
    moved = 0
    with openai.OpenAI(base_url=f"{node.url}/v1", api_key="none") as client:
        while not moved:  # until a switch comes before the request's end
            layouts = [[[0, 1]], [[0], [1]]] * 3
            text = ""
            for chunk in client.completions.create(
                model=MODEL, prompt="Moves", max_tokens=TOKENS, stream=True
            ):
                text += chunk.choices[0].text
                if layouts:
                    body = {"units": layouts.pop(0), "preempt": "soft"}
                    moved += http.post("/admin/layout", json=body).json()["requests"]["moved"]
            assert text == whole
    assert http.post("/admin/audit").json()["clean"]


def test_the_threshold_of_the_shift_changes_live(node: ServedNode, http: httpx.Client) -> None:
    def seen() -> dict[str, object]:
        return http.get("/admin/layout").json()["shift"]

    assert seen() == {"threshold": 256, "max_sp": 2, "sp_above": {"tp2": 256}}
    http.post("/admin/layout", json={"units": [[0, 1]]})
    (in_tp,) = asyncio.run(streams(node.url, ["Shifts"]))
    answer = http.post("/admin/shift", json={"threshold": 0})
    assert answer.json() == {"threshold": 0, "max_sp": 2, "sp_above": {"tp2": 0}}
    assert asyncio.run(streams(node.url, ["Shifts"])) == [in_tp]
    assert http.post("/admin/audit").json()["clean"], "and every engine has reported its steps"
    steps = re.findall(r'^shoal_steps_total{.*mode="sp"} (.*)$', http.get("/metrics").text, re.M)
    assert sum(map(float, steps)) == TOKENS
    assert http.post("/admin/shift", json={"threshold": "off"}).json()["sp_above"] == {}
    assert seen()["threshold"] == "off"
    refused = http.post("/admin/shift", json={"threshold": "never"})
    assert refused.status_code == 400
    assert "'never' is no threshold" in refused.json()["error"]["message"]
    http.post("/admin/layout", json={"units": [[0], [1]]})


def test_the_layout_follows_the_load(node: ServedNode, http: httpx.Client) -> None:
    prompts = [f"Prompt {k}" for k in range(48)]
    # One after the other, under a policy that never switches: what each says undisturbed.
    alone = [asyncio.run(streams(node.url, [prompt]))[0] for prompt in prompts[:6]]
    assert http.post("/admin/policy", json={"policy": "flying"}).status_code == 200

    def widest() -> int:
        return max(len(u["engines"]) for u in http.get("/admin/layout").json()["units"])

    async def until(width: int) -> None:
        while await asyncio.to_thread(widest) != width:
            await asyncio.sleep(0.05)

    async def rise_and_fall() -> list[list[str]]:
        async with asyncio.timeout(300):
            await until(2)
            rise = asyncio.create_task(until(1))
            bursts = []
            while not rise.done():  # one burst after the other, for as long as that takes
                bursts.append(await streams(node.url, prompts))
            await until(2)
            return bursts

    bursts = asyncio.run(rise_and_fall())
    assert all(texts[:6] == alone for texts in bursts)
    assert http.get("/admin/policy").json()["moved"] > 0
    assert http.post("/admin/audit").json()["clean"]
    assert http.post("/admin/policy", json={"policy": "manual"}).status_code == 200

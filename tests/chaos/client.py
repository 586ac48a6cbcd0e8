"""A client of a chaos run: sends what was drawn, and writes down what became of it."""

import asyncio
import json
from collections.abc import Mapping
from typing import Any

import httpx

from tests.chaos.checks import Ending, Record
from tests.chaos.events import Plan

ROUTE = "/v1/completions"
_ENDINGS = {500: Ending.FAILED, 503: Ending.POOL_FULL, 504: Ending.EXPIRED}


async def ask(http: httpx.AsyncClient, plan: Plan) -> Record:
    """Send a request, and return what became of it."""
    record = Record(plan, tokens=[])
    try:
        async with asyncio.timeout(plan.cancel_after):
            await _exchange(http, plan, record)
    except TimeoutError:
        record.ending, record.detail = Ending.CANCELLED, ""
    except (httpx.HTTPError, ValueError) as error:
        record.detail = f"{type(error).__name__} after {len(record.tokens)} tokens: {error}"
    return record


async def ask_malformed(http: httpx.AsyncClient, body: bytes, headers: dict[str, str]) -> Record:
    """Send a request that must be refused, and return what became of it."""
    record = Record(None)
    try:
        answer = await http.post(ROUTE, content=body, headers=headers)
        _judge(record, answer.status_code, answer.content)
    except (httpx.HTTPError, ValueError) as error:
        record.detail = f"{type(error).__name__}: {error}"
    return record


async def _exchange(http: httpx.AsyncClient, plan: Plan, record: Record) -> None:
    body, headers = plan.body(), plan.headers()
    async with http.stream("POST", ROUTE, json=body, headers=headers) as response:
        if response.status_code != 200 or not plan.stream:
            _judge(record, response.status_code, await response.aread())
            return
        events: list[dict[str, Any]] = [{}]
        ends = 0
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                events.append(json.loads(line.removeprefix("data: ")))
                record.tokens += _tokens(events[-1])
                ends += "error" in events[-1]
            elif line == "data: [DONE]":
                ends += "error" not in events[-1]
        if ends == 1:
            _end_stream(record, events)
        else:
            record.detail = f"a stream with {ends} ends"


def _end_stream(record: Record, events: list[dict[str, Any]]) -> None:
    """Take the end of a stream: an error, or exactly one reason to finish."""
    if (error := events[-1].get("error")) is not None:
        record.ending = _ENDINGS.get(int(error["code"]), Ending.BROKEN)
        record.detail = error["message"]
        return
    choices = [choice for event in events for choice in event.get("choices", [])]
    reasons = [choice["finish_reason"] for choice in choices if choice["finish_reason"]]
    if reasons == ["length"]:
        record.ending, record.detail = Ending.FINISHED, ""
    else:
        record.detail = f"a stream ended with {reasons}"


def _judge(record: Record, status: int, content: bytes) -> None:
    """Take a response that is not a stream."""
    answer = json.loads(content)
    if status == 200:
        record.tokens += _tokens(answer)
        record.ending, record.detail = Ending.FINISHED, ""
        return
    record.detail = answer["error"]["message"][:200]
    if 400 <= status < 500:
        record.ending = Ending.REFUSED
    else:
        record.ending = _ENDINGS.get(status, Ending.BROKEN)


def _tokens(event: Mapping[str, Any]) -> list[int]:
    return [token for choice in event.get("choices", []) for token in choice["token_ids"] or []]

"""The lines of output and error files, as OpenAI and as ``vllm run-batch`` write them."""

from http import HTTPStatus

import msgspec

from shoal.server.batch.answer_log import Result, result_id, usage_of
from shoal.server.batch.line_sender import Answer
from shoal.server.batch.lines_ahead import Numbered

_raw = msgspec.json.Decoder(msgspec.Raw)


class _Response(msgspec.Struct):
    status_code: int
    request_id: str
    body: msgspec.Raw | None


class _Line(msgspec.Struct):
    id: str
    custom_id: str
    response: _Response | None
    error: msgspec.Raw | None


def openai_result(batch_id: str, found: Numbered, answer: Answer) -> Result:
    """Return a result as OpenAI's files have it: the body of an error is in ``response``."""
    failed = answer.status != HTTPStatus.OK
    name = result_id(batch_id, found.number)
    response = _Response(answer.status, answer.request_id or name, _json(answer.body))
    line = _Line(name, found.line.custom_id, response, None)
    return _result(found, failed, line, answer)


def vllm_result(batch_id: str, found: Numbered, answer: Answer) -> Result:
    """Return a result as ``vllm run-batch`` writes it: the body of an error is in ``error``."""
    failed = answer.status != HTTPStatus.OK
    name, body = result_id(batch_id, found.number), _json(answer.body)
    response = _Response(answer.status, answer.request_id or name, None if failed else body)
    line = _Line(name, found.line.custom_id, response, body if failed else None)
    return _result(found, failed, line, answer)


def _result(found: Numbered, failed: bool, line: _Line, answer: Answer) -> Result:
    text = msgspec.json.encode(line)
    if failed:
        return Result(found.number, True, text)
    return Result(found.number, False, text, usage_of(answer.body))


def _json(body: bytes) -> msgspec.Raw:
    """Return a body as JSON on one line: as it is, or else as a string."""
    try:
        whole = _raw.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return msgspec.Raw(msgspec.json.encode(body.decode(errors="replace")))
    return msgspec.Raw(msgspec.json.format(whole, indent=-1)) if b"\n" in body else whole


def unsent_result(batch_id: str, found: Numbered, code: str, message: str) -> Result:
    """Return the result of a line that got no answer."""
    error = msgspec.Raw(msgspec.json.encode({"code": code, "message": message}))
    name = result_id(batch_id, found.number)
    text = msgspec.json.encode(_Line(name, found.line.custom_id, None, error))
    return Result(found.number, True, text)

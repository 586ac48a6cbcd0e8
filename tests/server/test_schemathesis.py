"""Requests made from the OpenAPI documents, valid and not: the node answers as these say.

Schemathesis makes them: cases at the borders of every field (coverage), of which large operations
get a sample here, and drawn ones (fuzzing); the same in every run. With ``SHOAL_TESTS=all``
every case of the coverage is sent and many more are drawn: some 18,000 requests, in 20 minutes.

    SHOAL_TESTS=all pytest tests/server/test_schemathesis.py
"""

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse, StreamingResponse
from starlette.exceptions import HTTPException

from shoal.server.commands.openapi import admin_document, public_document
from shoal.server.errors import error_body, error_response
from shoal.server.frontend.vllm_app import VLLM_ROUTERS
from shoal.server.gate.priority_and_deadline import DEADLINE_HEADER
from tests.depth import DEEP
from tests.server.node import ServedNode, key_file, served_node
from tests.server.schemathesis_hooks import SAMPLE

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.timeout(7200 if DEEP else 600)
COVERED, DRAWN = (None, 1000) if DEEP else (10, 3)
KEY = "s3cret"
SECONDS = 60
"""What a request may take, on a machine with other work."""
CHECKS = (
    *("not_a_server_error", "status_code_conformance", "content_type_conformance"),
    *("response_headers_conformance", "response_schema_conformance", "unsupported_method"),
    *("errors_have_the_shape_of_openai_s", "streams_hold_no_failure_of_the_server"),
)
# What was answered is not to be used in requests: it has random names.
SETTINGS = """
[phases.coverage.extra-data-sources]
responses = false
[phases.fuzzing.extra-data-sources]
responses = false
"""


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedNode]:
    folder = tmp_path_factory.mktemp("node")
    with served_node(
        folder,
        *("--api-key", KEY, "--admin-key-file", str(key_file(folder / "admin.json", KEY))),
        *("--max-model-len", "128", "--max-choices", "8", "--max-grammar-seconds", "1"),
        *("--fake-step-ms", "0.1", "--max-sp", "2", "--enable-tokenizer-info-endpoint"),
    ) as served:
        # vLLM logs what it refuses in a stream, and nobody else takes that out of the pipe.
        reader = threading.Thread(target=served.process.stdout.read, daemon=True)
        reader.start()
        yield served
        served.process.kill()
        reader.join()


def report_on(document: Mapping[str, Any], url: str, folder: Path, *checks: str) -> dict[str, Any]:
    """Run Schemathesis, and return its report; with ``output``, what it printed."""
    (folder / "document.json").write_text(json.dumps(document))
    (folder / "settings.toml").write_text(SETTINGS)
    sample = {} if COVERED is None else {SAMPLE: str(COVERED)}
    done = subprocess.run(
        [
            *(sys.executable, "-m", "schemathesis.cli", "--config-file", "settings.toml", "run"),
            *("document.json", "--url", url, "--header", f"Authorization: Bearer {KEY}"),
            *("--phases", "coverage,fuzzing", "--checks", ",".join((*CHECKS, *checks))),
            *("--max-examples", str(DRAWN), "--generation-deterministic", "--no-shrink"),
            *("--request-timeout", str(SECONDS), "--max-redirects", "0", "--warnings", "off"),
            *("--continue-on-failure", "--no-color", "--report-json-path", "report.json"),
        ],
        cwd=folder,
        env={
            **os.environ,
            **sample,
            "PYTHONPATH": str(ROOT),
            "SCHEMATHESIS_HOOKS": "tests.server.schemathesis_hooks",
        },
        capture_output=True,
        text=True,
    )
    output = done.stdout + done.stderr
    assert done.returncode in (0, 1), output
    report: dict[str, Any] = json.loads((folder / "report.json").read_text())
    return {**report, "output": output}


def check(report: Mapping[str, Any]) -> None:
    """Check that all operations were asked, and answered well."""
    assert not report["failures"], report["output"]
    assert not report["errors"], report["output"]
    operations = report["operations"]
    assert operations["tested"] == operations["total"]


def accepted(report: Mapping[str, Any], operation: str) -> int:
    """Return how many valid requests were served, of both phases."""
    return sum(phase["accepted"] for phase in report["valid_rates"][operation].values())


def narrowed(document: dict[str, Any]) -> dict[str, Any]:
    """Return a document with what it cannot say: the model, the engines, time to answer."""
    for item in document["paths"].values():
        for parameter in (p for o in item.values() for p in o.get("parameters", ())):
            if parameter["name"] == DEADLINE_HEADER:
                parameter["schema"]["minimum"] = 1000 * SECONDS
    for name, schema in document["components"]["schemas"].items():
        fields = schema.get("properties", {})
        if name.endswith("Request") and "model" in fields:
            fields["model"] = {"enum": ["shoal-demo", None]}
        if name.startswith("Anthropic") and "model" in fields:
            fields["model"] = {"const": "shoal-demo"}
            fields.pop("thinking")  # this model cannot
        if name == "LayoutRequest":
            fields["units"]["enum"] = [[[0], [1]], [[0, 1]]]
            fields["layouts"] = {"type": "null"}
    return document


def test_the_public_api_answers_as_its_document_says(node: ServedNode, tmp_path: Path) -> None:
    report = report_on(narrowed(public_document(VLLM_ROUTERS)), node.url, tmp_path)
    check(report)
    for path in (
        *("/v1/chat/completions", "/v1/completions", "/v1/responses", "/tokenize"),
        *("/v1/messages", "/v1/messages/count_tokens", "/invocations"),
    ):
        assert accepted(report, f"POST {path}") > 10, report["valid_rates"]


def test_the_admin_api_answers_as_its_document_says(node: ServedNode, tmp_path: Path) -> None:
    document = narrowed(admin_document())
    report = report_on(document, node.admin_url, tmp_path, "negative_data_rejection")
    check(report)
    for path in ("/admin/layout", "/admin/policy", "/admin/shift", "/admin/memory"):
        assert accepted(report, f"POST {path}") > 0, report["valid_rates"]


# --- the checks see what is wrong ---


def faulty_app() -> FastAPI:
    """Return an application with a fault on every route but one."""
    app = FastAPI()

    @app.exception_handler(HTTPException)
    async def refused(request: Request, error: HTTPException) -> Response:
        return error_response(error.status_code, error.detail, dict(error.headers or {}))

    @app.get("/well")
    async def well() -> Response:
        return error_response(400, "no")

    @app.get("/fails")
    async def fails() -> Response:
        return error_response(500, "no")

    @app.get("/other-shape")
    async def other_shape() -> Response:
        return JSONResponse({"detail": "no"}, 400)

    @app.get("/other-code")
    async def other_code() -> Response:
        return JSONResponse(error_body(404, "no"), 400)

    @app.get("/undocumented")
    async def undocumented() -> Response:
        return error_response(418, "no")

    @app.get("/fails-in-stream")
    async def fails_in_stream() -> Response:
        events = [f"data: {json.dumps(error_body(500, 'no'))}\n\n", "data: [DONE]\n\n"]
        return StreamingResponse(iter(events), media_type="text/event-stream")

    @app.get("/other-shape-in-stream")
    async def other_shape_in_stream() -> Response:
        return StreamingResponse(
            iter(['data: {"error": "no"}\n\n']), media_type="text/event-stream"
        )

    return app


@contextmanager
def serving(app: FastAPI) -> Iterator[str]:
    """Serve an application in a thread, and yield its address."""
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="critical", ws="none"))
    started = threading.Event()
    startup = server.startup

    async def start(sockets: Any = None) -> None:
        await startup(sockets)
        started.set()

    server.startup = start  # type: ignore[method-assign]
    thread = threading.Thread(target=server.run)
    thread.start()
    started.wait(SECONDS)
    try:
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join()


def test_what_is_wrong_is_seen(tmp_path: Path) -> None:
    app = faulty_app()
    document = app.openapi()
    for item in document["paths"].values():
        responses = item["get"]["responses"]
        responses["200"]["content"]["text/event-stream"] = {}
        responses["400"] = responses["405"] = responses["500"] = {"description": "no"}
    with serving(app) as url:
        report = report_on(document, url, tmp_path)
    found: dict[str, list[str]] = {}
    for failure in report["failures"]:
        for operation in failure["operations"]:
            found.setdefault(operation, []).append(failure["title"])
    shape = ["Custom check failed: `errors_have_the_shape_of_openai_s`"]
    assert found == {
        "GET /fails": ["Server error"],
        "GET /other-shape": shape,
        "GET /other-code": shape,
        "GET /undocumented": ["Undocumented status code"],
        "GET /fails-in-stream": ["Custom check failed: `streams_hold_no_failure_of_the_server`"],
        "GET /other-shape-in-stream": shape,
    }
    with pytest.raises(AssertionError):
        check(report)

"""Files and batches of a node of fake engines, through the ``openai`` client."""

import asyncio
import json
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import openai
import pydantic
import pytest
from openai.types import Batch, FileDeleted, FileObject

from shoal.server.commands import cli
from tests.server.batch.batches import jsonl
from tests.server.batch.batches import line as any_line
from tests.server.batch.openai_objects import list_problems, problems
from tests.server.node import ServedNode, children_of, key_file, served_node

MODEL = "shoal-demo"
COMPLETIONS = "/v1/completions"
KEYS: list[str | dict[str, Any]] = [
    "one",
    "other",
    "pages",
    {"key": "small", "name": "small", "max_batches": 1, "max_file_bytes": 2000},
]
FINAL = ("completed", "failed", "expired", "cancelled")


def line(name: str, **body: Any) -> dict[str, Any]:
    fields = {"model": MODEL, "prompt": name, "max_tokens": 2, **body}
    return any_line(name, COMPLETIONS, **fields)


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedNode]:
    folder = tmp_path_factory.mktemp("batches")
    keys = key_file(folder / "keys.json", *KEYS)
    with served_node(
        folder,
        *("--api-key-file", str(keys), "--admin-key-file", str(keys), "--metrics", "open"),
        *("--batch-dir", str(folder / "store"), "--max-batch-file-bytes", str(64 << 20)),
        *(
            "--api-server-count",
            "2",
            "--max-body-bytes",
            "20000",
            "--max-num-seqs",
            "16",
            "--fake-step-ms",
            "1",
        ),
    ) as served:
        yield served


def client_of(node: ServedNode, key: str = "one") -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{node.url}/v1", api_key=key, max_retries=0, timeout=120)


@pytest.fixture
def client(node: ServedNode) -> Iterator[openai.OpenAI]:
    with client_of(node) as client:
        yield client


def started(client: openai.OpenAI, lines: list[dict[str, Any]], **fields: Any) -> Batch:
    file = client.files.create(file=("in.jsonl", jsonl(lines)), purpose="batch")
    options: dict[str, Any] = {"endpoint": COMPLETIONS, "completion_window": "24h", **fields}
    return client.batches.create(input_file_id=file.id, **options)


@contextmanager
def worker_held(node: ServedNode) -> Iterator[None]:
    """Keep the batch worker from doing anything for a while."""
    while not (found := workers(node)):
        time.sleep(0.01)  # it starts beside the front ends; the test's time limit bounds this
    (worker,) = found
    os.kill(worker, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(worker, signal.SIGCONT)


async def until(client: openai.OpenAI, batch: Batch, *states: str) -> Batch:
    while batch.status not in states:
        assert batch.status not in FINAL, batch
        await asyncio.sleep(0.02)
        batch = client.batches.retrieve(batch.id)
    return batch


def content(client: openai.OpenAI, file_id: str | None) -> list[dict[str, Any]]:
    text = client.files.content(file_id or "").text if file_id else ""
    return [json.loads(one) for one in text.splitlines()]


async def test_the_whole_cycle(client: openai.OpenAI) -> None:
    lines = [line(f"line {number}") for number in range(100)]
    lines[7]["body"]["max_tokens"] = -1
    batch = started(client, lines, metadata={"for": "test"})
    assert (batch.object, batch.metadata) == ("batch", {"for": "test"})
    assert batch.expires_at == batch.created_at + 86400
    done = await until(client, batch, "completed")
    counts = done.request_counts
    assert counts is not None
    assert (counts.total, counts.completed, counts.failed) == (100, 99, 1)
    assert done.usage is not None
    assert done.usage.output_tokens == 198
    answers = content(client, done.output_file_id)
    (error,) = content(client, done.error_file_id)
    assert {one["custom_id"] for one in answers} == {f"line {n}" for n in range(100) if n != 7}
    assert all(one["response"]["status_code"] == 200 and one["error"] is None for one in answers)
    assert answers[0]["response"]["body"]["object"] == "text_completion"
    assert (error["custom_id"], error["response"]["status_code"]) == ("line 7", 400)
    assert "max_tokens" in error["response"]["body"]["error"]["message"]
    found = client.files.retrieve(done.output_file_id or "")
    assert (found.purpose, found.object, found.status) == ("batch_output", "file", "processed")
    assert done.id in [one.id for one in client.batches.list(limit=2)]
    assert client.files.list(purpose="batch", limit=1).data[0].id == done.input_file_id
    assert client.files.delete(done.input_file_id).deleted
    with pytest.raises(openai.NotFoundError):
        client.files.retrieve(done.input_file_id)


@pytest.mark.parametrize(
    ("url", "body", "kind"),
    [
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 2},
            "chat.completion",
        ),
        ("/v1/responses", {"input": "Hello", "max_output_tokens": 2}, "response"),
    ],
)
async def test_the_other_endpoints(
    client: openai.OpenAI, url: str, body: dict[str, Any], kind: str
) -> None:
    lines = [any_line(f"line {number}", url, **body, model=MODEL) for number in range(5)]
    done = await until(client, started(client, lines, endpoint=url), "completed")
    answers = content(client, done.output_file_id)
    assert [one["response"]["body"]["object"] for one in answers] == [kind] * 5
    assert done.usage is not None
    assert done.usage.output_tokens == 10


async def test_files_expire_when_it_was_said(client: openai.OpenAI) -> None:
    lifetime: Any = {"anchor": "created_at", "seconds": 7200}
    file = client.files.create(
        file=("in", jsonl([line("a")])), purpose="batch", expires_after=lifetime
    )
    assert file.expires_at == file.created_at + 7200
    batch = client.batches.create(
        input_file_id=file.id,
        endpoint="/v1/completions",
        completion_window="2h",
        output_expires_after=lifetime,
    )
    assert batch.expires_at == batch.created_at + 7200
    done = await until(client, batch, "completed")
    output = client.files.retrieve(done.output_file_id or "")
    assert output.expires_at == output.created_at + 7200


def test_lists_of_files_have_pages(node: ServedNode) -> None:
    with client_of(node, "other") as client:
        files = [client.files.create(file=(f"{n}.jsonl", b"{}"), purpose="batch") for n in range(5)]
        ids = [file.id for file in files]
        assert [one.id for one in client.files.list(limit=2, order="asc")] == ids
        first = client.files.list(limit=2)
        assert [one.id for one in first.data] == ids[:2:-1]
        assert first.has_more
        for one in files:
            client.files.delete(one.id)
        assert client.files.list().data == []


async def test_lists_of_batches_have_pages(node: ServedNode) -> None:
    with client_of(node, "pages") as client, client_of(node) as another:
        batches = [started(client, [line("a")]) for _ in range(5)]
        ids = [batch.id for batch in reversed(batches)]
        assert [one.id for one in client.batches.list(limit=2)] == ids, "over three pages"
        first, last = client.batches.list(limit=2), client.batches.list(limit=2, after=ids[2])
        assert ([one.id for one in first.data], first.has_more) == (ids[:2], True)
        assert ([one.id for one in last.data], last.has_more) == (ids[3:], False)
        whole = client.batches.list(limit=5)
        assert ([one.id for one in whole.data], whole.has_more) == (ids, False)
        nothing = client.batches.list(after=ids[-1])
        assert (nothing.data, nothing.has_more) == ([], False)
        for wrong, status in (({"limit": 0}, 400), ({"limit": 101}, 400), ({"after": "none"}, 404)):
            fields: dict[str, Any] = wrong
            with pytest.raises(openai.APIStatusError) as error:
                client.batches.list(**fields)
            assert (error.value.status_code, error.value.param) == (status, *wrong)
        with pytest.raises(openai.NotFoundError):
            another.batches.list(after=ids[0])
        for batch in batches:
            await until(client, batch, "completed")
        assert [one.id for one in client.batches.list(limit=3)] == ids, "those that ended, too"


async def test_answers_are_what_the_openai_package_knows(
    client: openai.OpenAI, node: ServedNode
) -> None:
    with worker_held(node):
        new = started(client, [line("a"), line("b", max_tokens=-1)], metadata={"for": "test"})
        cancelled = client.batches.cancel(started(client, [line("a")]).id)
    failed = started(client, [line("a"), line("a"), line("c", model="other")])
    batches = [
        *(new, await until(client, new, "completed")),
        *(cancelled, await until(client, cancelled, "cancelled")),
        await until(client, failed, "failed"),
    ]
    ids = [new.input_file_id, batches[1].output_file_id, batches[1].error_file_id]

    def raw(method: str, path: str) -> dict[str, Any]:
        headers = {"Authorization": "Bearer one"}
        response = httpx.request(method, f"{node.url}/v1/{path}", headers=headers, timeout=120)
        found: dict[str, Any] = response.json()
        return found

    shown = [raw("GET", f"batches/{batch.id}") for batch in batches]
    # The two that came as answers to their creation and to their cancellation.
    shown += [batch.to_dict() for batch in (new, cancelled)]
    assert {batch["status"] for batch in shown} >= {"completed", "cancelled", "failed"}
    assert [problems(Batch, batch) for batch in shown] == [[]] * len(shown)
    assert [problems(FileObject, raw("GET", f"files/{name}")) for name in ids] == [[]] * 3
    assert list_problems(FileObject, raw("GET", "files")) == []
    assert list_problems(Batch, raw("GET", "batches")) == []
    assert problems(FileDeleted, raw("DELETE", f"files/{ids[0]}")) == []


def test_an_answer_that_the_package_does_not_know_is_seen() -> None:
    file: dict[str, Any] = {
        **{"id": "file-1", "bytes": 1, "created_at": 1, "filename": "a", "object": "file"},
        **{"purpose": "batch", "status": "processed"},
    }
    assert problems(FileObject, file) == []
    assert problems(FileObject, {**file, "owner": "one"}) == ["owner"]
    counts = {"completed": 0, "failed": 0, "total": 0, "late": 0}
    batch = {
        **{"id": "batch_1", "completion_window": "24h", "created_at": 1, "endpoint": "/v1/x"},
        **{"input_file_id": "file-1", "object": "batch", "status": "completed"},
    }
    assert problems(Batch, {**batch, "request_counts": counts}) == ["request_counts.late"]
    assert list_problems(FileObject, {"data": [{**file, "x": 1}], "has_more": True}) == ["data.x"]
    for wrong in ({"bytes": "1"}, {"object": "batch"}, {"status": "late"}):
        with pytest.raises(pydantic.ValidationError):
            problems(FileObject, {**file, **wrong})
    del file["bytes"]
    with pytest.raises(pydantic.ValidationError):
        problems(FileObject, file)


async def test_a_wrong_file_fails_with_the_lines(client: openai.OpenAI) -> None:
    lines = [line("a"), line("a"), line("b", stream=True), line("c", model="other")]
    failed = await until(client, started(client, lines), "failed")
    assert failed.errors is not None
    assert [(e.line, e.code) for e in failed.errors.data or []] == [
        (2, "duplicate_custom_id"),
        (3, "invalid_stream"),
        (4, "model_not_found"),
    ]
    assert failed.output_file_id is None


async def test_a_batch_is_cancelled(client: openai.OpenAI, node: ServedNode) -> None:
    lines = [line(f"line {number}", max_tokens=2000) for number in range(2000)]
    batch = await until(client, started(client, lines), "in_progress")
    with pytest.raises(openai.ConflictError):
        client.files.delete(batch.input_file_id)
    assert client.batches.cancel(batch.id).status == "cancelling"
    done = await until(client, batch, "cancelled")
    both = content(client, done.output_file_id) + content(client, done.error_file_id)
    assert sorted(one["custom_id"] for one in both) == sorted(one["custom_id"] for one in lines)
    with pytest.raises(openai.ConflictError):
        client.batches.cancel(batch.id)


async def test_holders_of_keys_do_not_see_each_other(node: ServedNode) -> None:
    with client_of(node) as mine, client_of(node, "other") as theirs:
        batch = started(mine, [line("a")])
        ids = (batch.input_file_id, batch.id)
        assert theirs.files.list().data == theirs.batches.list().data == []
        for ask in (theirs.files.retrieve, theirs.files.content, theirs.files.delete):
            with pytest.raises(openai.NotFoundError):
                ask(ids[0])
        for ask in (theirs.batches.retrieve, theirs.batches.cancel):
            with pytest.raises(openai.NotFoundError):
                ask(ids[1])
        with pytest.raises(openai.NotFoundError):
            theirs.batches.create(
                input_file_id=ids[0], endpoint=COMPLETIONS, completion_window="24h"
            )
        await until(mine, batch, "completed")


def test_a_key_has_limits_of_its_own(node: ServedNode) -> None:
    with worker_held(node), client_of(node, "small") as client:
        file = client.files.create(file=("in", jsonl([line("a")])), purpose="batch")
        with pytest.raises(openai.APIStatusError) as error:
            client.files.create(file=("in", b"x" * 2000), purpose="batch")
        assert error.value.status_code == 413
        assert "2000 bytes together" in error.value.message
        ask: dict[str, Any] = {"endpoint": COMPLETIONS, "completion_window": "24h"}
        batch = client.batches.create(input_file_id=file.id, **ask)
        with pytest.raises(openai.RateLimitError, match="unfinished"):
            client.batches.create(input_file_id=file.id, **ask)
        client.batches.cancel(batch.id)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"endpoint": "/v1/embeddings"}, "endpoint"),
        ({"endpoint": None}, "endpoint"),
        ({"completion_window": "1d"}, "completion_window"),
        ({"completion_window": "0h"}, "completion_window"),
        ({"metadata": {"a": 1}}, "metadata"),
        ({"metadata": {str(n): "x" for n in range(17)}}, "metadata"),
        ({"output_expires_after": {"anchor": "created_at", "seconds": 1}}, "output_expires_after"),
        ({"input_file_id": 1}, "input_file_id"),
        ({"input_file_id": "../batches.sqlite3"}, "input_file_id"),
    ],
)
def test_a_wrong_batch_is_refused(
    client: openai.OpenAI, fields: dict[str, Any], param: str
) -> None:
    file = client.files.create(file=("in", b"x"), purpose="batch")
    asked = {"input_file_id": file.id, "endpoint": COMPLETIONS, "completion_window": "24h"}
    with pytest.raises(openai.APIStatusError) as error:
        client.post("/batches", body={**asked, **fields}, cast_to=httpx.Response)
    assert error.value.status_code in (400, 404)
    assert str(error.value.param).startswith(param)


@pytest.mark.parametrize(
    ("files", "data", "status", "param"),
    [
        ({"file": b"x"}, {"purpose": "fine-tune"}, 400, "purpose"),
        ({"file": b"x"}, {}, 400, "purpose"),
        ({"file": b""}, {"purpose": "batch"}, 400, "file"),
        ({"other": b"x"}, {"purpose": "batch"}, 400, None),
        ({"file": b"x" * ((64 << 20) + 1)}, {"purpose": "batch"}, 413, "file"),
        ({"file": b"x"}, {"purpose": "b" * 2000}, 400, "purpose"),
        (
            {"file": b"x"},
            {"purpose": "batch", "expires_after[anchor]": "now"},
            400,
            "expires_after.anchor",
        ),
    ],
)
def test_a_wrong_upload_is_refused(
    node: ServedNode, files: Any, data: Any, status: int, param: str | None
) -> None:
    headers = {"Authorization": "Bearer one"}
    with httpx.Client(base_url=node.url, headers=headers, timeout=120) as http:
        response = http.post("/v1/files", files=files, data=data)
    assert response.status_code == status
    if param is not None:
        assert response.json()["error"]["param"] == param
    assert list((node.temporary / "store" / "incoming").iterdir()) == []


@pytest.mark.parametrize(
    "content_type",
    ["application/json", "multipart/form-data", f"multipart/form-data; boundary={'x' * 300}"],
)
def test_an_upload_that_is_no_form_is_refused(node: ServedNode, content_type: str) -> None:
    headers = {"Authorization": "Bearer one", "Content-Type": content_type}
    response = httpx.post(f"{node.url}/v1/files", headers=headers, content=b"{}", timeout=120)
    assert response.status_code == 400
    assert "multipart" in response.json()["error"]["message"]
    headers["Content-Type"] = "multipart/form-data; boundary=x"
    torn = b'--x\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\nabc'
    response = httpx.post(f"{node.url}/v1/files", headers=headers, content=torn, timeout=120)
    assert response.status_code == 400


def run_batch(folder: Path, lines: list[dict[str, Any]], *options: str) -> int:
    (folder / "in.jsonl").write_bytes(jsonl(lines))
    paths = ("-i", str(folder / "in.jsonl"), "-o", str(folder / "out.jsonl"))
    return cli.main(["run-batch", *paths, *options])


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(one) for one in path.read_text().splitlines()]


def test_run_batch_answers_a_file(
    node: ServedNode, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = [line(f"line {number}") for number in range(50)]
    lines[7]["body"]["max_tokens"] = -1
    assert run_batch(tmp_path, lines, "--url", node.url, "--api-key", "one") == 0
    assert "49 answers, 1 failures" in capsys.readouterr().err
    found = {one["custom_id"]: one for one in read(tmp_path / "out.jsonl")}
    assert found.keys() == {one["custom_id"] for one in lines}
    error = found.pop("line 7")
    assert (error["response"]["status_code"], error["response"]["body"]) == (400, None)
    assert error["error"]["error"]["code"] == 400
    assert all(one["error"] is None for one in found.values())
    assert {path.name for path in tmp_path.iterdir()} == {"in.jsonl", "out.jsonl"}


def test_run_batch_goes_on_with_the_rest(node: ServedNode, tmp_path: Path) -> None:
    lines = [line(f"line {number}") for number in range(20)]
    target = ("--url", node.url, "--api-key", "one", "-e", str(tmp_path / "errors"))
    assert run_batch(tmp_path, lines, *target) == 0
    assert (tmp_path / "errors").read_text() == ""
    first = (tmp_path / "out.jsonl").read_text().splitlines()
    (tmp_path / "out.jsonl.partial").write_text("\n".join(first[:13]) + first[13][:9])
    assert run_batch(tmp_path, lines, *target) == 0
    second = (tmp_path / "out.jsonl").read_text().splitlines()
    assert second[:12] == first[:12]
    names = sorted(json.loads(one)["custom_id"] for one in second)
    assert names == sorted(one["custom_id"] for one in lines)
    (tmp_path / "out.jsonl.partial").write_text(first[0] + "\n")
    assert run_batch(tmp_path, lines[1:], *target) == 2


def test_run_batch_does_not_wait_for_a_server_that_is_not_there(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_batch(tmp_path, [line("a")], "--url", "http://127.0.0.1:1") == 2
    assert "cannot reach http://127.0.0.1:1: Connection refused" in capsys.readouterr().err


def test_run_batch_refuses_a_wrong_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = [line("a"), line("a"), {**line("b"), "url": "/v1/embeddings"}]
    assert run_batch(tmp_path, lines, "--url", "http://127.0.0.1:1") == 2
    said = capsys.readouterr().err
    assert "in.jsonl: line 2: line 1 has the same custom_id" in said
    assert "in.jsonl: line 3: url is /v1/embeddings" in said
    assert not (tmp_path / "out.jsonl").exists()


async def test_a_killed_worker_goes_on(client: openai.OpenAI, node: ServedNode) -> None:
    lines = [line(f"line {number}") for number in range(2000)]
    batch = started(client, lines)
    for _ in range(2):
        await until(client, batch, "in_progress")
        (worker,) = workers(node)
        os.kill(worker, signal.SIGKILL)
        while workers(node) in ([], [worker]):
            await asyncio.sleep(0.05)
    done = await until(client, batch, "completed")
    answers = content(client, done.output_file_id)
    assert sorted(one["custom_id"] for one in answers) == sorted(one["custom_id"] for one in lines)


def workers(node: ServedNode) -> list[int]:
    return [pid for pid in children_of(node.process.pid) if name_of(pid) == "batch worker"]


def test_a_large_upload_takes_no_memory_of_a_front_end(node: ServedNode) -> None:
    size, piece = 64 << 20, b"x" * (1 << 20)
    ends = b'--x\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\n', b"\r\n--x--"
    # It is refused when it is whole, for its purpose; so nobody has to wait for its check.
    headers = {
        "Authorization": "Bearer one",
        "Content-Type": "multipart/form-data; boundary=x",
        "Content-Length": str(size + sum(map(len, ends))),
    }

    def form() -> Iterator[bytes]:
        yield ends[0]
        for _ in range(size // len(piece)):
            yield piece
        yield ends[1]

    pids = [pid for pid in children_of(node.process.pid) if name_of(pid).startswith("front end")]
    assert len(pids) == 2
    before = [resident(pid, "VmRSS") for pid in pids]
    for pid in pids:
        Path(f"/proc/{pid}/clear_refs").write_text("5")  # begins the peak anew
    response = httpx.post(f"{node.url}/v1/files", headers=headers, content=form(), timeout=120)
    grown = sum(resident(pid, "VmHWM") for pid in pids) - sum(before)
    assert (response.status_code, response.json()["error"]["param"]) == (400, "purpose")
    assert grown < 8 << 20, "bytes"


def resident(pid: int, what: str) -> int:
    """Return bytes that a process has in memory (``VmRSS``), or the most it had (``VmHWM``)."""
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.partition(f"{what}:")[2].split()[0]) << 10


def name_of(pid: int) -> str:
    """Return a process's name, as ``ps -o comm`` shows it; none once it has ended."""
    with suppress(FileNotFoundError, ProcessLookupError):
        return Path(f"/proc/{pid}/comm").read_text().strip()
    return ""

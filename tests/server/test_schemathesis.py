"""Every operation of the served OpenAPI documents, under data that fits its schema and that does not.

The server publishes no document, so those of the applications that it serves are taken.
"""

from collections.abc import Iterator
from typing import Any
from unittest.mock import Mock

import hypothesis
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis import Case, GenerationMode

from server.access import Access
from server.app import AppOptions, build_admin_app, build_app
from server.frontend import VLLM_ROUTERS
from tests.server.node import ServedNode

EXAMPLES = 25
"""Of an operation that takes data, and of each kind of data."""
TIMEOUT_SECONDS = 30.0
ERROR_FIELDS = {"message", "type", "param", "code"}

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")


def documents() -> dict[str, dict[str, Any]]:
    """Return the OpenAPI document of each API."""
    backstage = Mock(vllm_routers=VLLM_ROUTERS, traces=None)
    return {
        "public": build_app(backstage, AppOptions()).openapi(),
        "admin": build_admin_app(backstage, Access()).openapi(),
    }


def operations() -> Iterator[Any]:
    """Yield a test's parameters for every operation, and each kind of data that it can be given."""
    for api, document in documents().items():
        for found in schemathesis.openapi.from_dict(document).get_all_operations():
            operation = found.ok()
            for mode in GenerationMode:
                takes_data = operation.body or operation.path_parameters or operation.headers
                if mode is GenerationMode.POSITIVE or takes_data:
                    yield pytest.param(api, operation, mode, id=f"{operation.label} {mode.value}")


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedNode]:
    served = ServedNode(
        tmp_path_factory.mktemp("fuzz"), "--fake-step-ms", "0.1", VLLM_LOGGING_LEVEL="CRITICAL"
    )
    assert served.url, "\n".join(served.lines)
    with served.process:
        yield served
        served.process.kill()


def check_answer(status: int, content_type: str, answer: Any) -> None:
    """Check that an answer is no fault of the server's and that a refusal has OpenAI's shape."""
    assert status < 500, answer
    if status >= 400:
        assert content_type.startswith("application/json")
        error = answer["error"]
        assert set(error) == ERROR_FIELDS
        assert isinstance(error["message"], str)
        assert error["message"]
        assert isinstance(error["type"], str)
        assert error["param"] is None or isinstance(error["param"], str)
        assert error["code"] == status


@pytest.mark.parametrize(("api", "operation", "mode"), operations())
def test_no_data_is_the_servers_fault_and_refusals_have_openais_shape(
    node: ServedNode, api: str, operation: Any, mode: GenerationMode
) -> None:
    url = node.url if api == "public" else node.admin_url

    @hypothesis.seed(0)
    @settings(
        max_examples=EXAMPLES if operation.body or operation.path_parameters else 1,
        derandomize=True,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(case=operation.as_strategy(generation_mode=mode))
    def check(case: Case) -> None:
        response = case.call(base_url=url, timeout=TIMEOUT_SECONDS)
        content_type = response.headers.get("content-type", [""])[0]
        answer = response.json() if response.status_code >= 400 else None
        check_answer(response.status_code, content_type, answer)

    check()


@pytest.mark.parametrize(
    ("status", "content_type", "answer"),
    [
        (500, "application/json", {"error": dict.fromkeys(ERROR_FIELDS, "x") | {"code": 500}}),
        (400, "text/plain", {"error": dict.fromkeys(ERROR_FIELDS, "x") | {"code": 400}}),
        (400, "application/json", {"error": {"message": "x", "type": "y", "code": 400}}),
        (400, "application/json", {"error": dict.fromkeys(ERROR_FIELDS, "x") | {"code": 404}}),
    ],
)
def test_a_fault_or_another_shape_is_found(status: int, content_type: str, answer: Any) -> None:
    with pytest.raises(AssertionError):
        check_answer(status, content_type, answer)

"""What tests of the deployment share."""

import importlib.util
import os
from collections.abc import Iterator

import pytest

from tests.deploy.chart import Helm


@pytest.fixture(scope="session")
def helm() -> Iterator[Helm]:
    """Helm, for as long as the tests run; tests are skipped where its library is not to be had."""
    if importlib.util.find_spec("helm_python") is None:
        assert "CI" not in os.environ, "CI has to have Helm"
        pytest.skip("helm-python-sdk is not installed: there is none for this kind of processor")
    started = Helm()
    try:
        yield started
    finally:
        started.close()

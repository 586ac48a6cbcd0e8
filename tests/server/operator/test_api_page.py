"""The page on the API shows the admin API's answers with the fields that they have."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from shoal.server.operator.admin_answers import (
    EngineAnswer,
    LayoutAnswer,
    MemoryAnswer,
    PolicyAnswer,
    ShiftAnswer,
    SwitchAnswer,
    SwitchedRequestsAnswer,
    UnitAnswer,
)

PAGE = (Path(__file__).parents[3] / "docs" / "api.md").read_text()


def section(title: str) -> str:
    """Return what the page says below a heading that begins with ``title``."""
    return PAGE.partition(f"\n## {title}")[2].partition("\n## ")[0]


def example(title: str) -> dict[str, Any]:
    """Return the answer that is shown below a heading."""
    found = re.search(r"```json\n(.*?)```", section(title), re.DOTALL)
    assert found
    return json.loads(found[1])


def fields(answer: type[BaseModel]) -> set[str]:
    """Return the names of all fields that an answer has."""
    return {*answer.model_fields, *answer.model_computed_fields}


@pytest.mark.parametrize(
    ("title", "answer"),
    [
        ("`GET /admin/layout`", LayoutAnswer),
        ("`POST /admin/layout`", SwitchAnswer),
        ("`POST /admin/memory`", MemoryAnswer),
    ],
)
def test_the_answer_that_is_shown_has_all_fields(title: str, answer: type[BaseModel]) -> None:
    assert set(example(title)) == fields(answer)


def test_the_parts_of_answers_that_are_shown_have_all_fields() -> None:
    layout = example("`GET /admin/layout`")
    assert [set(unit) for unit in layout["units"]] == [fields(UnitAnswer)]
    assert [set(engine) for engine in layout["engines"]] == [fields(EngineAnswer)] * 2
    assert set(layout["shift"]) == fields(ShiftAnswer)
    assert set(example("`POST /admin/layout`")["requests"]) == fields(SwitchedRequestsAnswer)


@pytest.mark.parametrize(
    ("title", "answer"),
    [("`GET /admin/policy`", PolicyAnswer), ("`POST /admin/shift`", ShiftAnswer)],
)
def test_the_answer_that_a_table_describes_has_all_fields(
    title: str, answer: type[BaseModel]
) -> None:
    named = {
        name
        for row in re.findall(r"^\| (`.*?) \|", section(title), re.MULTILINE)
        for name in re.findall(r"`(\w+)`", row)
    }
    assert named == fields(answer)

"""The worked example of ``docs/policies.md`` is a policy like any other, and the page names all."""

import re
import tomllib
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given

from shoal.policies.registry import POLICIES
from shoal.policies.values.partition import singles
from shoal.policies.values.plan import INTERFACE_VERSION, Dispatch, Plan, Policy, check_plan
from shoal.policies.values.snapshot import LayoutState, PoolRequest, Snapshot, UnitState
from tests.policies.snapshots import request, snapshot, snapshots, unit
from tests.units import tp_units

PAGE = Path(__file__).parents[2] / "docs" / "policies.md"
EXAMPLE = PAGE.parents[1] / "examples" / "pairs-policy"


def block(language: str) -> str:
    (code,) = re.findall(rf"```{language}\n(.*?)```", PAGE.read_text(), flags=re.DOTALL)
    return str(code)


def example() -> Policy:
    names: dict[str, Any] = {}
    exec(compile(block("python"), str(PAGE), "exec"), names)
    return names["PAIRS"]


PAIRS = example()


@given(seen=snapshots())
def test_its_plans_can_be_done(seen: Snapshot) -> None:
    check_plan(PAIRS.plan(seen), seen)


@pytest.mark.parametrize(
    ("partition", "requests", "wanted"),
    [
        (singles(4), 1, tp_units(4, 2)),
        (singles(4), 10, None),
        (tp_units(4, 2), 4, None),
        (tp_units(4, 2), 20, singles(4)),
    ],
)
def test_it_does_what_the_page_says(partition, requests, wanted) -> None:
    units = [unit(group, requests=requests * group.size // 4) for group in partition]
    seen = snapshot(*units, pool=(request(),))
    seen = replace(seen, waiting=1, smoothed_requests=float(requests))
    plan = PAIRS.plan(seen)
    assert plan.target == wanted
    assert len(plan.dispatches) == 1


def test_the_page_lists_every_policy() -> None:
    listed = re.findall(r"`([\w-]+)`", PAGE.read_text())
    assert set(POLICIES) <= set(listed)


def test_the_page_shows_the_package_of_the_examples() -> None:
    assert (EXAMPLE / "pairs_policy.py").read_text() == block("python")
    project = tomllib.loads((EXAMPLE / "pyproject.toml").read_text())["project"]
    assert tomllib.loads(block("toml"))["project"]["entry-points"] == project["entry-points"]
    assert PAIRS.interface == INTERFACE_VERSION


def test_the_page_names_all_that_a_policy_sees_and_says() -> None:
    """A change of a name is a change of the interface."""
    page = PAGE.read_text()
    table = page[page.index("## What a policy sees and says") :].partition("\n## ")[0]
    assert f"is {INTERFACE_VERSION}." in table
    for value in (Policy, Plan, Dispatch, Snapshot, PoolRequest, UnitState, LayoutState):
        named = set(re.findall(r"`(\w+)`", table))
        assert {field.name for field in fields(value)} - {"plan"} <= named | {"plan"}
    seen = {field.name for field in fields(Snapshot)}
    rows = "".join(re.findall(r"^\| `Snapshot`: .*$", table, re.MULTILINE))
    assert set(re.findall(r"`([a-z]\w*)`", rows)) == seen

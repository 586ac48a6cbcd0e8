"""The worked example of ``docs/policies.md`` is a policy like any other, and the page names all."""

import re
import tomllib
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given

from shoal.policies.registry import POLICIES
from shoal.policies.values.batch import Batch
from shoal.policies.values.partition import singles
from shoal.policies.values.plan import (
    INTERFACE_VERSION,
    Dispatch,
    Plan,
    Policy,
    Verdict,
    check_plan,
)
from shoal.policies.values.snapshot import (
    LayoutState,
    Move,
    PoolRequest,
    ShareLevel,
    Snapshot,
    StepPredictor,
    Target,
    TierState,
    UnitState,
)
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


INTERFACE = (
    *(Policy, Plan, Dispatch, Verdict, Snapshot, PoolRequest, UnitState, LayoutState, Target),
    *(StepPredictor, Batch, Move, ShareLevel, TierState),
)
"""What policies are given and return: every public name in these is part of the interface."""


def names_of(value: type) -> set[str]:
    """Return the fields, properties and methods of a value that are for policies."""
    own = {name for name in vars(value) if not name.startswith("_")}
    return own | {field.name for field in fields(value)} if is_dataclass(value) else own


def rows_of(page: str) -> dict[str, set[str]]:
    """Return the names that the table on the interface has for each value."""
    table = page[page.index("## What a policy sees and says") :].partition("\n## ")[0]
    found: dict[str, set[str]] = {}
    for value, text in re.findall(r"^\| `(\w+)`[^|]*\| (.*) \|$", table, re.MULTILINE):
        found.setdefault(value, set()).update(re.findall(r"`([a-z]\w*)(?:\([^)]*\))?`", text))
    return found


def test_the_page_names_all_that_a_policy_sees_and_says() -> None:
    """A change of a name is a change of the interface."""
    page = PAGE.read_text()
    assert f"is {INTERFACE_VERSION}." in flat(page)
    assert rows_of(page) == {value.__name__: names_of(value) for value in INTERFACE}


@pytest.mark.parametrize("name", ["`group_limits`, ", "`can_hold(request)`, ", "`tpot_seconds`"])
def test_a_name_that_one_row_lacks_is_seen(name: str) -> None:
    rows = rows_of(PAGE.read_text().replace(name, "", 1))
    assert rows != {value.__name__: names_of(value) for value in INTERFACE}


def flat(text: str) -> str:
    """Return a text on one line, as its sentences go on over the ends of lines."""
    return " ".join(text.split())

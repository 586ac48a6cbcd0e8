"""The worked example of ``docs/policies.md`` is a policy like any other."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given

from shoal.policies.registry import POLICIES
from shoal.policies.values.partition import singles
from shoal.policies.values.plan import Policy, check_plan
from shoal.policies.values.snapshot import Snapshot
from tests.policies.snapshots import request, snapshot, snapshots, unit
from tests.units import tp_units

PAGE = Path(__file__).parents[2] / "docs" / "policies.md"


def example() -> Policy:
    (code,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), flags=re.DOTALL)
    names: dict[str, Any] = {}
    exec(compile(code, str(PAGE), "exec"), names)
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

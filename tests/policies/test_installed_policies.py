"""Policies of others are found by name and by reference, or refused with one line."""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from shoal.policies.installed_policies import UnusablePolicyError, load_policies
from shoal.policies.registry import POLICIES, REFERENCES, UnknownPolicyError, get_policy
from shoal.policies.values.plan import INTERFACE_VERSION as PRESENT
from shoal.server.commands import cli

Write = Callable[..., str]
CODE = """
from shoal.policies.static import dispatch_least_loaded
from shoal.policies.values.plan import Plan, Policy

def plan(snapshot, /):
    return Plan(dispatch_least_loaded(snapshot))

MINE = {mine}
"""
LATER = PRESENT + 1
MINE = 'Policy("mine", plan, decides_layout=True)'


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Write]:
    """Give what writes a module, and installs its package if it has an entry point."""
    known, references = dict(POLICIES), dict(REFERENCES)
    monkeypatch.syspath_prepend(str(tmp_path))
    written: list[str] = []

    def write(mine: str = MINE, entry: str = "") -> str:
        name = f"policy_module_{len(written)}"
        written.append(name)
        (tmp_path / f"{name}.py").write_text(CODE.format(mine=mine))
        if entry:
            about = tmp_path / f"{name}-1.dist-info"
            about.mkdir()
            (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1\n")
            (about / "entry_points.txt").write_text(f"[shoal.policies]\n{entry} = {name}:MINE\n")
        return name

    yield write
    for name in written:
        sys.modules.pop(name, None)
    for names, before in ((POLICIES, known), (REFERENCES, references)):
        names.clear()
        names.update(before)


def test_a_reference_is_loaded_once(write: Write) -> None:
    reference = f"{write()}:MINE"
    with pytest.raises(UnknownPolicyError):
        get_policy(reference)
    first, builtin = load_policies(reference, "flying")
    assert (first.name, builtin.name) == ("mine", "flying")
    assert load_policies(reference) == [first]
    assert get_policy("mine") is get_policy(reference) is first


def test_every_installed_policy_is_known(write: Write) -> None:
    write(entry="mine")
    assert "mine" not in POLICIES
    assert load_policies() == []
    assert load_policies("mine") == [POLICIES["mine"]]


@pytest.mark.parametrize("installed", [False, True])
@pytest.mark.parametrize(
    ("mine", "message"),
    [
        ("1 / 0", " cannot be imported: ZeroDivisionError: division by zero"),
        ("plan", " is no Policy, but of the type function"),
        ("Policy('two,names', plan, decides_layout=True)", ": its name 'two,names' is none"),
        ("Policy('mine', None, decides_layout=True)", ": its plan is no function"),
        (
            f"Policy('mine', plan, decides_layout=True, interface={LATER})",
            f" is for version {LATER} of the interface of policies, and this is version {PRESENT}",
        ),
    ],
)
def test_what_is_no_policy_is_refused(
    write: Write, installed: bool, mine: str, message: str
) -> None:
    name = write(mine, entry="mine" if installed else "")
    with pytest.raises(UnusablePolicyError) as refused:
        load_policies(*(() if installed else (f"{name}:MINE",)))
    shown = f"policy 'mine' of the package {name} ({name}:MINE)"
    assert str(refused.value) == (shown if installed else f"policy {name}:MINE") + message
    assert "mine" not in POLICIES


def test_a_name_belongs_to_one_policy(write: Write) -> None:
    builtin = write("Policy('flying', plan, decides_layout=True)") + ":MINE"
    with pytest.raises(UnusablePolicyError, match="another policy is called 'flying'"):
        load_policies(builtin)
    write(entry="other")
    with pytest.raises(UnusablePolicyError, match="it calls itself 'mine'"):
        load_policies()


@pytest.mark.parametrize("reference", ["{}:NOTHING", "{}:", "nosuch:MINE", ":MINE", "a b:MINE"])
def test_a_reference_to_nothing_is_refused(write: Write, reference: str) -> None:
    with pytest.raises(UnusablePolicyError, match=r"cannot be imported|is not module:NAME"):
        load_policies(reference.format(write()))


def test_a_stated_version_is_this_one(write: Write) -> None:
    stated = f'Policy("mine", plan, decides_layout=True, interface={PRESENT})'
    (policy,) = load_policies(f"{write(stated)}:MINE")
    assert policy.interface == PRESENT


def test_commands_refuse_it_with_one_line(write: Write, capsys: pytest.CaptureFixture[str]) -> None:
    reference = f"{write('1 / 0')}:MINE"
    for words in (("simulate", "--trace", "poisson"), ("serve", "--fake-engine")):
        assert cli.main([*words, "--policy", reference]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert f"policy {reference} cannot be imported: ZeroDivisionError" in line


def test_the_simulator_runs_it(write: Write, capsys: pytest.CaptureFixture[str]) -> None:
    workload = ("--trace", "poisson", "--requests", "5", "--engines", "2")
    assert cli.main(["simulate", *workload, "--policy", f"{write()}:MINE,static-dp"]) == 0
    assert "mine " in capsys.readouterr().out

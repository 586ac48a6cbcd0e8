"""Policies of others: those of installed packages, and those that a command names.

A package names its policies as entry points of the group ``shoal.policies``. A command names one as
``module:NAME``.
"""

import re
from importlib.metadata import EntryPoint, entry_points

from shoal.policies.registry import POLICIES, REFERENCES, PolicyError, get_policy
from shoal.policies.values.plan import INTERFACE_VERSION, Policy

GROUP = "shoal.policies"
_REFERENCE = re.compile(r"\w+(\.\w+)*:\w+(\.\w+)*")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")


class UnusablePolicyError(PolicyError):
    """A policy of others cannot be used; the message is one line that names it and says why."""


def load_policies(*asked: str) -> list[Policy]:
    """Add all policies of installed packages, and return those that are asked for.

    Every process that gets policies by their names calls this when it starts.

    Args:
        asked: names, or references ``module:NAME``, whose modules are imported.

    Raises:
        UnknownPolicyError: no policy has a name that is asked for.
        UnusablePolicyError: a policy that is installed or asked for cannot be used.
    """
    for entry in entry_points(group=GROUP):
        policy = _load(entry)
        if policy.name != entry.name:
            raise UnusablePolicyError(f"{_shown(entry)}: it calls itself {policy.name!r}")
        _add(entry, policy)
    for reference in asked:
        if ":" in reference:
            if not _REFERENCE.fullmatch(reference):
                raise UnusablePolicyError(f"{reference!r} is not module:NAME")
            entry = EntryPoint(reference, reference, GROUP)
            policy = _load(entry)
            _add(entry, policy)
            REFERENCES[reference] = policy.name
    return [get_policy(name) for name in asked]


def _load(entry: EntryPoint) -> Policy:
    try:
        found = entry.load()
    except Exception as error:  # the code of others may raise anything
        why = " ".join(f"{type(error).__name__}: {error}".split())
        raise UnusablePolicyError(f"{_shown(entry)} cannot be imported: {why}") from error
    if not isinstance(found, Policy):
        kind = type(found).__name__
        raise UnusablePolicyError(f"{_shown(entry)} is no Policy, but of the type {kind}")
    name: object = found.name
    if not (isinstance(name, str) and _NAME.fullmatch(name)):
        raise UnusablePolicyError(f"{_shown(entry)}: its name {name!r} is none")
    if not callable(found.plan):
        raise UnusablePolicyError(f"{_shown(entry)}: its plan is no function")
    if found.interface not in (None, INTERFACE_VERSION):
        raise UnusablePolicyError(
            f"{_shown(entry)} is for version {found.interface} of the interface of policies, "
            f"and this is version {INTERFACE_VERSION}"
        )
    return found


def _add(entry: EntryPoint, policy: Policy) -> None:
    if POLICIES.setdefault(policy.name, policy) is not policy:
        raise UnusablePolicyError(f"{_shown(entry)}: another policy is called {policy.name!r}")


def _shown(entry: EntryPoint) -> str:
    """Return how messages name a policy: as it was asked for, or with the package that has it."""
    if entry.dist is None:
        return f"policy {entry.value}"
    return f"policy {entry.name!r} of the package {entry.dist.name} ({entry.value})"

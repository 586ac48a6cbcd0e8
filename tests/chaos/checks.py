"""What must hold of a chaos run: of clients' records, the server's counters, and what is left."""

import enum
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

import msgspec

from shoal.loadgen.bench.process_memory import Growth
from tests.chaos.events import Plan


class Ending(enum.StrEnum):
    """How a request ended, as its client saw it."""

    FINISHED = "finished"
    FAILED = "failed"
    """A 500, or such an error in a stream, that says why."""
    EXPIRED = "expired"
    POOL_FULL = "pool_full"
    """Or no engine served for too long: both are a 503."""
    REFUSED = "refused"
    """By a 4xx."""
    CANCELLED = "cancelled"
    """By the client itself."""
    BROKEN = "broken"
    """In no way that a client is promised, or not at all."""


OUTCOMES = {
    Ending.FINISHED: {"finished"},
    Ending.FAILED: {"lost", "poisoned"},
    Ending.EXPIRED: {"expired"},
    Ending.POOL_FULL: {"pool_full", "unavailable"},
    Ending.CANCELLED: {"aborted"},
    Ending.BROKEN: {"too_long", "caller_full", "handed_back"},
}
"""How ``shoal_requests_total`` counts requests that end so; it does not count refused ones."""
MOST_GROWTH_MIB = 24.0
"""Resident memory that a process may take on in the second half of a run, steps left out."""
SPARE_DESCRIPTORS = 4
"""File descriptors that a process may have more than before."""


class Record(msgspec.Struct):
    """What became of one request."""

    plan: Plan | None
    """None: it was malformed."""
    ending: Ending = Ending.BROKEN
    detail: str = "no end"
    """The error that the client was told."""
    tokens: list[int] = []
    """Those that the client has."""


class Resources(msgspec.Struct, frozen=True):
    """What an idle node holds."""

    processes: tuple[str, ...]
    """Their names, sorted."""
    descriptors: dict[int, int]
    """Open ones, by process id."""
    files: frozenset[str]
    """In its runtime directory."""
    segments: frozenset[str]
    """Of its shared memory."""


def check_records(records: Iterable[Record], references: Mapping[int, Sequence[int]]) -> list[str]:
    """Return what is wrong with what clients got.

    Args:
        records: one for every request.
        references: the greedy tokens of an undisturbed run, by number of the prompt.
    """
    problems = []
    for record in records:
        plan, got = record.plan, record.tokens
        if record.ending is Ending.BROKEN:
            problems.append(f"broken: {record.detail}: {plan}")
        if plan is None:
            if record.ending is Ending.FINISHED:
                problems.append("a malformed request was served")
            continue
        if record.ending is Ending.REFUSED:
            problems.append(f"a valid request was refused: {record.detail}: {plan}")
        wanted = list(references[plan.prompt][: plan.max_tokens])
        if record.ending is Ending.FINISHED and len(got) != plan.max_tokens:
            problems.append(f"{len(got)} tokens instead of {plan.max_tokens}: {plan}")
        if plan.temperature == 0 and got != wanted[: len(got)]:
            at = next(k for k, token in enumerate(got) if token not in wanted[k : k + 1])
            problems.append(f"a changed token at {at} of {plan.max_tokens}: {plan}")
    return problems


def check_counters(records: Iterable[Record], counted: Mapping[str, float]) -> list[str]:
    """Return where the server's count of outcomes is not what its clients saw.

    A request that its client has given up may have ended in any way, or never have begun.

    Args:
        records: one for every request.
        counted: ``shoal_requests_total``, by outcome.
    """
    seen = Counter(record.ending for record in records)
    cancelled = seen[Ending.CANCELLED]
    problems = []
    for ending, outcomes in OUTCOMES.items():
        count = sum(counted[outcome] for outcome in outcomes)
        least = 0 if ending is Ending.CANCELLED else seen[ending]
        if not least <= count <= least + cancelled:
            problems.append(
                f"{'+'.join(sorted(outcomes))}: the server counts {count:g}, "
                f"clients {seen[ending]} and {cancelled} cancelled"
            )
    whole = sum(seen.values()) - seen[Ending.REFUSED]
    if not whole - cancelled <= sum(counted.values()) <= whole:
        problems.append(f"requests: the server counts {sum(counted.values()):g}, clients {whole}")
    return problems


def check_resources(before: Resources, after: Resources) -> list[str]:
    """Return what a node holds more of than before, and which processes are not what they were."""
    problems = []
    if before.processes != after.processes:
        problems.append(f"processes: {before.processes} became {after.processes}")
    for pid in before.descriptors.keys() & after.descriptors.keys():
        old, new = before.descriptors[pid], after.descriptors[pid]
        if new > old + SPARE_DESCRIPTORS:
            problems.append(f"file descriptors of process {pid}: {old} became {new}")
    for what in ("files", "segments"):
        old, new = getattr(before, what), getattr(after, what)
        # A group that is formed anew has other ones.
        if len(new) > len(old):
            problems.append(f"{what}: {sorted(old - new)} became {sorted(new - old)}")
    return problems


def check_memory(growth: Iterable[Growth], seconds: float) -> list[str]:
    """Return which processes have grown.

    Args:
        growth: of those that lived all the time.
        seconds: duration of the run.
    """
    return [
        f"memory of {found.process}: {found.slope_mib_per_minute:.1f} MiB/min in the second half"
        for found in growth
        if found.slope_mib_per_minute * seconds / 2 / 60 > MOST_GROWTH_MIB
    ]

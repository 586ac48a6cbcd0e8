"""The table of switches, and the notes on its rows."""

from collections.abc import Iterator
from typing import Any

from shoal.loadgen.bench.comparison_results import Results
from shoal.loadgen.bench.first_step import FIRST_STEP
from shoal.loadgen.bench.markdown import ms, rows
from shoal.loadgen.bench.systems import SHOAL

START = "decision to the start of the first TP step, decoding"

Spread = dict[str, float] | None


def switch_table(results: Results) -> list[str]:
    """Return the lines of the table and of its notes."""
    idle, loaded, first = (
        results.found(SHOAL, name) for name in ("switch-idle", "switch-loaded", FIRST_STEP)
    )
    found = [*_durations(idle, loaded), *_first_steps(first)]
    present = [(name, spread) for name, spread in found if spread]
    if not present:
        return []
    table = rows(
        ["", "p50 ms", "p99 ms", "max ms"],
        [[name, *(ms(spread[q]) for q in ("p50", "p99", "max"))] for name, spread in present],
    )
    for note in (_loaded_note(results, loaded, first), _first_step_note(results, first)):
        table += ["", note] if note else []
    return table


def _durations(idle: dict[str, Any], loaded: dict[str, Any]) -> Iterator[tuple[str, Spread]]:
    yield "bind, idle", idle.get("bind")
    yield "release, idle", idle.get("release")
    yield "bind, every engine decoding", loaded.get("bind")
    yield "release, every engine decoding", loaded.get("release")
    token = loaded.get("decision_to_first_token")
    yield "decision to the client's first token, decoding", token
    yield "such a token from an idle group", loaded.get("first_token_when_idle")


def _first_steps(first: dict[str, Any]) -> Iterator[tuple[str, Spread]]:
    leader, slowest = first.get("leader", {}), first.get("slowest", {})
    yield f"{START}: leader", leader.get("start")
    yield "of this, until its runner took the step up (host)", leader.get("host")
    yield "of this, its own steps in flight", leader.get("in_flight")
    yield "of this, after these", leader.get("after")
    yield f"{START}: slowest member", slowest.get("start")
    yield "of this, the members' own steps in flight", slowest.get("in_flight")
    yield "of this, after these, of the members", slowest.get("after")


def _loaded_note(results: Results, loaded: dict[str, Any], first: dict[str, Any]) -> str:
    if not loaded:
        return ""
    note = (
        f"{_decoding(loaded)}; {loaded['served_by_the_group']} of {loaded['switches']} groups ran "
        "the request that waited for them."
    )
    if first:
        return note
    return (
        f"{note} The first TP step began at most the fifth row after the decision, and at least "
        "the fifth less the sixth; the step that was in flight took "
        f"{ms(_in_flight(results))} ms (TPOT of the DP layout at that batch)."
    )


def _first_step_note(results: Results, first: dict[str, Any]) -> str:
    if not first:
        return ""
    without, all_of_them = first["without_step"], first["switches"]
    ran = f"{all_of_them - without} of {all_of_them} groups ran a step" + (
        ", and the rows are of these" if without else ""
    )
    return (
        "The rows of the first TP step were taken on a node started to record, whose every step "
        f"costs a little more. {_decoding(first)}; {ran}. A step begins when its runner has taken "
        "it up and the device is free for it; a step of one engine alone took "
        f"{ms(_in_flight(results))} ms (TPOT of the DP layout at that batch, on a node that does "
        "not record)."
    )


def _decoding(figures: dict[str, Any]) -> str:
    each = ", ".join(f"engine {unit}: {n}" for unit, n in figures["running"].items())
    return f"Decoding: {each}"


def _in_flight(results: Results) -> float | None:
    found = results.found(SHOAL, "decode").get("dp", {}).get(str(results.sizes.load))
    return None if found is None else float(found["tpot"])

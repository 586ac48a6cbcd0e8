"""Engines whose memory moves between weights and KV while they serve: tokens stay the same.

With ``SHOAL_TESTS=all`` a group shows, too, that KV which was not copied would be noticed.
"""

import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest

from shoal.policies.values.layouts import Unit, alone
from shoal.policies.values.level import WHOLE, Level
from shoal.runtime.engine.weights.sharing.filling import PATIENCE_SECONDS
from shoal.runtime.protocol import messages as m
from shoal.runtime.protocol.messages import Mode
from shoal.runtime.protocol.messages.views import MemoryView
from tests.depth import among
from tests.random_checkpoint import CheckpointSpec, write_checkpoint
from tests.runtime.engine import probes
from tests.runtime.engine.prompts import PROMPTS
from tests.runtime.engine.real_node import RealNode, SwitchFailed, stock_tokens
from tests.runtime.engine.scripted_shift import Script
from tests.units import tp
from tests.variety import is_varied

PAIR = tp(0, 1)
LAYERS = 5
STREAMED = LAYERS + 1
"""The LM head, in one piece, is streamed as a layer is."""
SHORT = PROMPTS[:6]
TOKENS = 96
"""Of requests that run while memory moves."""
FEW = 12
"""Of requests that show what weights an engine has: every token depends on all layers."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "llama"
    write_checkpoint(path, CheckpointSpec(layers=LAYERS))
    return path


@pytest.fixture(scope="module")
def expected(model: Path) -> list[list[int]]:
    tokens = stock_tokens(model, SHORT, TOKENS)
    assert is_varied(tokens)
    return tokens


@pytest.fixture(scope="module")
def node(model: Path) -> Iterator[RealNode]:
    sizes = {"kv_cache_memory_bytes": 13 << 20}
    with RealNode(model, 2, restart_limit=9, share_weights=2, max_sp=2, **sizes) as node:
        yield node


@pytest.fixture(autouse=True)
def shared_again(node: RealNode) -> Iterator[None]:
    yield
    node.probe_all(probes.wait_for_layers, PATIENCE_SECONDS)
    node.switch()
    node.change_memory(2)
    assert node.audit() == []


def num_blocks(node: RealNode) -> list[int]:
    return [node.controller.books.engines.num_blocks(engine) for engine in PAIR.engines]


def free_blocks(node: RealNode) -> list[int]:
    """Return the free blocks of each engine alone, as it has reported them last."""
    loads = [node.controller.books.requests.core(alone(engine)).load for engine in PAIR.engines]
    return [0 if load is None else load.free_blocks for load in loads]


def levels(node: RealNode) -> list[int]:
    return [engine.level.share for engine in node.controller.books.engines]


def assert_serves(node: RealNode, unit: Unit, expected: list[list[int]]) -> None:
    """Check that a unit generates what it should."""
    assert node.generate(unit, SHORT, FEW) == [tokens[:FEW] for tokens in expected]


def test_memory_goes_from_kv_to_weights_and_back(node: RealNode, expected: list[list[int]]) -> None:
    full, more = num_blocks(node), node.probe(0, probes.bytes_for_whole_weights)
    assert node.probe_all(probes.behind_weights) == [0, 0]
    shared = [engine.weight_bytes for engine in node.controller.books.engines]
    assert_serves(node, alone(0), expected)

    view = node.change_memory(1)
    assert (view.before, view.after, view.error) == (2, 1, None)
    assert levels(node) == [1, 1]
    assert all(less < all_ for less, all_ in zip(num_blocks(node), full, strict=True))
    for engine in PAIR.engines:
        assert node.probe(engine, probes.behind_weights) == more
        assert not node.probe(engine, probes.streams)
        assert node.controller.books.engines[engine].weight_bytes == shared[engine] + more
    for unit in (alone(0), alone(1)):
        assert_serves(node, unit, expected)
    node.until(lambda: free_blocks(node) == num_blocks(node), "all blocks that are left")
    assert_group_serves(node, expected)
    node.switch()
    assert node.audit() == []

    view = node.change_memory(2)
    assert (view.before, view.after, view.error) == (1, 2, None)
    assert num_blocks(node) == full
    assert node.probe_all(probes.behind_weights) == [0, 0]
    assert node.probe_all(probes.streams) == [True, True]
    assert [engine.weight_bytes for engine in node.controller.books.engines] == shared
    for unit in (alone(0), alone(1)):
        assert_serves(node, unit, expected)
    assert_group_serves(node, expected)


_first_tokens = itertools.count(11)


def fresh() -> list[list[int]]:
    """Return prompts of which no cache has a prefix."""
    first = next(_first_tokens)
    return [[first, *prompt] for prompt in SHORT]


def end(node: RealNode, unit: Unit, requests: list[str]) -> None:
    """Abort requests of a unit, and wait until it has none of them."""
    node.abort(requests)
    core = node.controller.books.requests.core(unit)
    node.until(lambda: not core.requests.keys() & set(requests), "the end of requests")


def assert_group_serves(node: RealNode, expected: list[list[int]]) -> None:
    """In TP, and in SP, whose steps run the model of DP."""
    prompts = fresh()
    alike = node.generate(alone(0), prompts, FEW)
    node.switch(PAIR)
    assert_serves(node, PAIR, expected)
    node.probe_all(probes.take_modes)
    node.script(Script.SP)
    assert node.generate(PAIR, prompts, FEW) == alike
    node.script(Script.TP)
    assert all(modes[Mode.SP] for modes in node.probe_all(probes.take_modes))


def test_running_requests_go_on_through_changes(node: RealNode, expected: list[list[int]]) -> None:
    """They are so long that they still run after three changes, of which a policy makes two."""
    for unit in (alone(0), PAIR):
        node.switch(*([unit] if unit.is_group else []))
        running = node.submit(unit, SHORT[:3], 4 * TOKENS)
        for share, change in ((1, RealNode.change_memory), (2, decide), (1, decide)):
            node.wait_for_tokens(running, 1 + min(len(node.tokens[r]) for r in running))
            view = change(node, share)
            assert (view.after, view.error) == (share, None)
        assert not node.finished.keys() & set(running), "there was nothing left to compute"
        node.wait_for_tokens(running, TOKENS)
        assert [node.tokens[request][:TOKENS] for request in running] == expected[:3]
        end(node, unit, running)
        node.change_memory(2)


def test_steps_that_stream_fill_whole_weights(node: RealNode, expected: list[list[int]]) -> None:
    """A layer that a step has streamed is not copied from another engine again."""
    node.probe_all(probes.note_fills)
    # However slow its steps are. The other engine has none, and waits for none.
    node.probe(0, probes.wait_for_layers, 60.0)
    running = node.submit(alone(0), SHORT[:3], 4 * TOKENS)
    node.wait_for_tokens(running, 1)
    node.change_memory(1)
    assert not node.finished.keys() & set(running), "there was nothing left to compute"
    assert node.probe_all(probes.note_fills) == [[(STREAMED, 0)], [(0, STREAMED)]]
    node.wait_for_tokens(running, TOKENS)
    assert [node.tokens[request][:TOKENS] for request in running] == expected[:3]
    end(node, alone(0), running)


@pytest.mark.parametrize("damage", [probes.leave_head_out, probes.swap_embeddings])
def test_the_vocabulary_of_the_other_engine_is_needed(
    node: RealNode, expected: list[list[int]], damage: probes.Damage
) -> None:
    for damaged in (True, False):
        node.probe(0, damage, damaged)
        prompts = fresh()
        found, right = (node.generate(alone(engine), prompts, 8) for engine in (0, 1))
        assert (found != right) is damaged
    assert_serves(node, alone(0), expected)


def decide(node: RealNode, share: int) -> MemoryView:
    """Change the level as a policy's plan does."""
    memory = node.controller._operations.memory
    memory.is_held = False
    memory.start_for_policy(Level(share), "kv" if share > 1 else "steps")
    assert memory.running
    node.until(lambda: not memory.running, "the policy's change")
    return memory.past[-1]


@pytest.mark.parametrize(("unit", "count"), [(alone(0), 5), (PAIR, 9)], ids=["alone", "group"])
def test_requests_on_blocks_that_go_are_computed_again(
    node: RealNode, unit: Unit, count: int
) -> None:
    """So many run that what is left of the blocks does not hold their prompts."""
    node.switch(*([unit] if unit.is_group else []))
    prompts = [[7 + number, *PROMPTS[-1]] for number in range(count + 3)]
    tokens = count * len(prompts[0])
    left = node.controller.books.engines[0].shares.blocks[WHOLE]
    assert tokens > node.controller.books.engines.limits(unit).tokens(left)
    expected = node.generate(unit, prompts, 32)
    running = node.submit(unit, prompts, 32)
    node.wait_for_tokens(running[:count], 1)
    view = node.change_memory(1)
    assert view.preempted > 0
    assert node.wait(running) == expected
    if not unit.is_group:
        node.until(lambda: free_blocks(node) == num_blocks(node), "all blocks that are left")


def run_on_blocks_that_go(node: RealNode, unit: Unit) -> dict[str, int]:
    """Let few requests run, some of whose blocks weights will have, while others are free.

    Returns:
        For each request, which of the prompts it has.
    """
    node.switch(*([unit] if unit.is_group else []))
    left = node.controller.books.engines[0].shares.blocks[WHOLE]
    # They hold more blocks than are left, and will not need more than there are.
    first, count = (3, 15) if unit.is_group else (0, 12)
    prompts = [first + number % 3 for number in range(count)]
    requests = node.submit(unit, [SHORT[prompt] for prompt in prompts], TOKENS)
    node.wait_for_tokens(requests, TOKENS // 2)

    # Of all at once: the requests run on meanwhile.
    found = [node.probe(engine, probes.physical_blocks, requests) for engine in unit.engines]
    goes = [any(max(blocks) > left for blocks in each) for each in zip(*found, strict=True)]
    kept = [request for request, it_goes in zip(requests, goes, strict=True) if it_goes][:3]
    assert kept
    # An idle engine streams no layer, and these requests end within tenths of a second.
    node.probe_all(probes.wait_for_layers, 0.01)
    end(node, unit, [request for request in requests if request not in kept])
    has = dict(zip(requests, prompts, strict=True))
    return {request: has[request] for request in kept}


@pytest.mark.parametrize("unit", [alone(0), PAIR], ids=["alone", "group"])
def test_requests_whose_blocks_go_keep_their_kv_where_there_is_room(
    node: RealNode, expected: list[list[int]], unit: Unit
) -> None:
    running = run_on_blocks_that_go(node, unit)
    view = node.memory_changed(node.ask_memory(1), needs_steps=False)
    assert (view.error, view.preempted) == (None, 0)
    assert not node.finished.keys() & running.keys(), "there was nothing left to compute"
    assert node.wait([*running]) == [expected[prompt] for prompt in running.values()]
    computed, left = node.probe(0, probes.scheduled), view.num_blocks
    for request, prompt in running.items():
        assert computed[request] == len(SHORT[prompt]) + TOKENS - 1, "something is computed again"
        for engine in unit.engines:
            (blocks,) = node.probe(engine, probes.physical_blocks, [request])
            assert max(blocks) <= left


@pytest.mark.parametrize(
    "unit", among([pytest.param(alone(0), id="alone")], pytest.param(PAIR, id="group"))
)
def test_kv_that_is_not_copied_would_change_tokens(
    node: RealNode, expected: list[list[int]], unit: Unit
) -> None:
    """The negative control."""
    running = run_on_blocks_that_go(node, unit)
    node.probe_all(probes.move_nothing, True)
    assert node.memory_changed(node.ask_memory(1), needs_steps=False).preempted == 0
    tokens = node.wait([*running])
    node.probe_all(probes.move_nothing, False)
    assert tokens != [expected[prompt] for prompt in running.values()]


# --- copies that are wrong ------------------------------------------------------------------------


def test_copies_that_are_wrong_are_not_used(node: RealNode, expected: list[list[int]]) -> None:
    node.probe(1, probes.damage_copies, True)
    with pytest.raises(SwitchFailed, match=r"^engine 1: .* has another checksum"):
        node.change_memory(1)
    node.probe(1, probes.damage_copies, False)
    assert levels(node) == [2, 2]
    assert node.probe_all(probes.behind_weights) == [0, 0]
    for unit in (alone(0), alone(1)):
        assert_serves(node, unit, expected)


def test_copies_that_are_wrong_would_change_tokens(
    node: RealNode, expected: list[list[int]]
) -> None:
    """The negative control: without the comparison they are used."""
    for damage in (probes.damage_copies, probes.compare_nothing):
        node.probe(1, damage, True)
    node.change_memory(1)
    for damage in (probes.damage_copies, probes.compare_nothing):
        node.probe(1, damage, False)
    prompts = fresh()
    assert node.generate(alone(1), prompts, FEW) != node.generate(alone(0), prompts, FEW)
    node.change_memory(2)
    prompts = fresh()
    assert node.generate(alone(1), prompts, FEW) == node.generate(alone(0), prompts, FEW)


# --- deaths ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [m.CloseBlocks, m.FillWeights, m.UseWeights])
def test_an_engine_that_dies_in_a_change_follows_when_it_is_back(
    node: RealNode, expected: list[list[int]], kind: type[m.Message]
) -> None:
    running = node.submit(None, SHORT, TOKENS)
    node.wait_for_tokens(running, 2)
    with killed_at(node, kind, "runner-1"):
        assert node.change_memory(1).error is None
    node.bring_back(PAIR)
    node.until(lambda: levels(node) == [1, 1], "the same level")
    assert node.wait(running) == expected
    for unit in (alone(0), alone(1)):
        assert_serves(node, unit, expected)


class killed_at:  # noqa: N801 - used as a function
    """Kill a process when the controller is about to send engine 1 a message of a kind."""

    def __init__(self, node: RealNode, kind: type[m.Message], name: str) -> None:
        self._node, self._kind, self._name = node, kind, name

    def __enter__(self) -> None:
        self._node.transport.before_send = self._see

    def __exit__(self, *_: object) -> None:
        self._node.transport.before_send = lambda _engine, _message: None

    def _see(self, engine: int, message: m.Message) -> None:
        if engine == 1 and isinstance(message, self._kind):
            self._node.transport.before_send = lambda _engine, _message: None
            self._node.kill(self._name)

"""What holds for every model on a node of two real engines, in whatever layout its steps run."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from shoal.policies.values.layouts import Unit, alone
from shoal.policies.values.partition import singles
from shoal.runtime.protocol import messages as m
from shoal.runtime.protocol.messages import Mode
from shoal.runtime.whole_experts import WholeExperts
from tests.depth import skip_unless_deep
from tests.runtime.engine import probes
from tests.runtime.engine.prompts import PROMPTS, SHARED, random_prompts
from tests.runtime.engine.real_node import RealNode
from tests.runtime.engine.scripted_shift import Script
from tests.units import tp
from tests.variety import is_varied

GROUP = tp(0, 1)
ALL = PROMPTS + SHARED
TOKENS = 24
"""Output tokens of each prompt."""
FEW = 10
"""Where every layout is tried again: each token depends on all weights."""
COMPARED = 12
"""First tokens that layouts are compared in; ``test_real_tokens`` compares as many. All ``TOKENS``
of stock's say whether a model's output varies."""
Tokens = list[list[int]]


def first(expected: Tokens) -> Tokens:
    """Return the first ``COMPARED`` tokens of each output."""
    return [tokens[:COMPARED] for tokens in expected]


class EveryLayout:
    """Tests of a module that has the fixtures ``node`` and ``expected``: the tokens of ``ALL``."""

    carried_tokens = 60
    """Output tokens of requests that are carried."""
    carries = True
    """Whether requests are carried without ``SHOAL_TESTS=all``, too: nothing of it depends on the
    weights."""

    def test_tokens_are_as_expected_in_every_layout(self, node: RealNode, expected: Tokens) -> None:
        assert is_varied(expected)
        for partition in (singles(2), (GROUP,)):
            node.switch(*partition)
            assert node.generate_spread(node.partition, ALL, COMPARED) == first(expected)
        assert node.generate(GROUP, ALL, COMPARED) == first(expected), "from the prefix cache"
        assert node.audit() == []

    def test_tokens_are_as_expected_however_steps_run(
        self, node: RealNode, expected: Tokens
    ) -> None:
        """In a step by sequence each member has few of the tokens, and all of DP's weights."""
        node.switch()
        node.probe_all(probes.take_modes)
        node.script(Script.RANDOM)
        with node.bound(GROUP):
            assert node.generate(GROUP, ALL, COMPARED) == first(expected)
        node.script(Script.TP)
        assert all(ran[Mode.SP] > 0 for ran in node.probe_all(probes.take_modes))

    def test_carried_requests_go_on_with_the_right_tokens(self, node: RealNode) -> None:
        """Requests that go from DP to TP2 and back with their KV end with DP's own tokens."""
        if not self.carries:
            skip_unless_deep()
        prompts = random_prompts((5, 40, 130, 300), seed=51)
        node.switch()
        expected = node.generate(alone(1), prompts, self.carried_tokens)
        requests = node.submit(alone(0), prompts, self.carried_tokens)
        node.wait_for_tokens(requests, 6)
        for partition, some in (((GROUP,), 24), (singles(2), 44)):
            view = node.switch(*partition, treatment=m.Treatment.CARRY)
            assert (view.carried > 0, view.recomputed) == (True, {})
            node.wait_for_tokens(requests, some)
        assert node.wait(requests) == expected
        assert node.audit() == []

    def test_no_layout_but_dp_owns_weights(self, node: RealNode) -> None:
        assert node.probe_all(probes.owned_bytes) == [{"dp": 0, "tp2": 0}] * 2


@contextmanager
def node_in_fp32(
    model: Path,
    quantisation: type,
    whole_experts: WholeExperts | None = None,
    share_weights: int = 1,
    engines: int = 2,
) -> Iterator[RealNode]:
    """Run engines in fp32 with weights that vLLM computes in 16 bits alone.

    Args:
        model: the checkpoint.
        quantisation: vLLM's configuration class of such weights.
        whole_experts: see ``NodeConfig.whole_experts``.
        share_weights: see ``NodeConfig.share_weights``.
        engines: how many.
    """
    with pytest.MonkeyPatch.context() as patch:
        types = staticmethod(lambda: [torch.float32])
        patch.setattr(quantisation, "get_supported_act_dtypes", types)
        node = RealNode(
            model, engines, max_sp=2, whole_experts=whole_experts, share_weights=share_weights
        )
    with node:
        yield node


def assert_same_across_changes_of_memory(node: RealNode, expected: Tokens) -> None:
    """Engines that share weights get whole ones, and share them again, while requests run.

    Args:
        node: the node, of two engines.
        expected: the tokens of ``ALL``.
    """
    some, tokens = ALL[::2], expected[::2]
    first = [output[:FEW] for output in tokens]
    node.switch()
    for share in (1, node.config.share_weights):
        requests = node.submit(alone(0), some, TOKENS)
        node.wait_for_tokens(requests, 2)
        node.change_memory(share)
        assert node.wait(requests) == tokens
        for partition in ((GROUP,), singles(2)):
            node.switch(*partition)
            assert node.generate_spread(node.partition, some, FEW) == first
    assert node.audit() == []


def assert_wrong_experts_change_tokens(
    node: RealNode, group: Unit = GROUP, *, by_number: bool
) -> None:
    """A group whose members take other experts for theirs generates other tokens.

    What this leaves in the prefix cache is wrong.

    Args:
        node: the node.
        group: its group.
        by_number: whether the group divides the experts by number.
    """
    prompts = random_prompts((17, 40), seed=42)
    node.switch()
    expected = node.generate(alone(0), prompts, COMPARED)
    assert node.probe(0, probes.confuse_experts, group.layout) == by_number
    with node.bound(group):
        found = node.generate(group, prompts, COMPARED)
    assert all(one != other for one, other in zip(found, expected, strict=True))


def assert_wrong_experts_change_tokens_by_length(node: RealNode) -> None:
    """Each of a group's two ways to compute experts is used: prompts' steps have whole experts.

    What this leaves in the prefix cache is wrong.

    Args:
        node: the node, whose group computes whole experts in steps of prompts alone.
    """
    for seed, confuse in ((43, probes.confuse_experts), (44, probes.confuse_whole_experts)):
        prompts = random_prompts((17, 40), seed=seed)
        node.switch()
        expected = node.generate(alone(0), prompts, COMPARED)
        node.probe(0, confuse, GROUP.layout)
        with node.bound(GROUP):
            found = node.generate(GROUP, prompts, COMPARED)
        assert all(one != other for one, other in zip(found, expected, strict=True))
        firsts = [[output[0] for output in outputs] for outputs in (found, expected)]
        assert (firsts[0] == firsts[1]) == (confuse is probes.confuse_experts)


def before_damage_with_it_and_after(
    node: RealNode, unit: Unit, damage: probes.Damage, count: int
) -> list[Tokens]:
    """Return what a unit generates three times, the second time with its engines damaged.

    Args:
        node: the node; what runs in the damaged unit caches nothing.
        unit: one engine, or a group, which is formed anew each time.
        damage: what is done to each engine of the unit, and undone.
        count: output tokens of each prompt.
    """
    found = []
    prompts = random_prompts((5, 9, 12, 7), seed=500)  # of no whole block, so none is cached
    for damaged in (False, True, False):
        node.switch()
        for engine in unit.engines:
            if found:
                node.probe(engine, damage, damaged)
        if unit.is_group:
            node.switch(unit)
        found.append(node.generate(unit, prompts, count))
    return found

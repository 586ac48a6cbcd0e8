"""The rules for all kinds of layers, in the order in which they are asked."""

from torch import nn

from shoal.runtime.engine.weights.rules.attention import (
    AttentionRule,
    HeadNormRule,
    LatentAttentionRule,
    SinksRule,
)
from shoal.runtime.engine.weights.rules.dense import (
    ColumnParallelRule,
    ReplicatedRule,
    RowParallelRule,
)
from shoal.runtime.engine.weights.rules.experts import ExpertsRule, RunnerRule
from shoal.runtime.engine.weights.rules.fused import FusedRule, GatedMlpRule, QkvRule
from shoal.runtime.engine.weights.rules.shard_rule import ShardRule, WholeRule
from shoal.runtime.engine.weights.rules.vocabulary import VocabularyRule

RULES: tuple[ShardRule, ...] = (
    GatedMlpRule(),
    QkvRule(),
    FusedRule(),
    RowParallelRule(),
    ColumnParallelRule(),
    VocabularyRule(),
    ReplicatedRule(),
    ExpertsRule(),
    RunnerRule(),
    AttentionRule(),
    LatentAttentionRule(),
    SinksRule(),
    HeadNormRule(),
    WholeRule(),
)
"""One for each kind of layer, and for each way in which layers of a kind are split.

vLLM's fused layers are subclasses of its column-parallel layer, so their rules come first.
``ReplicatedRule`` takes what is left of linear layers, and ``WholeRule`` what is left of all.
"""

WEIGHT_SCHEME = ",".join(dict.fromkeys(rule.scheme for rule in RULES if rule.scheme))
"""Order of the rows that a layout's code was compiled for, and what multiplies them.

vLLM's compile cache does not see the order of rows. So this string, with the number of groups, goes
into ``VllmConfig.additional_config`` and thereby into the cache's key.
"""


def rule_of(layer: nn.Module) -> ShardRule:
    """Return the rule for a module of a model: each has one."""
    return next(rule for rule in RULES if rule.matches(layer))

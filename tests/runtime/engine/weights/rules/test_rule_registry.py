"""Every kind of layer that is served has a rule, and the first rule for a layer is its own."""

import torch
from torch import nn
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.activation import SiluAndMul
from vllm.model_executor.layers.linear import (
    ColumnParallelLinear,
    MergedColumnParallelLinear,
    QKVParallelLinear,
    ReplicatedLinear,
    RowParallelLinear,
)
from vllm.model_executor.layers.vocab_parallel_embedding import (
    ParallelLMHead,
    VocabParallelEmbedding,
)

from shoal.runtime.engine.weights.rules.dense import (
    ColumnParallelRule,
    ReplicatedRule,
    RowParallelRule,
)
from shoal.runtime.engine.weights.rules.fused import FusedRule, GatedMlpRule, QkvRule
from shoal.runtime.engine.weights.rules.rule_registry import RULES, WEIGHT_SCHEME, rule_of
from shoal.runtime.engine.weights.rules.shard_rule import WholeRule
from shoal.runtime.engine.weights.rules.vocabulary import VocabularyRule
from shoal.runtime.served_weights import WITHOUT_RULE, LayerKind
from tests.runtime.engine.one_rank import tensor_parallel


def test_the_kinds_of_layers_that_are_served_are_those_with_a_rule() -> None:
    """What is refused before the start follows from this set alone."""
    assert {rule.kind for rule in RULES} == set(LayerKind) - WITHOUT_RULE


def test_every_layer_gets_the_rule_of_its_kind() -> None:
    mlp = nn.Module()
    with set_current_vllm_config(VllmConfig()), tensor_parallel(0, 1):
        mlp.gate_up_proj, mlp.act_fn = MergedColumnParallelLinear(8, [8, 8]), SiluAndMul()
        layers = {
            QKVParallelLinear(8, 4, 2, 2): QkvRule,
            mlp.gate_up_proj: FusedRule,
            mlp: GatedMlpRule,
            mlp.act_fn: WholeRule,
            RowParallelLinear(8, 8): RowParallelRule,
            ColumnParallelLinear(8, 8): ColumnParallelRule,
            ReplicatedLinear(8, 8): ReplicatedRule,
            VocabParallelEmbedding(64, 8): VocabularyRule,
            ParallelLMHead(64, 8): VocabularyRule,
            torch.nn.LayerNorm(8): WholeRule,
        }
    assert [type(rule_of(layer)) for layer in layers] == list(layers.values())


def test_a_projection_without_its_activation_is_not_a_gated_mlp() -> None:
    """Nothing behind it could read grouped rows."""
    mlp = nn.Module()
    with set_current_vllm_config(VllmConfig()), tensor_parallel(0, 1):
        mlp.gate_up_proj, mlp.act_fn = MergedColumnParallelLinear(8, [8, 8]), nn.GELU()
    assert type(rule_of(mlp)) is WholeRule


def test_the_scheme_is_the_one_that_caches_were_filled_under() -> None:
    assert WEIGHT_SCHEME == "gate_up=grouped,other_fused=partitioned_linear,experts=grouped"

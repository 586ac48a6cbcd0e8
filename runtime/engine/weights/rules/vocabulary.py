"""Vocabulary embeddings and the LM head: a range of the rows; each row is a token's."""

from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

from shoal.runtime.engine.weights.rules.dense import LinearRule
from shoal.runtime.engine.weights.rules.unquantised import PlainEmbedding
from shoal.runtime.served_weights import LayerKind


class VocabularyRule(LinearRule):
    """A range of tokens; vLLM's LM head is such a layer, too."""

    kind = LayerKind.VOCABULARY
    layers = (VocabParallelEmbedding,)
    plain = PlainEmbedding

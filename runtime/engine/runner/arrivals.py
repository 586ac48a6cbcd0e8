"""Makes a layout's model runner know requests that come from other units."""

from typing import Any

import torch
from vllm.sampling_params import SamplingType
from vllm.v1.worker.gpu_input_batch import CachedRequestState

from shoal.runtime.engine.link.instructions import Arrival


def introduce(model_runner: Any, arrival: Arrival) -> None:
    """Make a model runner know a request as if it had computed what other units have.

    V2 model runners are told all by the step that resumes a request, and forget by themselves what
    they know of it from before. V1 model runners take a resumed request for one that they know.

    Args:
        model_runner: the layout's.
        arrival: the request; the layout's model runner may know an earlier state of it.
    """
    known = getattr(model_runner, "requests", None)
    if not isinstance(known, dict):
        return
    known.pop(arrival.request_id, None)
    # It may have left in the middle of its prompt: the log probabilities have been sent since.
    model_runner.num_prompt_logprobs.pop(arrival.request_id, None)
    # With its row goes what an asynchronous step would take for its latest token.
    batch = model_runner.input_batch
    batch.remove_request(arrival.request_id)
    if batch.prev_req_id_to_index is not None:
        batch.prev_req_id_to_index.pop(arrival.request_id, None)
    if not arrival.tokens and not arrival.computed:
        return  # it begins here, and a step brings all
    state = known[arrival.request_id] = CachedRequestState(
        req_id=arrival.request_id,
        prompt_token_ids=arrival.prompt,
        mm_features=arrival.features,
        sampling_params=arrival.sampling,
        generator=_generator(model_runner, arrival),
        block_ids=tuple([] for _ in model_runner.kv_cache_config.kv_cache_groups),
        num_computed_tokens=arrival.computed,
        output_token_ids=list(arrival.tokens),
        lora_request=arrival.adapter,
    )
    if model_runner.uses_mrope:
        model_runner._init_mrope_positions(state)


def _generator(model_runner: Any, arrival: Arrival) -> torch.Generator | None:
    """Return the generator of a request with a seed, as it is after all its tokens."""
    if arrival.sampling.sampling_type != SamplingType.RANDOM_SEED:
        return None
    generator = torch.Generator(device=model_runner.device)
    generator.manual_seed(arrival.sampling.seed)
    draw(model_runner, generator, len(arrival.tokens))
    return generator


def draw(model_runner: Any, generator: torch.Generator, tokens: int) -> None:
    """Draw from a request's generator what V1's sampler draws for so many tokens.

    Every token takes as many random numbers as any other. How many that is depends on the sampler
    and the vocabulary, so vLLM's sampler is asked.
    """
    if not tokens:
        return
    width = model_runner.input_batch.vocab_size
    if generator.device.type != "cpu":
        before = generator.get_offset()
        _sample(model_runner, generator, width)
        generator.set_offset(before + tokens * (generator.get_offset() - before))
        return
    state = generator.get_state()
    after = []
    for columns in (1, width):
        generator.set_state(state)
        _sample(model_runner, generator, columns)
        after.append(generator.get_state())
    for _ in range(tokens - 1):
        # Where the vocabulary does not matter, one of a single token is quicker.
        _sample(model_runner, generator, 1 if after[0].equal(after[1]) else width)


def _sample(model_runner: Any, generator: torch.Generator, columns: int) -> None:
    """Let vLLM's sampler draw a token for a request with this generator, and for no other."""
    logits = torch.zeros(1, columns, device=generator.device)
    with torch.random.fork_rng(devices=[]):
        model_runner.sampler.topk_topp_sampler(logits, {0: generator}, None, None)

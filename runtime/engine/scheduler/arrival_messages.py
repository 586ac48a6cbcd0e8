"""What model runners are told of requests that come to their unit, besides what a step says."""

from vllm.multimodal.utils import strip_covered_mm_data
from vllm.v1.request import Request

from shoal.runtime.engine.link.instructions import Arrival
from shoal.runtime.engine.scheduler.carried_blocks import Filling


def arrival_of_v1(request: Request, filling: Filling | None, *, mrope: bool) -> Arrival:
    """Return all that a V1 model runner has to know of a request.

    Args:
        request: the request.
        filling: the KV that is read; None: none is.
        mrope: whether the model's positions depend on the images.
    """
    computed = request.num_computed_tokens
    return Arrival(
        request.request_id,
        list(request.prompt_token_ids or ()),
        list(request.output_token_ids),
        computed,
        request.sampling_params,
        filling.begin if filling else 0,
        filling.source if filling else {},
        filling.target if filling else {},
        request.lora_request,
        strip_covered_mm_data(request.mm_features, computed, mrope),
        filling.since if filling else 0,
    )


def arrival_of_v2(request_id: str, filling: Filling | None) -> Arrival:
    """Return the KV that is read of a request; a V2 model runner learns the rest from the step.

    Args:
        request_id: the request.
        filling: the KV; None: none is read.
    """
    if filling is None:
        return Arrival(request_id, [], [], 0, None)
    computed, begin, _, _, source, target, since = filling[2:]
    return Arrival(request_id, [], [], computed, None, begin, source, target, since=since)

"""The dashboard *Serving*: traffic, latencies, throughput, errors, and objectives."""

from collections.abc import Mapping, Sequence

from shoal.grafana.glance import BURN_LIMITS
from shoal.grafana.panels import PanelBuilder, Query, graph
from shoal.grafana.promql import quantile, rate, series, total

TTFT = "shoal_time_to_first_token_seconds"
ITL = "shoal_inter_token_latency_seconds"
TPOT = "shoal_time_per_output_token_seconds"
SHARES = (0.5, 0.99)


def rows() -> Mapping[str, Sequence[PanelBuilder]]:
    """Return the rows below the first one, by title."""
    return {
        "Traffic": traffic(),
        "Latency, by class of priority": latency(),
        "Latency, by layout": layouts(),
        "Errors and objectives": errors(),
    }


def traffic() -> list[PanelBuilder]:
    """Return the row on requests and tokens, in and out."""
    return [
        graph(
            "Requests per second, by outcome",
            "Requests that left the node. `finished` are answers, `aborted` clients that left; "
            "`too_long` and `caller_full` are the caller's doing; `expired`, `pool_full`, `lost` "
            "and `unavailable` the node's.",
            Query(rate("shoal_requests_total", by="outcome"), "{{outcome}}"),
            unit="reqps",
            stack=True,
        ),
        graph(
            "Requests on the node",
            "`running` are in a batch, `waiting` behind one, `paused` wait until their unit is "
            "back after a switch; `pool` has no unit yet. A pool that grows while engines have "
            "free KV blocks is a matter of the policy; with none free, of capacity.",
            Query(total("shoal_engine_requests", by="state"), "{{state}}"),
            Query(total("shoal_pool_waiting"), "pool"),
            stack=True,
        ),
        graph(
            "Tokens per second",
            "Prompt tokens of requests that got their first token, and tokens sent to clients. If "
            "these stay the same while requests wait, the node is at its limit.",
            Query(rate("vllm:prompt_tokens_total"), "prompt"),
            Query(rate("vllm:generation_tokens_total"), "output"),
            unit="short",
        ),
        graph(
            "Length of prompts",
            "Tokens per prompt, of requests that ended. Long prompts take long to prefill: they "
            "explain a TTFT that rises while the rate of requests does not.",
            *_quantiles("vllm:request_prompt_tokens"),
            span=12,
        ),
        graph(
            "Length of outputs",
            "Tokens per answer, of requests that ended. Longer answers hold their place in the "
            "batch, and their KV blocks, for longer.",
            *_quantiles("vllm:request_generation_tokens"),
            span=12,
        ),
    ]


def latency() -> list[PanelBuilder]:
    """Return the row on latencies, by class of priority."""
    return [
        _by_priority(
            "Time to first token",
            "From a request's arrival to its first token: the wait in the task pool and the "
            "prefill. If it rises, compare the time in the task pool: if that is about equal, "
            "engines are too few; if it is much less, prompts are long.",
            TTFT,
        ),
        _by_priority(
            "Time per output token",
            "Mean time per token after the first, per request. It rises with the batch; "
            "wider layouts lower it.",
            TPOT,
        ),
        _by_priority(
            "Inter-token latency",
            "Between two outputs of a stream. A high p99 with a low p50 means gaps: see the "
            "stalls below.",
            ITL,
        ),
        _by_priority(
            "End to end",
            "From a request's arrival to its last token. It follows the lengths of outputs.",
            "shoal_request_seconds",
            span=12,
        ),
        _by_priority(
            "Time in the task pool",
            "From a request's arrival until a unit is given it. Near zero, unless all batches are "
            "full or a group is being formed. If `urgent` is not below the others, check that "
            "clients send priorities below 0.",
            "shoal_request_queue_seconds",
            span=12,
        ),
        graph(
            "Prompt tokens given to units",
            "By whether the controller expected them in the unit's prefix cache. If the engines "
            "find much less than was `cached`, caches are too small for the traffic; if `cached` "
            "is low where clients chat, their prompts change at the beginning.",
            Query(rate("shoal_placed_prompt_tokens_total", by="expected"), "{{expected}}"),
            unit="short",
            stack=True,
            span=12,
        ),
    ]


def layouts() -> list[PanelBuilder]:
    """Return the row that compares layouts."""
    return [
        graph(
            "Time to first token (p90), by layout",
            "TTFT of the requests that begin in each layout. TP should be faster than DP at "
            "little load: if it never is, keep to DP (`--max-group 1`, or policy `static-dp`).",
            Query(quantile(0.9, TTFT, by="layout"), "{{layout}}"),
            unit="s",
        ),
        graph(
            "Inter-token latency (p90), by layout",
            "Latency of the requests that run in each layout. TP should be below DP; if it is "
            "not, the batches of the groups are too large, or the links between GPUs too slow.",
            Query(quantile(0.9, ITL, by="layout"), "{{layout}}"),
            unit="s",
        ),
        graph(
            "Tokens computed per second, by layout",
            "Where the work is done. It should follow the layouts above.",
            Query(rate("shoal_step_tokens_total", by="layout"), "{{layout}}"),
            unit="short",
            stack=True,
        ),
    ]


def errors() -> list[PanelBuilder]:
    """Return the row on what goes wrong."""
    return [
        graph(
            "SLO burn, by objective",
            "How many times faster than allowed an error budget is spent. Above 14.4 in 5 minutes "
            "and in an hour ShoalBudgetBurnFast fires; above 6 in 30 minutes and in 6 hours "
            "ShoalBudgetBurnSlow.",
            *(
                Query(
                    f"max by (objective) ({series(f'shoal:slo_burn:rate{window}')})",
                    f"{{{{objective}}}} {window}",
                )
                for window in ("5m", "1h", "6h")
            ),
            limits=BURN_LIMITS,
        ),
        graph(
            "Requests refused per second, by reason",
            "HTTP requests that no unit got. `pool_full`: more comes in than is served: add a "
            "node, or raise `--max-waiting-requests`. `caller_full`: one API key is at its limit. "
            "`unauthorized`, `invalid`, `too_long`: look at the client. `handed_back`: the node is "
            "shutting down. `unavailable`: no engine serves, or the controller does not answer. "
            "Connections: clients that send or read too slowly, or are too many. "
            "Those pushed out by more urgent ones are among `pool_full`.",
            Query(rate("shoal_rejected_requests_total", by="reason"), "{{reason}}"),
            Query(rate("shoal_client_cutoffs_total", by="reason"), "connection: {{reason}}"),
            Query(rate("shoal_pushed_out_requests_total"), "pushed out"),
            unit="reqps",
        ),
        graph(
            "Stalled streams per second, by cause",
            "Gaps of a second or more between two outputs of a stream. `switch`: its engines were "
            "regrouped; `moved`: it went to another unit; `other`: long prefills beside it, "
            "preemption, or a slow machine.",
            Query(rate("shoal_stream_stall_seconds_count", by="cause"), "{{cause}}"),
            unit="ops",
            stack=True,
        ),
    ]


def _by_priority(title: str, description: str, histogram: str, *, span: int = 8) -> PanelBuilder:
    queries = [
        Query(quantile(share, histogram, by="priority"), f"{{{{priority}}}} p{100 * share:g}")
        for share in SHARES
    ]
    return graph(f"{title}, by priority", description, *queries, unit="s", span=span)


def _quantiles(histogram: str) -> list[Query]:
    return [Query(quantile(share, histogram), f"p{100 * share:g}") for share in SHARES]

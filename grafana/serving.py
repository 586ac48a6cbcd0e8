"""The dashboard *Serving*: traffic, latencies, throughput, errors, and objectives."""

from collections.abc import Mapping, Sequence

from shoal.grafana.glance import BURN_LIMITS, FOREGROUND, TPOT, TPOT_TARGET, TTFT, TTFT_TARGET
from shoal.grafana.panels import COUNT, PanelBuilder, Query, graph, spread
from shoal.grafana.promql import WINDOW, events, quantile, rate, series, share, total

ITL = "shoal_inter_token_latency_seconds"
SHARES = (0.5, 0.99)


def rows() -> Mapping[str, Sequence[PanelBuilder]]:
    """Return the rows below the first one, by title."""
    return {
        "Traffic": traffic(),
        "Latency, by class of priority": latency(),
        "First tokens and cached prompts": first_tokens(),
        "Latency, by layout": layouts(),
        "Errors and objectives": errors(),
    }


def traffic() -> list[PanelBuilder]:
    """Return the row on requests and tokens, in and out."""
    return [
        graph(
            "Requests per second, by outcome",
            "Requests that left the node. `finished` are answers, `aborted` clients that left; "
            "`too_long` and `caller_full` are the caller's doing; `expired`, `pool_full`, `lost`, "
            "`poisoned`, `unavailable` and `garbled` count as failed.",
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
            unit=COUNT,
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
        ),
        graph(
            "Length of outputs",
            "Tokens per answer, of requests that ended. Longer answers hold their place in the "
            "batch, and their KV blocks, for longer.",
            *_quantiles("vllm:request_generation_tokens"),
        ),
        graph(
            "Tokens per second, by API key",
            "Prompts and outputs of the requests that ended. `none` are requests without a key, "
            "`unnamed` those with a key of `--api-key`. Limits of a key are in the file of "
            "`--api-key-file`.",
            Query(rate("shoal_key_tokens_total", by="key, kind"), "{{key}} {{kind}}"),
            stack=True,
        ),
        graph(
            "Batches",
            "Unfinished batches by state, and their requests by result. Requests of "
            "batches run where people's leave room.",
            Query(total("shoal_batches", by="status"), "{{status}}"),
            Query(total("shoal_batch_requests", by="state"), "requests {{state}}"),
            span=24,
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
    ]


def first_tokens() -> list[PanelBuilder]:
    """Return the row on how first tokens are spread, and what of their prompts was cached."""
    return [
        spread(
            "Time to first token, distribution",
            "How many requests got their first token after how long. Two bands that are far apart "
            "mean two kinds of requests: cached and new prompts, or short and long ones.",
            Query(events(f"{TTFT}_bucket", by="le", window=WINDOW), "{{le}}"),
            unit="s",
        ),
        graph(
            "Prompt tokens given to units",
            "By whether the controller expected them in the unit's prefix cache. If the engines "
            "find much less than was `cached`, caches are too small for the traffic; if `cached` "
            "is low where clients chat, their prompts change at the beginning.",
            Query(rate("shoal_placed_prompt_tokens_total", by="expected"), "{{expected}}"),
            unit="short",
            stack=True,
        ),
        graph(
            "Prefix cache: share of prompt tokens found",
            "Share of the prompt tokens that need no prefill, of all engines together. The "
            "dashboard Engines shows it for each. Engines without a model have no cache.",
            Query(
                share(
                    rate("vllm:prefix_cache_hits_total"), rate("vllm:prefix_cache_queries_total")
                ),
                "found",
            ),
            unit="percentunit",
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
            span=12,
        ),
        graph(
            "Goodput: requests per second within each target",
            "Answered requests, without those in the background, and how many of them had their "
            "first token, and their other tokens in the mean, as quickly as the objectives say. "
            "A curve that stays below that of all requests shows a target that is missed.",
            Query(rate("shoal_request_seconds_count", FOREGROUND), "all"),
            Query(_within(TTFT, TTFT_TARGET), f"TTFT within {TTFT_TARGET:g} s"),
            Query(_within(TPOT, TPOT_TARGET), f"TPOT within {TPOT_TARGET:g} s"),
            unit="reqps",
            span=12,
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
            span=12,
        ),
        graph(
            "Stalled streams per second, by cause",
            "Gaps of a second or more between two outputs of a stream. `switch`: its engines were "
            "regrouped; `moved`: it went to another unit; `other`: long prefills beside it, "
            "preemption, or a slow machine.",
            Query(rate("shoal_stream_stall_seconds_count", by="cause"), "{{cause}}"),
            unit="ops",
            stack=True,
            span=12,
        ),
    ]


def _by_priority(title: str, description: str, histogram: str, *, span: int = 8) -> PanelBuilder:
    queries = [
        Query(quantile(share, histogram, by="priority"), f"{{{{priority}}}} p{100 * share:g}")
        for share in SHARES
    ]
    return graph(f"{title}, by priority", description, *queries, unit="s", span=span)


def _within(histogram: str, seconds: float) -> str:
    """Return how many requests a second took no longer than a bound of the histogram."""
    return rate(f"{histogram}_bucket", FOREGROUND, f'le="{seconds:g}"')


def _quantiles(histogram: str) -> list[Query]:
    return [Query(quantile(share, histogram), f"p{100 * share:g}") for share in SHARES]

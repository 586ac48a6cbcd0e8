"""The dashboard *Engines*: what each engine holds and does, and whether it is healthy."""

from collections.abc import Mapping, Sequence

from shoal.grafana.glance import KV_LIMITS
from shoal.grafana.panels import (
    BAD,
    COUNT,
    GOOD,
    WARN,
    Limits,
    PanelBuilder,
    Query,
    State,
    graph,
    timeline,
)
from shoal.grafana.promql import WINDOW, events, rate, series, share, total

ENGINE = "{{instance}} engine {{engine}}"
BY_ENGINE = "instance, engine"
GPU = "{{Hostname}} GPU {{gpu}}"

STATES = (
    State(1, "starting", "blue"),
    State(2, "serving", GOOD),
    State(3, "silent", WARN),
    State(4, "dead", BAD),
)
"""States of an engine, numbered for its timeline."""


def rows() -> Mapping[str, Sequence[PanelBuilder]]:
    """Return the rows below the first one, by title."""
    return {
        "Health": health(),
        "Deaths": deaths(),
        "KV cache": memory(),
        "Batch": batch(),
        "Steps": steps(),
    }


def folded_rows() -> Mapping[str, Sequence[PanelBuilder]]:
    """Return the rows that are folded at first, by title."""
    return {"GPUs (needs NVIDIA's dcgm-exporter)": gpus()}


def health() -> list[PanelBuilder]:
    """Return the row on the health of the engines."""
    in_states = [
        series("shoal_engine_state", f'state="{state.name}"') + f" * {state.value}"
        for state in STATES
    ]
    return [
        timeline(
            "State of each engine",
            "`silent`: the engine has not answered for a while; it may come back. `dead`: its "
            "process has ended; it is started again a few times. The log of the engine says why.",
            Query(f"sum without (state) ({' or '.join(in_states)})", ENGINE),
            STATES,
            span=12,
        ),
        timeline(
            "Switches of each engine",
            "When an engine is being regrouped, as far as it was at the moment of a scrape.",
            Query(series("shoal_engine_switching"), ENGINE),
            (State(0, "steady", GOOD), State(1, "switching", WARN)),
            span=12,
        ),
    ]


def deaths() -> list[PanelBuilder]:
    """Return the row on engines that died, and what became of their requests."""
    return [
        graph(
            "Engine deaths, by cause",
            "`ended`: a process crashed or was killed. `failed`: it reported an error. `hung`: a "
            "step took too long. `stopped`: by a signal. `silent`: its loop did not answer. "
            "`group`: it was in a group that broke. The log says more.",
            Query(events("shoal_engine_deaths_total", by="cause", window=WINDOW), "{{cause}}"),
            unit=COUNT,
        ),
        graph(
            "Requests that went on elsewhere",
            "Requests whose engine died: they went back into the task pool with the tokens that "
            "their clients had.",
            Query(events("shoal_requests_migrated_total", window=WINDOW), "migrated"),
            unit=COUNT,
        ),
        graph(
            "Late outputs",
            "Outputs of dead engines that front ends dropped, because the requests had been begun "
            "again. Expect a few at each death.",
            Query(events("shoal_late_outputs_total", window=WINDOW), "dropped"),
            unit=COUNT,
        ),
        graph(
            "Restarts, groups that wait for them, and drained engines",
            "Dead engines that were started again, and groups that cannot be formed since: they "
            "are formed anew when their engines are back, single, and no switch runs. Drained "
            "engines are those that an operator has taken out. "
            "`GET /admin/layout` says what a group waits for.",
            Query(events("shoal_engine_restarts_total", window=WINDOW), "restarts"),
            Query(total("shoal_groups_unavailable", by="layout"), "{{layout}} unavailable"),
            Query(total("shoal_engine_drained"), "drained engines"),
            unit=COUNT,
        ),
    ]


def memory() -> list[PanelBuilder]:
    """Return the row on the KV cache."""
    return [
        graph(
            "KV cache in use",
            "Share of each engine's own blocks that its own requests or a group's hold. Near 1, "
            "requests wait or are preempted: shorten `--max-model-len`, raise "
            "`--gpu-memory-utilization`, or let the policy form groups for long requests.",
            Query(f"max by ({BY_ENGINE}) ({series('vllm:kv_cache_usage_perc')})", ENGINE),
            unit="percentunit",
            limits=KV_LIMITS,
        ),
        graph(
            "KV blocks, by state",
            "`free` for an engine's own requests, `used` by them, `lent` to a group it is in. "
            "Blocks that stay `lent` in DP are a leak: `POST /admin/audit` names it.",
            Query(total("shoal_engine_kv_blocks", by="state"), "{{state}}"),
            stack=True,
        ),
        graph(
            "KV blocks of the host's memory, by state",
            "What `--kv-tier-gib` gives. `used` is the KV of requests whose prompts are computed, "
            "and which wait there to be decoded.",
            Query(total("shoal_tier_kv_blocks", by="state"), "{{state}}"),
            stack=True,
        ),
        graph(
            "Weights, by engine",
            "Bytes of weights in each engine's own memory. While engines share weights "
            "(`--share-weights`), these are fewer, and the rest is KV's.",
            Query(f"max by ({BY_ENGINE}) ({series('shoal_engine_weight_bytes')})", ENGINE),
            unit="bytes",
        ),
        graph(
            "Changes between weights and KV",
            "Changes of memory that the policy wanted (`kv`: more KV; `steps`: whole weights), "
            "that operators asked for (`POST /admin/memory`), or with which engines that are back "
            "follow the others; and the requests that lost KV for that.",
            Query(
                events("shoal_memory_changes_total", by="reason, outcome", window=WINDOW),
                "{{reason}} {{outcome}}",
            ),
            Query(events("shoal_memory_preempted_requests_total", window=WINDOW), "preempted"),
            unit=COUNT,
        ),
        graph(
            "Share of the time spent in changes between weights and KV",
            "Requests run meanwhile, but no layout can change. Most of the time of a change to "
            "whole weights is the copy of what other engines keep.",
            Query(f"clamp_max({rate('shoal_memory_change_seconds_sum')}, 1)", "changes"),
            unit="percentunit",
        ),
        graph(
            "Preemptions per second",
            "Requests that left a batch because KV blocks were short, and are computed again "
            "later. Any steady rate is lost capacity.",
            Query(rate("vllm:num_preemptions_total", by=BY_ENGINE), ENGINE),
            unit="ops",
        ),
    ]


def batch() -> list[PanelBuilder]:
    """Return the row on the requests of the engines."""
    return [
        graph(
            "Requests in a batch",
            "Requests in the batch of the unit that the engine leads: the first engine of a group "
            "shows all of the group's. `--max-num-seqs` is the limit.",
            Query(total("shoal_engine_requests", 'state="running"', by=BY_ENGINE), ENGINE),
            unit=COUNT,
        ),
        graph(
            "Requests behind a batch",
            "Requests that the unit has but that are not in its batch yet. Apart from moments, "
            "that is one ahead of a full batch; more for a long time means that KV blocks are "
            "short.",
            Query(total("shoal_engine_requests", 'state="waiting"', by=BY_ENGINE), ENGINE),
            unit=COUNT,
        ),
        graph(
            "Paused requests",
            "Requests that a `hard` switch paused until their unit is back. If it does not come "
            "back, they go to another unit after half a minute. If they stay for longer, see "
            "docs/alerts.md, ShoalRequestsPausedLong.",
            Query(total("shoal_engine_requests", 'state="paused"', by=BY_ENGINE), ENGINE),
            unit=COUNT,
        ),
    ]


def steps() -> list[PanelBuilder]:
    """Return the row on the model's steps."""
    busy = f"clamp_max({rate('shoal_step_seconds_total', by=BY_ENGINE)}, 1)"
    by_layout = f"{BY_ENGINE}, layout"
    seconds = rate("shoal_step_seconds_total", by=by_layout)
    count = rate("shoal_steps_total", by=by_layout)
    tokens = rate("shoal_step_tokens_total", by=by_layout)
    return [
        graph(
            "Busy part of each engine",
            "Share of the time in which a step was in flight, shown at the first engine of a "
            "group. If it is near 1 for all engines, more load only makes requests wait.",
            Query(busy, ENGINE),
            unit="percentunit",
            limits=Limits(warn=0.95),
        ),
        graph(
            "Time of a step",
            "Mean, by layout. It rises with the batch and with prefills. One engine that is slower "
            "than the others holds back every group that it is in: look at its GPU's clocks.",
            Query(f"{seconds} / ({count} > 0)", f"{ENGINE} {{{{layout}}}}"),
            unit="s",
        ),
        graph(
            "Tokens per step",
            "Mean: prefill and decode together. Small steps leave a GPU idle in DP; they are what "
            "groups are for.",
            Query(f"{tokens} / ({count} > 0)", f"{ENGINE} {{{{layout}}}}"),
        ),
        graph(
            "Prefill tokens per second",
            "Prompt tokens computed, including those computed again. An engine with none, while "
            "others have many, is not given requests: see its state.",
            Query(rate("shoal_step_tokens_total", 'kind="prefill"', by=BY_ENGINE), ENGINE),
        ),
        graph(
            "Decode tokens per second",
            "Tokens computed one by one: what clients wait for. It should be about equal for all "
            "units of a layout.",
            Query(rate("shoal_step_tokens_total", 'kind="decode"', by=BY_ENGINE), ENGINE),
        ),
        graph(
            "Prefix cache: share of prompt tokens found",
            "Share of the requested prompt tokens that need no prefill. It is empty while no "
            "prompt comes; engines without a model have no cache.",
            Query(
                share(
                    rate("vllm:prefix_cache_hits_total", by=BY_ENGINE),
                    rate("vllm:prefix_cache_queries_total", by=BY_ENGINE),
                ),
                ENGINE,
            ),
            unit="percentunit",
        ),
    ]


def gpus() -> list[PanelBuilder]:
    """Return the row on GPUs, whose metrics NVIDIA's dcgm-exporter provides, for all it knows."""
    return [
        graph(
            "GPU utilisation",
            "Share of the time in which a kernel ran, as nvidia-smi shows it. A decoding GPU shows "
            "100 % however small its batch, so compare the tokens per step, and the power.",
            Query("DCGM_FI_DEV_GPU_UTIL / 100", GPU),
            unit="percentunit",
        ),
        graph(
            "GPU power",
            "How hard a GPU works. One that draws less than the others under the same load is "
            "throttled, or waits for them.",
            Query("DCGM_FI_DEV_POWER_USAGE", GPU),
            unit="watt",
        ),
        graph(
            "Last Xid error",
            "The number of the last error that the driver reported for a GPU; 0: none. 48, 63, 64, "
            "74, 79, 94 and 95 are matters of the hardware: drain the node, and see NVIDIA's list "
            "of Xid errors. 13, 31 and 43 come from a program.",
            Query("DCGM_FI_DEV_XID_ERRORS", GPU),
            unit=COUNT,
        ),
        graph(
            "GPU memory in use",
            "Shoal does not export it, because it is constant after the start (weights and KV "
            "buffer). If it grows, another process uses the GPU.",
            Query("DCGM_FI_DEV_FB_USED * 2^20", GPU),
            unit="bytes",
            span=12,
        ),
        graph(
            "GPU clock",
            "A GPU that runs slower than the others slows down every group that it is in: check "
            "its temperature and power limit.",
            Query("DCGM_FI_DEV_SM_CLOCK * 1e6", GPU),
            unit="hertz",
            span=12,
        ),
    ]

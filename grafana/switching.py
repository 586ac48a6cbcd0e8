"""The dashboard *Switching*: how often and why the layout changes, its costs and its gains."""

from collections.abc import Mapping, Sequence

from grafana_foundation_sdk.models.common import BigValueTextMode, GraphDrawStyle

from shoal.grafana.glance import REASONS
from shoal.grafana.panels import COUNT, Limits, PanelBuilder, Query, figure, graph
from shoal.grafana.promql import events, quantile, rate, series, total

FAILED = 'outcome="failed"'
CARRIED = 'outcome="carried"'


def rows() -> Mapping[str, Sequence[PanelBuilder]]:
    """Return the rows below the first one, by title."""
    return {
        "Switches": switches(),
        "What switches cost": cost(),
        "Requests that are carried": carries(),
        "Modes": modes(),
        "Leases and task pool": pool(),
        "Policy and controller": decisions(),
    }


def switches() -> list[PanelBuilder]:
    """Return the row on switches: how many, and whether they succeed."""
    return [*_switch_figures(), *_switch_graphs()]


def _switch_figures() -> list[PanelBuilder]:
    return [
        figure(
            "Policy",
            "What decides the layout; `manual` leaves it to `POST /admin/layout`. "
            "`POST /admin/policy` changes it.",
            Query(f"max by (policy) ({series('shoal_policy_info')}) == 1", "{{policy}}"),
            text=BigValueTextMode.NAME,
            span=6,
        ),
        figure(
            "Switches in the time shown",
            "All switches that ended, whatever their outcome. If there are none although a policy "
            "decides and the load changes, the policy has no reason to switch, or cannot: see the "
            "failed ones.",
            Query(events("shoal_switches_total")),
            unit=COUNT,
            span=6,
        ),
        figure(
            "Failed switches in the time shown",
            "Switches that were undone: every engine went back to what it was, and no request was "
            "lost. The log says why. If there are many, see docs/alerts.md, ShoalSwitchesFail.",
            Query(events("shoal_switches_total", FAILED)),
            unit=COUNT,
            limits=Limits(warn=1, bad=3),
            span=6,
        ),
        figure(
            "Engines in a switch",
            "Engines that a switch regroups at this moment. Most switches are over before "
            "Prometheus looks; one that waits for requests to end may take long.",
            Query(total("shoal_engine_switching")),
            unit=COUNT,
            span=6,
        ),
    ]


def _switch_graphs() -> list[PanelBuilder]:
    return [
        graph(
            "Switches per minute, by reason",
            "Why the layout changed, over time. `load` and `quiet` that alternate quickly mean "
            "that the load is at the policy's threshold.",
            Query(f"60 * {rate('shoal_switches_total', by='reason')}", "{{reason}}"),
            stack=True,
            span=6,
            names=REASONS,
        ),
        graph(
            "Groups formed and dissolved per minute, by outcome",
            "A switch forms and dissolves groups. `aborted` and `kept` left everybody as before: "
            "an engine did not reach a safe point, or requests did not end, in time. `lost`: an "
            "engine died meanwhile.",
            Query(f"60 * {rate('shoal_binds_total', by='outcome')}", "bind {{outcome}}"),
            Query(f"60 * {rate('shoal_releases_total', by='outcome')}", "release {{outcome}}"),
            span=6,
        ),
        graph(
            "Late switches per minute, by reason",
            "`sequential` switches of a policy whose requests did not end within `--switch-wait`: "
            "they went on without waiting, and carried these requests. Each one kept new requests "
            "waiting for that long.",
            Query(f"60 * {rate('shoal_late_switches_total', by='reason')}", "{{reason}}"),
            stack=True,
            span=6,
            names=REASONS,
        ),
        graph(
            "What switches did to requests, per second",
            "`paused` ones keep their KV and go on (`resumed`) when their unit is back; `drained` "
            "ones were waited for; `carried` ones went to another unit with their KV; `moved` ones "
            "are recomputed elsewhere, which costs their prefill again.",
            Query(rate("shoal_paused_requests_total"), "paused"),
            Query(rate("shoal_resumed_requests_total"), "resumed"),
            Query(rate("shoal_drained_requests_total"), "drained"),
            Query(rate("shoal_carried_requests_total", CARRIED), "carried"),
            Query(rate("shoal_moved_requests_total"), "moved"),
            unit="reqps",
            span=6,
        ),
    ]


def cost() -> list[PanelBuilder]:
    """Return the row on what switches cost."""
    return [
        graph(
            "Time of a switch, by treatment",
            "`sequential` switches wait for requests to end; the others take milliseconds, and "
            "`carry` also what the copy of KV takes. If another than a `sequential` one takes "
            "long, an engine is slow to reach a safe point: see the phases.",
            Query(quantile(0.5, "shoal_switch_seconds", by="treatment"), "{{treatment}} p50"),
            Query(quantile(0.99, "shoal_switch_seconds", by="treatment"), "{{treatment}} p99"),
            unit="s",
            style=GraphDrawStyle.POINTS,
        ),
        graph(
            "Phases of binds and releases (p90)",
            "Of a bind: `drain` until all members are at a safe point, `lease` their lending of "
            "blocks, `commit` until all have joined. Of a release: `release` until the leader has "
            "sent its members back, `resume` until they serve alone. `drain` is as long as a step "
            "of the model; the others are messages.",
            Query(quantile(0.9, "shoal_switch_phase_seconds", by="phase"), "{{phase}}"),
            unit="s",
            style=GraphDrawStyle.POINTS,
        ),
        graph(
            "Share of the time spent in switches",
            "Engines that are not regrouped go on serving, and with `sequential` the others do, "
            "too. If it is above a fifth with any other treatment, switches are too many or too "
            "slow.",
            Query(
                f"clamp_max({rate('shoal_switch_seconds_sum', by='treatment')}, 1)",
                "{{treatment}}",
            ),
            unit="percentunit",
            stack=True,
        ),
    ]


def carries() -> list[PanelBuilder]:
    """Return the row on requests that go to another unit with their KV."""
    return [
        graph(
            "Phases of carries (p90)",
            "`precopy` while KV is copied ahead and requests go on; `export` until the unit has "
            "stopped computing the requests, at most a step of the model; `import` until all of "
            "them go on in the next unit; `copy`: its members read the KV of those for which there "
            "is room.",
            Query(quantile(0.9, "shoal_carry_seconds", by="phase"), "{{phase}}"),
            unit="s",
            style=GraphDrawStyle.POINTS,
        ),
        graph(
            "Requests to be carried per second, by outcome",
            "`carried` ones took their KV along; `recomputed` ones are computed again, and the "
            "last panel of this row says why; `kept` ones stayed where they were, because their "
            "switch failed; of `lost` ones an engine died meanwhile.",
            Query(rate("shoal_carried_requests_total", by="outcome"), "{{outcome}}"),
            unit="reqps",
            stack=True,
        ),
        graph(
            "Requests asked to leave their unit per second, by reason",
            "With their KV. `switch`: their unit is regrouped. `drain`: their engine is taken out. "
            "`pause`: their unit was gone for too long. `balance`: another unit has less to do. "
            "`handover`: under the policy `batch`, another unit decodes them.",
            Query(rate("shoal_departures_total", by="reason"), "{{reason}}"),
            unit="reqps",
            stack=True,
        ),
        graph(
            "KV carried per second",
            "Bytes that the members of the next units have read from the memory of other engines: "
            "while requests were stopped, and ahead of that. `host`: it went through the host's "
            "memory, because the GPU cannot read the other one's.",
            Query(rate("shoal_carried_bytes_total", by="path"), "{{path}}, while stopped"),
            Query(rate("shoal_precopied_bytes_total", by="path"), "{{path}}, ahead"),
            unit="binBps",
        ),
        graph(
            "Carried without their KV per minute, by reason",
            "Requests that the next unit computes again. `no_room`: it had no free blocks for "
            "their KV. `not_shared`: its engines cannot read the other engines' memory. "
            "`unreadable`: the KV cannot be taken as it is.",
            Query(f"60 * {rate('shoal_carry_fallbacks_total', by='reason')}", "{{reason}}"),
            stack=True,
        ),
        graph(
            "Copied ahead of switches per minute, by outcome",
            "Carries whose KV was to be copied while their requests go on. `nothing`: no block was "
            "full yet, or the next unit had no room. `stopped`: an engine was late, or the switch "
            "failed.",
            Query(f"60 * {rate('shoal_precopies_total', by='outcome')}", "{{outcome}}"),
            stack=True,
        ),
        *_tiers(),
    ]


def _tiers() -> list[PanelBuilder]:
    """Return the panels on KV in the host's memory."""
    return [
        graph(
            "Requests in and out of the host's memory per minute",
            "With `--kv-tier-gib` and the policy `batch`. `parked`: the KV went there. `hit`: the "
            "request went on with it. `no_room` and `miss`: the KV is computed again.",
            Query(f"60 * {rate('shoal_tier_requests_total', by='outcome')}", "{{outcome}}"),
        ),
        graph(
            "KV to and from the host's memory per second",
            "With `--kv-tier-gib`. Writing goes on beside steps; the steps of a unit wait while it "
            "reads.",
            Query(rate("shoal_tier_bytes_total", by="direction"), "{{direction}}"),
            unit="binBps",
        ),
    ]


def modes() -> list[PanelBuilder]:
    """Return the row on how steps are executed."""
    return [
        graph(
            "Units, by layout",
            "Each unit serves requests of its own: more units serve more requests at once, and "
            "wider units answer each request faster. The layout should follow the load.",
            Query(total("shoal_units", by="layout"), "{{layout}}"),
            unit=COUNT,
            stack=True,
            span=6,
        ),
        graph(
            "Steps per second, by mode",
            "How steps of the model are executed. A TP step is one step, however many engines "
            "take part.",
            Query(rate("shoal_steps_total", by="mode"), "{{mode}}"),
            unit="ops",
            stack=True,
            span=6,
        ),
        graph(
            "Tokens computed per second, by mode",
            "Tokens that were computed again after a preemption or a move are counted again: much "
            "more than the tokens per second of the dashboard Serving means that work is thrown "
            "away.",
            Query(rate("shoal_step_tokens_total", by="mode, kind"), "{{mode}} {{kind}}"),
            unit="short",
            stack=True,
            span=6,
        ),
        graph(
            "Engines, by how groups exchange in SP",
            "`peer`: through each other's memory. `collective`: by NCCL, which takes more memory "
            "and time. If the GPUs have NVLink, the host then refuses to share memory: a "
            "container may need SYS_PTRACE.",
            Query(total("shoal_sp_exchange", by="layout, by"), "{{layout}} {{by}}"),
            unit=COUNT,
            span=6,
        ),
    ]


def pool() -> list[PanelBuilder]:
    """Return the row on leases and the task pool."""
    return [
        graph(
            "KV blocks that groups hold",
            "Virtual blocks of each group, each backed by one block of every member. It grows with "
            "the group's requests, and goes back to 0 when the group is dissolved.",
            Query(total("shoal_lease_blocks", by="instance, unit"), "{{instance}} [{{unit}}]"),
            span=6,
        ),
        graph(
            "Requests in the task pool, by priority",
            "Requests that no unit has started yet. It should be empty most of the time; if it "
            "only grows, send less or add a node, and bound it with `--max-waiting-requests`.",
            Query(total("shoal_pool_waiting", by="priority"), "{{priority}}"),
            unit=COUNT,
            stack=True,
            span=6,
        ),
        graph(
            "Prompt tokens in the task pool, by priority",
            "How much prefill waits. If it is large and the requests are few, their prompts are "
            "long and may need a group. `--max-waiting-tokens` bounds it.",
            Query(total("shoal_pool_waiting_tokens", by="priority"), "{{priority}}"),
            stack=True,
            span=6,
        ),
        graph(
            "Bytes of all requests",
            "What the controller keeps of requests, images included. `--max-held-bytes` bounds it; "
            "the front ends and engines keep copies.",
            Query(total("shoal_held_bytes", by="state"), "{{state}}"),
            unit="bytes",
            stack=True,
            span=6,
        ),
        graph(
            "Wait of the oldest request, by priority",
            "If it is above a minute for `urgent` or `normal`, see docs/alerts.md, "
            "ShoalRequestsWaitLong.",
            Query(f"max by (priority) ({series('shoal_pool_oldest_seconds')})", "{{priority}}"),
            unit="s",
            limits=Limits(warn=10, bad=60),
            span=6,
        ),
    ]


def decisions() -> list[PanelBuilder]:
    """Return the row on the policy and the controller."""
    return [
        graph(
            "Time of a decision",
            "The policy is asked after every batch of events, and the whole controller waits for "
            "it. This should be well below a millisecond.",
            Query(quantile(0.5, "shoal_policy_decision_seconds"), "p50"),
            Query(quantile(0.99, "shoal_policy_decision_seconds"), "p99"),
            unit="s",
            span=6,
        ),
        graph(
            "One turn of the controller's loop",
            "Every request and every switch goes through this loop. Above 50 ms it delays first "
            "tokens: see docs/alerts.md, ShoalControllerSlow.",
            Query(quantile(0.5, "shoal_controller_loop_seconds"), "p50"),
            Query(quantile(0.99, "shoal_controller_loop_seconds"), "p99"),
            unit="s",
            limits=Limits(bad=0.05),
            span=6,
        ),
        graph(
            "Errors of the policy and stale messages, per minute",
            "Errors are decisions that raised or could not be done; the node kept what it had, "
            "and the log says why. Stale messages belong to switches that were over; a few are "
            "harmless.",
            Query(f"60 * {rate('shoal_policy_errors_total')}", "policy errors"),
            Query(f"60 * {rate('shoal_stale_messages_total')}", "stale messages"),
            span=6,
        ),
        graph(
            "Error of the predicted step times",
            "How far the cost model is off, smoothed, by layout and kind of step. The policy "
            "`adaptive` decides by it: above a half, describe the hardware with "
            "`--cost-model-hardware`.",
            Query(
                f"max by (layout, kind) ({series('shoal_step_time_relative_error')})",
                "{{layout}} {{kind}}",
            ),
            unit="percentunit",
            limits=Limits(warn=0.25, bad=0.5),
            span=6,
        ),
    ]

"""
Speculation: whether it pays, where it does not, and what the monitor decided.
"""

from dataclasses import replace

from deploy.monitoring.source.common import (
    ACCEPTANCE_LENGTH,
    EVENTS,
    INSTALLATION,
    JOB,
    MODEL,
    MODELS,
    NONE,
    SAVED,
    WORKER,
    WORKERS,
    ZERO,
    acceptance_by_tenant,
    rejected_by_tenant,
)
from deploy.monitoring.source.panels import TOKENS_PER_SECOND, Dashboard, Panel, Query, Row, Text

EXPLANATION = """
A small *draft model* proposes a few tokens, and the *target model* verifies all of them in one step. It keeps the
tokens that it confirms, so one step gives several tokens. The text is the one the target model alone would generate.

**Acceptance length** is the mean number of tokens per step, including the target's own. **1.0**: no draft token was
accepted, the draft is useless. **4.0** is the maximum for three draft tokens per step.

**Is 2.0 good?** That depends. A step that verifies draft tokens takes longer, by a factor that grows with the batch
size. That factor is the **break-even**: drafting pays while the acceptance length is *above* it. The monitor measures
both, and stops drafting if it does not pay. *Below break-even* at high load is normal. *Collapsed* is not: something is
wrong with the draft, the template or the traffic. Purple annotations are changes of mode.
"""
MODES = {"0": ("target only", "blue"), "1": ("speculative", "green")}


def _steps(what: str, by: str, window: str) -> str:
    """A rate of the engines' step counters; several gateways read the same counters."""
    counter = f"appliance_worker_step_{what}_total{{{WORKER}}}"
    return f"sum by ({by}) (max by (worker, draft_tokens, batch) (rate({counter}[{window}])))"


def _length(by: str) -> str:
    """Acceptance length of requests that ended in the last hour, by a label of their drafts' counters."""
    accepted, drafts = (
        f"sum by ({by}) (increase(appliance_{by}_{counted}_total{{{MODEL}}}[1h]))"
        for counted in ("accepted_tokens", "drafts")
    )
    return f"1 + {accepted} / ({drafts} > 0)"


PAYING = Row(
    title="Is it paying?",
    panels=(
        Panel(
            title="Workers that draft",
            text="Fraction of the workers whose batch size in use is drafted for. 0 at high load is normal: see the reason "
            "below.",
            queries=(Query(expr=f'avg(max by (worker) (appliance_speculation_mode{{{WORKER},mode="speculative"}}))'),),
            unit="percentunit", kind="stat", width=6, height=4,
        ),
        replace(ACCEPTANCE_LENGTH, width=6),
        Panel(
            title="Collapsed workers",
            text="Workers whose draft tokens are almost never accepted, compared with their baseline. Not 0: an alarm, see "
            "docs/runbooks/alerts/ApplianceAcceptanceCollapsed.md.",
            queries=(Query(expr=f"sum(max by (worker) (appliance_speculation_collapsed{{{WORKER}}}))"),),
            kind="stat", width=6, height=4, thresholds=((1, "red"),),
        ),
        Panel(
            title="Time since the last change of mode",
            text="Of any worker, in the time range, to about a minute. Minutes, again and again: the traffic alternates; see "
            "docs/how-to/tune-the-fallback.md.",
            queries=(
                Query(
                    expr="time() + 60 - max(max_over_time(timestamp(changes("
                    f'appliance_speculation_mode{{{WORKER},mode="speculative"}}[1m]) > 0)[$__range:15s]))'
                ),
            ),
            unit="s", kind="stat", width=6, height=4, absent="No change in this time range",
        ),
        Text(title="What is acceptance length?", markdown=EXPLANATION.strip(), width=8, height=12),
        replace(SAVED, height=12),
        Panel(
            title="Acceptance length",
            text="Mean tokens per step with drafts, over the last few hundred drafts. If a line ends, the worker does not "
            "draft. Near 1: collapsed.",
            queries=(
                Query(expr=f"avg by (worker) (appliance_acceptance_length{{{WORKER}}})", legend="{{worker}}"),
            ),
            unit="none", width=8, height=12,
        ),
    ),
)  # fmt: skip
SINCE = Row(
    title="Since when, and why?",
    panels=(
        Panel(
            title="Speculation mode",
            text="`speculative`: drafts as many tokens as pay. `target only`: drafting would not pay, or an operator "
            "overrode it; the reason is below.",
            queries=(
                Query(
                    expr=f'max by (worker) (appliance_speculation_mode{{{WORKER},mode="speculative"}})',
                    legend="{{worker}}",
                ),
            ),
            kind="state-timeline", width=12, height=5, mappings=MODES,
        ),
        Panel(
            title="Collapsed",
            text="1 while almost no draft token is accepted, compared with the baseline of this worker. An alarm: "
            "see docs/runbooks/alerts/ApplianceAcceptanceCollapsed.md.",
            queries=(
                Query(
                    expr=f"max by (worker) (appliance_speculation_collapsed{{{WORKER}}} "
                    f"and on (cluster, namespace, job, instance) appliance_control_acting{{{JOB}}} == 1)",
                    legend="{{worker}}",
                ),
            ),
            kind="state-timeline", width=12, height=5,
            mappings={"0": ("no", "green"), "1": ("COLLAPSED", "red")},
        ),
        Panel(
            title="Reason",
            text="Why each worker is in its mode; docs/explanation/speculation-and-fallback.md explains each reason and "
            "what to do.",
            queries=(
                Query(
                    expr=f"max by (worker, reason) (appliance_speculation_reason{{{WORKER}}}) == 1",
                    legend="{{worker}}: {{reason}}",
                ),
            ),
            kind="state-timeline", mappings={"1": (" ", "blue")},
            width=12,
            height=8,
        ),
        Panel(
            title="Changes of mode",
            text="By reason, since the gateways started. Many in an hour: traffic alternates; see "
            "docs/how-to/tune-the-fallback.md.",
            queries=(
                Query(
                    expr=f"sum by (reason) (appliance_speculation_changes_total{{{WORKER}}})",
                    legend="{{reason}}",
                ),
            ),
            stacked=True,
            width=6,
            absent=NONE,
        ),
        Panel(
            title="Cost of exploration",
            text="Share of engine time lost to steps that measure other numbers of draft tokens, over ten minutes. "
            "At most `monitor.exploration_share`.",
            queries=(
                Query(
                    expr=f"max by (worker) (appliance_speculation_exploration_share{{{WORKER}}})",
                    legend="{{worker}}",
                ),
            ),
            unit="percentunit",
            width=6,
        ),
    ),
)  # fmt: skip
WHERE = Row(
    title="Where does it pay?",
    panels=(
        Panel(
            title="Engine time saved by worker",
            text="Since the gateways started, compared with the time without drafts. Falling: drafting costs time there.",
            queries=(
                Query(
                    expr=f"sum by (worker) (appliance_speculation_saved_engine_seconds{{{WORKER}}})",
                    legend="{{worker}}",
                ),
            ),
            unit="s", minimum=None,
        ),
        Panel(
            title="Break-even by batch size",
            text="Acceptance length above which the maximum number of draft tokens pays, as measured in the running "
            "worker, by batch size (upper bound of the bucket).",
            queries=(
                Query(
                    expr=f"max by (worker, batch) (appliance_break_even_acceptance_length{{{WORKER}}})",
                    legend="{{worker}}, batch {{batch}}",
                ),
            ),
            unit="none",
        ),
        Panel(
            title="Draft tokens by batch size",
            text="Draft tokens per step at each batch size; 0 if none pay.",
            queries=(
                Query(
                    expr=f"max by (worker, batch) (appliance_speculation_draft_tokens{{{WORKER}}})",
                    legend="{{worker}}, batch {{batch}}",
                ),
            ),
            unit="none",
        ),
        Panel(
            title="Tokens per engine second by batch size",
            text="Goodput by batch size (upper bound of the bucket) and K, the number of draft tokens, in the time range. Within "
            "a batch size the longest bar is the best choice; numbers that are not in use are measured from time to "
            "time. Steps that process a prompt are excluded.",
            queries=(
                Query(
                    expr=f"{_steps('tokens', 'batch, draft_tokens', '$__range')} "
                    f"/ ({_steps('seconds', 'batch, draft_tokens', '$__range')} > 0)",
                    legend="batch {{batch}}, K {{draft_tokens}}",
                ),
            ),
            unit=TOKENS_PER_SECOND, kind="bargauge", width=12,
        ),
        Panel(
            title="Tokens per engine second",
            text="By number of draft tokens, over all batch sizes: a rising line may only mean larger batches, so compare "
            "numbers of draft tokens in the other panel.",
            queries=(
                Query(
                    expr=f"{_steps('tokens', 'draft_tokens', '$__rate_interval')} "
                    f"/ ({_steps('seconds', 'draft_tokens', '$__rate_interval')} > 0)",
                    legend="{{draft_tokens}} draft tokens",
                ),
            ),
            unit=TOKENS_PER_SECOND, width=12,
        ),
        Panel(
            title="Acceptance length by context",
            text="By the length of the prompt in tokens, over an hour. If it is far lower above some length, the draft was "
            "not trained for such contexts.",
            queries=(Query(expr=_length("context"), legend="{{context}}"),),
            unit="none",
        ),
        Panel(
            title="Acceptance length by template",
            text="The ten lowest over an hour, by the label of the prompt template; `appliance speculation status` "
            "names its tenants. If one is far below the others, the draft was not trained on this template. Labels "
            "change when a gateway starts; `(other)` are rare templates.",
            queries=(Query(expr=f"bottomk(10, {_length('template')})", legend="{{template}}"),),
            unit="none",
        ),
        Panel(
            title="Acceptance rate by position",
            text="Fraction of drafts whose token at this position was accepted; the first is position 0. A steep fall "
            "means that fewer draft tokens would be enough.",
            queries=(
                Query(
                    expr=f"avg by (position) (appliance_acceptance_rate_per_position_ratio{{{WORKER}}})",
                    legend="position {{position}}",
                ),
            ),
            unit="percentunit", maximum=1,
        ),
    ),
)  # fmt: skip
WHOM = Row(
    title="For whom does it pay?",
    panels=(
        acceptance_by_tenant(MODEL),
        rejected_by_tenant(MODEL),
    ),
)  # fmt: skip
DRAFT = Row(
    title="The draft",
    panels=(
        Panel(
            title="Draft tokens and accepted tokens",
            text="Draft tokens of finished requests, and how many of them were accepted. The difference is wasted "
            "work.",
            queries=(
                Query(
                    expr=f"sum(rate(appliance_draft_tokens_total{{{MODEL}}}[$__rate_interval])) or on() {ZERO}",
                    legend="proposed",
                ),
                Query(
                    expr=f"sum(rate(appliance_accepted_tokens_total{{{MODEL}}}[$__rate_interval])) or on() {ZERO}",
                    legend="accepted",
                ),
            ),
            unit=TOKENS_PER_SECOND,
            width=6,
        ),
        Panel(
            title="Acceptance length by model",
            text="From the counters of finished requests, over an hour: slower than the window above, and smoother.",
            queries=(
                Query(
                    expr=f"1 + sum by (model) (increase(appliance_accepted_tokens_total{{{MODEL}}}[1h])) "
                    f"/ (sum by (model) (increase(appliance_drafts_total{{{MODEL}}}[1h])) > 0)",
                    legend="{{model}}",
                ),
            ),
            unit="none",
            width=6,
        ),
        Panel(
            title="Hourly mean acceptance length",
            text="Acceptance length averaged over an hour. If it falls for hours without a change of traffic, recycle "
            "the worker.",
            queries=(Query(expr=f"worker:appliance_acceptance_length:avg1h{{{WORKER}}}", legend="{{worker}}"),),
            unit="none",
            width=6,
        ),
        Panel(
            title="Draft promotions by result",
            text="Results of promotions since the gateways started; green annotations are their steps. If one was "
            "refused or failed, the former draft serves, and `appliance draft status` says why.",
            queries=(
                Query(
                    expr=f'sum by (stage) (appliance_draft_promotion_steps_total{{{JOB},'
                    'stage=~"promoted|refused|failed|interrupted|rolled_back"})',
                    legend="{{stage}}",
                ),
            ),
            kind="bargauge",
            width=6,
        ),
        Panel(
            title="Rejected draft tokens by template",
            text="Draft tokens that were not accepted, per second. The ten templates with most.",
            queries=(
                Query(
                    expr="topk(10, sum by (template) ("
                    f"rate(appliance_template_draft_tokens_total{{{MODEL}}}[$__rate_interval]) "
                    f"- rate(appliance_template_accepted_tokens_total{{{MODEL}}}[$__rate_interval])))",
                    legend="{{template}}",
                ),
            ),
            unit=TOKENS_PER_SECOND, stacked=True,
            width=24,
        ),
    ),
)  # fmt: skip

SPECULATION = Dashboard(
    uid="appliance-speculation",
    title="Appliance: speculation",
    text="Whether drafting pays, where it does not, and what the monitor decided.",
    variables=(*INSTALLATION, WORKERS, MODELS),
    events=EVENTS,
    rows=(PAYING, SINCE, WHERE, WHOM, DRAFT),
)

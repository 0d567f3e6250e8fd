"""
Speculation: what it gives, where it does not pay, and what was decided about it.
"""

from deploy.monitoring.source.common import EVENTS, JOB, JOBS, MODEL, MODELS, WORKER, WORKERS
from deploy.monitoring.source.panels import Dashboard, Panel, Query, Row, Text

EXPLANATION = """
A small *draft* model proposes a few tokens, and the big model checks all of them in one step. What it finds right
is kept, so one step gives several tokens. The text is the one the big model would have written alone.

**Acceptance length** is how many tokens a step gives on average, the big model's own one included. **1.0**: no
proposal was right, the draft is no use. **4.0** is the most for three proposals a step.

**Is 2.0 good?** That depends. A step that checks proposals takes longer, by a factor that grows with the number of
requests decoded together. That factor is the **break-even**: drafting pays while the acceptance length is *above* it.
The appliance measures both, and stops drafting where it does not pay. *Below break-even* at high load is normal.
*Collapsed* is not: something is wrong with the draft, the template or the traffic. Purple marks are changes it made.
"""
MODES = {"0": ("does not draft", "blue"), "1": ("probing", "purple"), "2": ("drafts", "green")}

WORTH = Row(
    title="Does drafting pay?",
    panels=(
        Text(title="What is acceptance length?", markdown=EXPLANATION.strip(), width=12, height=10),
        Panel(
            title="Acceptance length",
            text="Tokens a step with drafts gives, over the last few hundred drafts. A line that ends: the worker "
            "does not draft. Near 1: collapsed.",
            queries=(
                Query(expr=f"avg by (worker) (appliance_acceptance_length{{{WORKER}}})", legend="{{worker}}"),
            ),
            unit="none", width=12, height=10,
        ),
        Panel(
            title="What each worker does",
            text="`drafts`: as many tokens as pay. `does not draft`: it would not pay, or somebody decided so; the "
            "reason is below. `probing`: a few steps to see whether it would.",
            queries=(
                Query(
                    expr=f'2 * max by (worker) (appliance_speculation_mode{{{WORKER},mode="speculative"}}) '
                    f'+ max by (worker) (appliance_speculation_mode{{{WORKER},mode="probing"}})',
                    legend="{{worker}}",
                ),
            ),
            kind="state-timeline", width=12, height=6, words=MODES,
        ),
        Panel(
            title="Collapsed",
            text="1 while hardly a draft token is accepted, compared with what is usual on this worker. An alarm: "
            "see docs/runbooks/alerts/ApplianceAcceptanceCollapsed.md.",
            queries=(
                Query(
                    expr=f"max by (worker) (appliance_speculation_collapsed{{{WORKER}}} "
                    f"and on (job, instance) appliance_control_acting{{{JOB}}} == 1)",
                    legend="{{worker}}",
                ),
            ),
            kind="state-timeline", width=12, height=6,
            words={"0": ("no", "green"), "1": ("COLLAPSED", "red")},
        ),
        Panel(
            title="Break-even by batch size",
            text="Acceptance length above which the most draft tokens pay, as measured in the running worker, by "
            "the number of requests decoded together (at most so many).",
            queries=(
                Query(
                    expr=f"max by (worker, batch) (appliance_break_even_acceptance_length{{{WORKER}}})",
                    legend="{{worker}}, batch up to {{batch}}",
                ),
            ),
            unit="none",
        ),
        Panel(
            title="Draft tokens by batch size",
            text="How many tokens are drafted a step at each batch size; 0 where none pay.",
            queries=(
                Query(
                    expr=f"max by (worker, batch) (appliance_speculation_draft_tokens{{{WORKER}}})",
                    legend="{{worker}}, batch up to {{batch}}",
                ),
            ),
            unit="none",
        ),
        Panel(
            title="Accepted at each position",
            text="Share of drafts whose token at this position was accepted; the first is position 0. A steep fall "
            "says that fewer draft tokens would do.",
            queries=(
                Query(
                    expr=f"avg by (position) (appliance_acceptance_rate_per_position_ratio{{{WORKER}}})",
                    legend="position {{position}}",
                ),
            ),
            unit="percentunit", most=1,
        ),
    ),
)  # fmt: skip
DECISIONS = Row(
    title="What was decided",
    panels=(
        Panel(
            title="Reason",
            text="Why each worker is in its mode; docs/explanation/speculation-and-fallback.md says what each reason "
            "means and what to do.",
            queries=(
                Query(
                    expr=f"max by (worker, reason) (appliance_speculation_reason{{{WORKER}}}) == 1",
                    legend="{{worker}}: {{reason}}",
                ),
            ),
            kind="state-timeline", words={"1": (" ", "blue")},
        ),
        Panel(
            title="Changes",
            text="Changes of what workers do, by why, since the gateways started. Many in an hour: traffic goes back "
            "and forth; see docs/how-to/tune-the-fallback.md.",
            queries=(
                Query(
                    expr=f"sum by (reason) (appliance_speculation_changes_total{{{WORKER}}}) or on() vector(0)",
                    legend="{{reason}}",
                ),
            ),
            stacked=True,
        ),
        Panel(
            title="Drafts promoted, refused, given back",
            text="How changes of the draft in service ended since the gateways started; green marks are their steps. "
            "Refused or failed: the former draft serves, and `appliance draft status` says why.",
            queries=(
                Query(
                    expr=f'sum by (stage) (appliance_draft_promotion_steps_total{{{JOB},'
                    'stage=~"promoted|refused|failed|interrupted|rolled_back"})',
                    legend="{{stage}}",
                ),
            ),
            kind="bargauge",
        ),
        Panel(
            title="Probes",
            text="Probes in a row that failed; each doubles the time to the next, up to a bound.",
            queries=(
                Query(expr=f"max by (worker) (appliance_speculation_probes_failed{{{WORKER}}})", legend="{{worker}}"),
            ),
        ),
    ),
)  # fmt: skip


def _steps(what: str, by: str, window: str) -> str:
    """A rate of what engines count of their steps; several gateways read the same counters."""
    counter = f"appliance_worker_step_{what}_total{{{WORKER}}}"
    return f"sum by ({by}) (max by (worker, draft_tokens, batch) (rate({counter}[{window}])))"


def _length(by: str) -> str:
    """Acceptance length of requests that ended in the last hour, by a label of their drafts' counters."""
    accepted, drafts = (
        f"sum by ({by}) (increase(appliance_{by}_{counted}_total{{{MODEL}}}[1h]))"
        for counted in ("accepted_tokens", "drafts")
    )
    return f"1 + {accepted} / ({drafts} > 0)"


SPEED = Row(
    title="What is fastest?",
    panels=(
        Panel(
            title="Tokens per engine second by batch size",
            text="What one second of an engine gives, by how many requests are decoded together (at most so many) and "
            "how many tokens are drafted, in the time shown. Within a batch size the longest bar is what pays; "
            "numbers that are not in use are tried now and then. Steps that read a prompt are left out.",
            queries=(
                Query(
                    expr=f"{_steps('tokens', 'batch, draft_tokens', '$__range')} "
                    f"/ ({_steps('seconds', 'batch, draft_tokens', '$__range')} > 0)",
                    legend="batch up to {{batch}}, {{draft_tokens}} drafted",
                ),
            ),
            unit="none", kind="bargauge", width=12,
        ),
        Panel(
            title="Tokens per engine second",
            text="By tokens drafted a step, over all batch sizes: a line that rises may just have had larger batches, "
            "so compare numbers of draft tokens in the panel beside.",
            queries=(
                Query(
                    expr=f"{_steps('tokens', 'draft_tokens', '$__rate_interval')} "
                    f"/ ({_steps('seconds', 'draft_tokens', '$__rate_interval')} > 0)",
                    legend="{{draft_tokens}} drafted",
                ),
            ),
            unit="none", width=12,
        ),
    ),
)  # fmt: skip
WHERE = Row(
    title="Where are drafts accepted?",
    panels=(
        Panel(
            title="Acceptance length by context",
            text="By the length of the prompt in tokens, over an hour. Far lower from some length on: the draft was "
            "not trained for such contexts.",
            queries=(Query(expr=_length("context"), legend="{{context}}"),),
            unit="none",
        ),
        Panel(
            title="Acceptance length by template",
            text="The ten lowest over an hour, by the label of the prompt template; `appliance speculation status` "
            "names its tenants. Far below the others: the draft never saw this template. Labels are made anew when "
            "a gateway starts; `(other)` are templates that come rarely.",
            queries=(Query(expr=f"bottomk(10, {_length('template')})", legend="{{template}}"),),
            unit="none",
        ),
        Panel(
            title="Draft tokens thrown away by template",
            text="Drafted and not accepted, per second: computed for nothing. The ten templates with most.",
            queries=(
                Query(
                    expr="topk(10, sum by (template) ("
                    f"rate(appliance_template_draft_tokens_total{{{MODEL}}}[$__rate_interval]) "
                    f"- rate(appliance_template_accepted_tokens_total{{{MODEL}}}[$__rate_interval])))",
                    legend="{{template}}",
                ),
            ),
            stacked=True,
        ),
    ),
)  # fmt: skip
TOKENS = Row(
    title="Tokens",
    panels=(
        Panel(
            title="Draft tokens, and those accepted",
            text="What was proposed for requests that ended, and how much of it was kept. The difference was "
            "computed for nothing.",
            queries=(
                Query(
                    expr=f"sum(rate(appliance_draft_tokens_total{{{MODEL}}}[$__rate_interval])) or on() vector(0)",
                    legend="proposed",
                ),
                Query(
                    expr=f"sum(rate(appliance_accepted_tokens_total{{{MODEL}}}[$__rate_interval])) or on() vector(0)",
                    legend="accepted",
                ),
            ),
        ),
        Panel(
            title="Acceptance length by model",
            text="From what requests that ended counted, over an hour: slower than the window above, and steadier.",
            queries=(
                Query(
                    expr=f"1 + sum by (model) (increase(appliance_accepted_tokens_total{{{MODEL}}}[1h])) "
                    f"/ (sum by (model) (increase(appliance_drafts_total{{{MODEL}}}[1h])) > 0)",
                    legend="{{model}}",
                ),
            ),
            unit="none",
        ),
        Panel(
            title="Over the hours",
            text="Acceptance length averaged over an hour. A slope that goes on for hours without a change of "
            "traffic: recycle the worker.",
            queries=(Query(expr=f"worker:appliance_acceptance_length:avg1h{{{WORKER}}}", legend="{{worker}}"),),
            unit="none",
        ),
    ),
)  # fmt: skip

SPECULATION = Dashboard(
    uid="appliance-speculation",
    title="Appliance: speculation",
    text="What drafting gives, where it does not pay, and what was decided about it.",
    variables=(JOBS, WORKERS, MODELS),
    events=EVENTS,
    rows=(WORTH, SPEED, DECISIONS, WHERE, TOKENS),
)

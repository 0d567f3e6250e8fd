"""A report as one self-contained HTML page; bars are drawn with their 95 % confidence intervals."""

from markupsafe import Markup

from appliance.drafts.evaluation.arms import Arm
from appliance.drafts.evaluation.evaluation_results import (
    AcceptanceLine,
    Evaluation,
    TrafficAspect,
    kind_name,
)
from appliance.drafts.evaluation.intervals import ConfidenceInterval
from appliance.drafts.report_template import render_template
from appliance.infra import svg

WIDTH, LABELS, BAR, GAP, GROUP_GAP = 900, 190, 14, 3, 12
NAMES = {Arm.TARGET: "target alone", Arm.INCUMBENT: "draft in service", Arm.CANDIDATE: "candidate"}


def render_page(evaluation: Evaluation) -> str:
    ratio = evaluation.speed_ratio
    return render_template(
        "evaluation.html",
        title=f"Evaluation of a draft: {evaluation.verdict}",
        report=evaluation,
        facts=_facts(evaluation),
        bars=_bars(evaluation) if evaluation.lines else None,
        lines=[
            (
                kind_name(line.aspect, line.value), NAMES[line.arm], f"{line.requests:,}",
                f"{line.drafts:,}", f"{line.draft_tokens:,}", f"{line.accepted:,}",
                _interval(line.acceptance_length),
            )
            for line in evaluation.lines
        ],
        comparisons=[
            (kind_name(each.aspect, each.value), f"{each.requests:,}", _interval(each.ratio, digits=3))
            for each in evaluation.comparisons
        ],
        position_names=("Arm", *(f"Position {place + 1}" for place in range(evaluation.draft_tokens))),
        positions=[
            (NAMES[line.arm], *(f"{rate:.1%}" for rate in line.per_position))
            for line in evaluation.lines
            if line.aspect is TrafficAspect.ALL
        ],
        speed_ratio=_interval(ratio, digits=3) if ratio is not None else None,
        gains=[
            (NAMES[speed.arm], _interval(speed.gain, digits=3))
            for speed in evaluation.speeds
            if speed.gain is not None
        ],
        speeds=[
            (
                NAMES[speed.arm], each.batch, each.draft_tokens, f"{each.steps:,}", f"{each.seconds:.2f}",
                f"{each.tokens:,}", f"{each.tokens / each.seconds:,.1f}" if each.seconds else "",
            )
            for speed in evaluation.speeds
            for each in speed.paces
        ],
        equalities=[
            (NAMES[each.arm], each.compared, each.same, each.ties, each.mismatches)
            for each in evaluation.equalities
        ],
        differences=[
            (
                each.request_id, NAMES[each.arm], each.agreement, each.position,
                "more than 1" if each.gap is None else f"{each.gap:.6f}",
            )
            for each in evaluation.differences
        ],
    )  # fmt: skip


def _facts(evaluation: Evaluation) -> dict[str, str]:
    order = "alternating, both workers running" if evaluation.together else "one worker after the other"
    return {
        "Candidate": evaluation.draft,
        "Draft in service": evaluation.incumbent or "none: the target alone",
        "Target": evaluation.target,
        "Data set": evaluation.dataset,
        "Prompts": f"{evaluation.compared} answered by every arm, of {evaluation.prompts}",
        "Held out and not used": f"{evaluation.missing} erased, {evaluation.withheld} withheld, "
        f"{evaluation.unusable} unusable",
        "Answers": f"up to {evaluation.max_tokens} tokens, K = {evaluation.draft_tokens}",
        "Order": order + ("" if evaluation.complete else "; not every round was measured"),
        "Machine": f"{evaluation.engine}, {evaluation.device}, {evaluation.dtype}",
        "Made": evaluation.made,
        "Report": evaluation.digest,
    }


def _bars(evaluation: Evaluation) -> Markup:
    scale = (WIDTH - LABELS - 60) / evaluation.draft_tokens
    parts: list[Markup] = []
    top = 0
    for kind in dict.fromkeys((line.aspect, line.value) for line in evaluation.lines):
        parts.append(svg.label(0, top + BAR - 2, kind_name(*kind)))
        for line in evaluation.lines:
            if (line.aspect, line.value) == kind:
                parts.append(_bar(line, top, scale))
                top += BAR + GAP
        top += GROUP_GAP
    return svg.drawing("Acceptance length by kind of traffic, with 95 % intervals", WIDTH, top, *parts)


def _bar(line: AcceptanceLine, top: int, scale: float) -> Markup:
    length = line.acceptance_length
    low, high = (LABELS + (bound - 1.0) * scale for bound in (length.low, length.high))
    width = max(1.0, (length.value - 1.0) * scale)
    middle = top + BAR / 2
    text = f"{NAMES[line.arm]}: {_interval(length)}, {line.requests} requests, {line.drafts:,} drafts"
    return svg.element(
        "g",
        svg.element("title", text),
        svg.element("rect", class_=line.arm, x=LABELS, y=top, width=f"{width:.1f}", height=BAR),
        svg.line(low, middle, high, middle, class_="whisker"),
        svg.label(max(high, LABELS + width) + 6, top + BAR - 2, f"{length.value:.2f}"),
    )


def _interval(interval: ConfidenceInterval, digits: int = 2) -> str:
    return f"{interval.value:.{digits}f} ({interval.low:.{digits}f} to {interval.high:.{digits}f})"

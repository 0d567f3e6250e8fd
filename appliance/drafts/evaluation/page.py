"""
A report as one HTML page that needs nothing else: no script, no font, no address.

Bars are drawn with the interval that holds the truth with 95 % confidence.
"""

from collections.abc import Iterable, Sequence
from html import escape

from appliance.drafts.evaluation.arms import Arm
from appliance.drafts.evaluation.intervals import Interval
from appliance.drafts.evaluation.report import Aspect, Evaluation, Line, Verdict, kind_name

STYLE = """
:root { color-scheme: light dark; --candidate: #2563a8; --incumbent: #8a97a6; --whisker: #c77700; }
body { font: 15px/1.45 system-ui, sans-serif; margin: 2rem auto; max-width: 72rem; padding: 0 1rem; }
h1 { font-size: 1.5rem; margin-bottom: 0; } h2 { font-size: 1.1rem; margin-top: 2rem; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th, td { padding: .3rem .6rem; text-align: right; border-bottom: 1px solid #8884; }
th:first-child, td:first-child { text-align: left; }
.wide { overflow-x: auto; } svg { width: 100%; height: auto; } text { font-size: 12px; fill: currentColor; }
.candidate { fill: var(--candidate); } .incumbent { fill: var(--incumbent); }
.whisker { stroke: var(--whisker); stroke-width: 2; }
.refused { border-left: 3px solid #b3261e; padding-left: .8rem; }
.passed { border-left: 3px solid #2e7d32; padding-left: .8rem; }
code { overflow-wrap: anywhere; }
"""
WIDTH, LABELS, BAR, GAP, GROUP_GAP = 900, 190, 14, 3, 12
NAMES = {
    Arm.TARGET: "target alone",
    Arm.INCUMBENT: "draft in service",
    Arm.CANDIDATE: "candidate",
}


def render_page(evaluation: Evaluation) -> str:
    """The page, whole."""
    title = f"Evaluation of a draft: {evaluation.verdict}"
    return "".join(
        (
            '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>{escape(title)}</title><style>{STYLE}</style></head><body>",
            f"<h1>{escape(title)}</h1>",
            *_verdict(evaluation),
            "<h2>What was compared</h2>",
            _identity(evaluation),
            "<h2>Acceptance length</h2>",
            _bars(evaluation),
            _lines(evaluation),
            "<h2>Candidate over the draft in service</h2>",
            _comparisons(evaluation),
            "<h2>Acceptance by draft position</h2>",
            _positions(evaluation),
            "<h2>Speed</h2>",
            *_speeds(evaluation),
            "<h2>Greedy answers against the target's own</h2>",
            *_equalities(evaluation),
            "</body></html>\n",
        )
    )


def _verdict(evaluation: Evaluation) -> Iterable[str]:
    yield f'<div class="{evaluation.verdict}"><p><strong>{evaluation.verdict}</strong>'
    if evaluation.verdict is Verdict.PASSED:
        yield f": it loses no more than {evaluation.margin:.1%}, and may be tried on served traffic"
    yield ".</p>"
    if evaluation.reasons:
        yield "<ul>"
        yield from (f"<li>{escape(reason)}</li>" for reason in evaluation.reasons)
        yield "</ul>"
    yield "</div>"


def _identity(evaluation: Evaluation) -> str:
    turns = "by turns, both workers running" if evaluation.together else "one worker after the other"
    rows = [
        ("Candidate", evaluation.draft),
        ("Draft in service", evaluation.incumbent or "none: the target alone"),
        ("Target", evaluation.target),
        ("Data set", evaluation.dataset),
        ("Prompts", f"{evaluation.compared} answered by every arm, of {evaluation.prompts}"),
        (
            "Held out and not used",
            f"{evaluation.missing} erased, {evaluation.withheld} withheld, {evaluation.unusable} unusable",
        ),
        ("Answers", f"up to {evaluation.max_tokens} tokens, K = {evaluation.draft_tokens}"),
        ("Order", turns + ("" if evaluation.complete else "; not every round was measured")),
        ("Machine", f"{evaluation.engine}, {evaluation.device}, {evaluation.dtype}"),
        ("Made", evaluation.made),
        ("Report", evaluation.digest),
    ]
    cells = "".join(
        f'<tr><td>{escape(name)}</td><td style="text-align:left"><code>{escape(value)}</code></td></tr>'
        for name, value in rows
    )
    return f'<div class="wide"><table>{cells}</table></div>'


def _bars(evaluation: Evaluation) -> str:
    """A group of bars for each kind of traffic, one bar an arm."""
    if not evaluation.lines:
        return "<p>Nothing was measured.</p>"
    most = 1.0 + evaluation.draft_tokens
    scale = (WIDTH - LABELS - 60) / (most - 1.0)
    parts, top = [], 0
    for kind in _kinds(evaluation.lines):
        group = [line for line in evaluation.lines if (line.aspect, line.value) == kind]
        parts.append(f'<text x="0" y="{top + BAR - 2}">{escape(kind_name(*kind))}</text>')
        for line in group:
            parts.append(_bar(line, top, scale))
            top += BAR + GAP
        top += GROUP_GAP
    return (
        '<svg role="img" aria-label="Acceptance length by kind of traffic, with 95 % intervals" '
        f'viewBox="0 0 {WIDTH} {top}">{"".join(parts)}</svg>'
        f"<p>Bars begin at 1, where no draft token is accepted, and could reach {most:g}. Dark: candidate; "
        "grey: draft in service; the line across the end holds the truth with 95 % confidence.</p>"
    )


def _bar(line: Line, top: int, scale: float) -> str:
    length = line.acceptance_length
    low, high = (LABELS + (bound - 1.0) * scale for bound in (length.low, length.high))
    width = max(1.0, (length.value - 1.0) * scale)
    middle = top + BAR / 2
    what = f"{NAMES[line.arm]}: {_interval(length)}, {line.requests} requests, {line.drafts:,} drafts"
    return (
        f"<g><title>{escape(what)}</title>"
        f'<rect class="{line.arm}" x="{LABELS}" y="{top}" width="{width:.1f}" height="{BAR}"/>'
        f'<line class="whisker" x1="{low:.1f}" x2="{high:.1f}" y1="{middle:.1f}" y2="{middle:.1f}"/>'
        f'<text x="{max(high, LABELS + width) + 6:.1f}" y="{top + BAR - 2}">{length.value:.2f}</text></g>'
    )


def _lines(evaluation: Evaluation) -> str:
    head = ("Traffic", "Arm", "Requests", "Drafts", "Draft tokens", "Accepted", "Acceptance length")
    rows = [
        _row(
            (
                kind_name(line.aspect, line.value), NAMES[line.arm], f"{line.requests:,}",
                f"{line.drafts:,}", f"{line.draft_tokens:,}", f"{line.accepted:,}",
                _interval(line.acceptance_length),
            )
        )
        for line in evaluation.lines
    ]  # fmt: skip
    return _table(head, rows)


def _comparisons(evaluation: Evaluation) -> str:
    if not evaluation.comparisons:
        return "<p>There was nothing to compare it with.</p>"
    rows = [
        _row((kind_name(each.aspect, each.value), f"{each.requests:,}", _interval(each.ratio, digits=3)))
        for each in evaluation.comparisons
    ]
    return _table(("Traffic", "Requests", "Ratio of acceptance lengths"), rows)


def _positions(evaluation: Evaluation) -> str:
    whole = [line for line in evaluation.lines if line.aspect is Aspect.ALL]
    if not whole:
        return "<p>Nothing was measured.</p>"
    head = ("Arm", *(f"Position {place + 1}" for place in range(evaluation.draft_tokens)))
    rows = [_row((NAMES[line.arm], *(f"{rate:.1%}" for rate in line.per_position))) for line in whole]
    return _table(head, rows) + "<p>Share of drafts of which this token and all before it were accepted.</p>"


def _speeds(evaluation: Evaluation) -> Iterable[str]:
    if evaluation.speed_ratio is not None:
        against = "the draft in service" if evaluation.incumbent else "the target alone"
        ratio = _interval(evaluation.speed_ratio, digits=3)
        yield f"<p><strong>{ratio}</strong> times as many tokens per engine second as {against}.</p>"
    for speed in evaluation.speeds:
        if speed.gain is not None:
            gain = _interval(speed.gain, digits=3)
            name = NAMES[speed.arm].capitalize()
            yield f"<p>{name}: {gain} times its own process while it does not draft.</p>"
    rows = [
        _row(
            (
                NAMES[speed.arm], f"{pace.batch}", f"{pace.draft_tokens}", f"{pace.steps:,}",
                f"{pace.seconds:.2f}", f"{pace.tokens:,}",
                f"{pace.tokens / pace.seconds:,.1f}" if pace.seconds else "",
            )
        )
        for speed in evaluation.speeds
        for pace in speed.paces
    ]  # fmt: skip
    head = ("Arm", "Batch up to", "K", "Steps", "Engine s", "Tokens", "Tokens per engine s")
    yield _table(head, rows) if rows else "<p>Nothing was measured.</p>"


def _equalities(evaluation: Evaluation) -> Iterable[str]:
    head = ("Arm", "Compared", "The same", "Ties", "Mismatches")
    rows = [
        _row((NAMES[each.arm], *map(str, (each.compared, each.same, each.ties, each.mismatches))))
        for each in evaluation.equalities
    ]
    if not rows:
        yield "<p>Nothing was compared.</p>"
        return
    yield _table(head, rows)
    yield (
        "<p>A tie parts where the target alone had two tokens within "
        f"{evaluation.epsilon:g} (logarithm of their probabilities) of each other.</p>"
    )
    if evaluation.differences:
        rows = [
            _row(
                (
                    each.request_id, NAMES[each.arm], str(each.agreement), str(each.position),
                    "more than 1" if each.gap is None else f"{each.gap:.6f}",
                )
            )
            for each in evaluation.differences
        ]  # fmt: skip
        yield _table(("Request", "Arm", "What", "At token", "Gap"), rows)


def _kinds(lines: Iterable[Line]) -> list[tuple[Aspect, str]]:
    return list(dict.fromkeys((line.aspect, line.value) for line in lines))


def _interval(interval: Interval, digits: int = 2) -> str:
    return f"{interval.value:.{digits}f} ({interval.low:.{digits}f} to {interval.high:.{digits}f})"


def _table(head: Sequence[str], rows: Sequence[str]) -> str:
    cells = "".join(f'<th scope="col">{escape(name)}</th>' for name in head)
    return f'<div class="wide"><table><tr>{cells}</tr>{"".join(rows)}</table></div>'


def _row(cells: Sequence[str]) -> str:
    return f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in cells)}</tr>"

"""
The numbers of a report from finished steps.  Pure.

Speed is tokens per engine second over whole decode steps.  The worker's plugin counts the engine seconds of
steps in which every request verified a whole draft, by batch bucket and number of draft tokens.  Prefill,
waiting and network are excluded.

"Without drafts" is the same process with drafting switched off.  On a GPU vLLM 0.32 then still runs the draft
once per step, so the gain over a target that has no draft is slightly smaller than shown; between two drafts
this cancels.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from appliance.drafts.evaluation.arms import Arm, Mode, Prompt
from appliance.drafts.evaluation.equality import Agreement, compare
from appliance.drafts.evaluation.evaluation_results import (
    AcceptanceLine,
    Difference,
    Equality,
    LengthRatio,
    PromptResult,
    StepResult,
    StepTotals,
    TrafficAspect,
)
from appliance.drafts.evaluation.intervals import (
    ConfidenceInterval,
    RequestDrafts,
    acceptance_length,
    length_ratio,
    mean_ratio,
)
from appliance.speculation.values import ALL_TRAFFIC, NO_STEPS, Expectation, StepCounters

DIFFERENCES = 20
"""Maximum differences that a report lists."""
LEAST_STEPS = 8
"""Minimum steps of one kind in a round."""
NOTHING = RequestDrafts(drafts=0, accepted=0)
Kind = tuple[TrafficAspect, str]
"""Of traffic: an aspect and its value."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """All answers of the rounds that every arm finished."""

    prompts: Sequence[Prompt]
    answers: Mapping[Arm, Sequence[PromptResult]]
    draft_tokens: int

    @property
    def drafting(self) -> tuple[Arm, ...]:
        return tuple(arm for arm in self.answers if arm is not Arm.TARGET)

    @property
    def compared(self) -> int:
        """Prompts that every arm answered."""
        return len({answer.prompt for answer in self.answers[Arm.CANDIDATE]})


def gather(
    results: Iterable[StepResult], arms: Iterable[Arm], prompts: Sequence[Prompt], draft_tokens: int
) -> Evidence:
    """Collect the rounds that every arm finished; `prompts` are in the order of the rounds."""
    by_arm: dict[Arm, dict[int, StepResult]] = {arm: {} for arm in arms}
    for result in results:
        by_arm[result.arm][result.number] = result
    whole = set.intersection(*(set(rounds) for rounds in by_arm.values()))
    return Evidence(
        prompts=prompts,
        answers={
            arm: [answer for number in sorted(whole) for answer in rounds[number].answered]
            for arm, rounds in by_arm.items()
        },
        draft_tokens=draft_tokens,
    )


def lines(evidence: Evidence) -> tuple[AcceptanceLine, ...]:
    found = (_line(evidence, arm, kind) for kind in _kinds(evidence) for arm in evidence.drafting)
    return tuple(line for line in found if line is not None)


def length_ratios(evidence: Evidence) -> tuple[LengthRatio, ...]:
    """Candidate over incumbent by kind of traffic; empty without an incumbent."""
    if Arm.INCUMBENT not in evidence.answers:
        return ()
    found = []
    for aspect, value in _kinds(evidence):
        mine, other = (
            _by_prompt(_answers(evidence, arm, (aspect, value))) for arm in (Arm.CANDIDATE, Arm.INCUMBENT)
        )
        both = [place for place in sorted(mine.keys() & other.keys()) if mine[place].drafts]
        pairs = [(mine[place], other[place]) for place in both if other[place].drafts]
        ratio = length_ratio(pairs)
        if ratio is not None:
            found.append(LengthRatio(aspect=aspect, value=value, requests=len(pairs), ratio=ratio))
    return tuple(found)


def equalities(evidence: Evidence, epsilon: float) -> tuple[tuple[Equality, ...], tuple[Difference, ...]]:
    """Agreement of greedy answers with the target's own by arm, and the first differences."""
    own = {answer.prompt: answer for answer in evidence.answers[Arm.TARGET]}
    found, differences = [], []
    for arm in evidence.drafting:
        greedy = [answer for answer in evidence.answers[arm] if answer.mode is Mode.GREEDY]
        count = dict.fromkeys(Agreement, 0)
        for answer in greedy:
            mine = own[answer.prompt]
            compared = compare(mine.trail, mine.near, answer.trail, epsilon)
            count[compared.agreement] += 1
            if compared.agreement is not Agreement.SAME:
                differences.append(
                    Difference(
                        arm=arm,
                        request_id=evidence.prompts[answer.prompt].request_id,
                        agreement=compared.agreement,
                        position=compared.position or 0,
                        gap=compared.gap,
                    )
                )
        found.append(
            Equality(
                arm=arm,
                compared=len(greedy),
                same=count[Agreement.SAME],
                ties=count[Agreement.TIE],
                mismatches=count[Agreement.MISMATCH],
            )
        )
    differences.sort(key=lambda difference: difference.agreement is Agreement.TIE)
    return tuple(found), tuple(differences[:DIFFERENCES])


def expected(found: Iterable[AcceptanceLine]) -> dict[str, Expectation]:
    accepted = {}
    for line in found:
        if line.arm is Arm.CANDIDATE and line.aspect in {TrafficAspect.ALL, TrafficAspect.TEMPLATE}:
            kind = ALL_TRAFFIC if line.aspect is TrafficAspect.ALL else line.value
            accepted[kind] = Expectation(
                acceptance_length=line.acceptance_length.value, draft_tokens=len(line.per_position)
            )
    return accepted


def gain(paces: Iterable[StepTotals]) -> float | None:
    """
    Tokens per engine second with drafts over without, in one round of one worker.

    Steps are compared within their batch bucket, weighted by the bucket's time without drafts.  None if no
    bucket was measured both ways.
    """
    cells: defaultdict[tuple[int, bool], StepCounters] = defaultdict(StepCounters)
    for pace in paces:
        kind = pace.batch, pace.draft_tokens > 0
        cells[kind] = cells[kind].plus(pace.counters)
    drafting = without = 0.0
    for (batch, drafts), found in cells.items():
        plain = cells.get((batch, False), NO_STEPS)
        if drafts and _is_measured(found) and _is_measured(plain):
            seconds_per_token = plain.seconds / plain.tokens
            drafting += found.seconds
            without += found.tokens * seconds_per_token
    return without / drafting if drafting and without else None


def gains(results: Iterable[StepResult], arm: Arm) -> dict[int, float]:
    """By round, where it could be measured."""
    found = {result.number: gain(result.paces) for result in results if result.arm is arm}
    return {number: value for number, value in found.items() if value is not None}


def speed_ratio(
    candidate: Mapping[int, float], incumbent: Mapping[int, float] | None
) -> ConfidenceInterval | None:
    """Mean ratio of gains over the rounds that both have, or of the candidate's if `incumbent` is None."""
    if incumbent is None:
        return mean_ratio(list(candidate.values()))
    both = sorted(candidate.keys() & incumbent.keys())
    return mean_ratio([candidate[number] / incumbent[number] for number in both])


def step_totals(results: Iterable[StepResult], arm: Arm) -> tuple[StepTotals, ...]:
    """Sums over all rounds of an arm, by batch bucket and draft tokens."""
    cells: defaultdict[tuple[int, int], StepCounters] = defaultdict(StepCounters)
    for result in results:
        for pace in result.paces if result.arm is arm else ():
            kind = pace.batch, pace.draft_tokens
            cells[kind] = cells[kind].plus(pace.counters)
    return StepTotals.by_kind(cells)


def _kinds(evidence: Evidence) -> list[Kind]:
    seen = [_labels(evidence, answer) for answer in evidence.answers[Arm.CANDIDATE]]
    return [
        (aspect, value)
        for aspect in TrafficAspect
        for value in sorted({labels[aspect] for labels in seen}, key=_order)
    ]


def _labels(evidence: Evidence, answer: PromptResult) -> dict[TrafficAspect, str]:
    prompt = evidence.prompts[answer.prompt]
    return {
        TrafficAspect.ALL: ALL_TRAFFIC,
        TrafficAspect.MODE: str(answer.mode),
        TrafficAspect.CONTEXT: prompt.context,
        TrafficAspect.TEMPLATE: prompt.template,
    }


def _answers(evidence: Evidence, arm: Arm, kind: Kind) -> list[PromptResult]:
    aspect, value = kind
    return [answer for answer in evidence.answers[arm] if _labels(evidence, answer)[aspect] == value]


def _order(label: str) -> tuple[int, str]:
    """Ranges of lengths by their lower bound: `0-1k`, `1k-2k`, ..., `128k+`; others by name."""
    begin = label.partition("-")[0].rstrip("k+")
    return (int(begin) if begin.isdecimal() else 0, label)


def _by_prompt(answers: Iterable[PromptResult]) -> dict[int, RequestDrafts]:
    """Drafts by prompt, summed over its answers, which are correlated."""
    found: defaultdict[int, RequestDrafts] = defaultdict(lambda: NOTHING)
    for answer in answers:
        before = found[answer.prompt]
        found[answer.prompt] = RequestDrafts(
            drafts=before.drafts + answer.drafts, accepted=before.accepted + answer.accepted
        )
    return found


def _line(evidence: Evidence, arm: Arm, kind: Kind) -> AcceptanceLine | None:
    answers = _answers(evidence, arm, kind)
    requests = [request for request in _by_prompt(answers).values() if request.drafts]
    length = acceptance_length(requests, evidence.draft_tokens)
    if length is None:
        return None
    drafts = sum(request.drafts for request in requests)
    accepted_at = [
        sum(answer.accepted_at[position] for answer in answers if position < len(answer.accepted_at))
        for position in range(evidence.draft_tokens)
    ]
    return AcceptanceLine(
        aspect=kind[0],
        value=kind[1],
        arm=arm,
        requests=len(requests),
        drafts=drafts,
        draft_tokens=sum(answer.draft_tokens for answer in answers),
        accepted=sum(request.accepted for request in requests),
        acceptance_length=length,
        per_position=tuple(count / drafts for count in accepted_at),
    )


def _is_measured(cell: StepCounters) -> bool:
    return cell.steps >= LEAST_STEPS and cell.seconds > 0 and cell.tokens > 0

"""The numbers of a report from finished steps.  Pure."""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from appliance.drafts.evaluation.arms import Arm, Mode, Prompt
from appliance.drafts.evaluation.equality import Agreement, compare
from appliance.drafts.evaluation.intervals import RequestDrafts, acceptance_length, length_ratio
from appliance.drafts.evaluation.results import (
    AcceptanceLine,
    Difference,
    Equality,
    ExpectedAcceptance,
    LengthRatio,
    PromptResult,
    StepResult,
    TrafficAspect,
)
from appliance.speculation.values import ALL_TRAFFIC

DIFFERENCES = 20
"""Maximum differences that a report lists."""
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
        """The arms with a draft."""
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
    """Acceptance by arm and kind of traffic, for kinds with drafts."""
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


def expected(found: Iterable[AcceptanceLine]) -> dict[str, ExpectedAcceptance]:
    """What the candidate accepted, by template and for all traffic."""
    accepted = {}
    for line in found:
        if line.arm is Arm.CANDIDATE and line.aspect in {TrafficAspect.ALL, TrafficAspect.TEMPLATE}:
            kind = ALL_TRAFFIC if line.aspect is TrafficAspect.ALL else line.value
            accepted[kind] = ExpectedAcceptance(
                acceptance_length=line.acceptance_length.value, draft_tokens=len(line.per_position)
            )
    return accepted


def _kinds(evidence: Evidence) -> list[Kind]:
    """Every kind of traffic, all traffic first."""
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

"""Reports: canonical JSON, the HTML page, and numbers that belong together."""

import json
import re
from html.parser import HTMLParser

import pytest

from appliance.drafts.evaluation.aggregate import (
    equalities,
    expected,
    gather,
    length_ratios,
    lines,
)
from appliance.drafts.evaluation.arms import Arm, Mode
from appliance.drafts.evaluation.equality import Agreement, trail_of
from appliance.drafts.evaluation.evaluation_page import render_page
from appliance.drafts.evaluation.evaluation_results import (
    ArmSpeed,
    Evaluation,
    EvaluationVerdict,
    PromptResult,
    StepResult,
    StepTotals,
    TrafficAspect,
)
from appliance.drafts.evaluation.intervals import ConfidenceInterval
from appliance.drafts.evaluation.store import load_evaluation, save_evaluation
from appliance.drafts.training_record import parse_record
from appliance.errors import DraftNotFoundError, DraftRefusedError, DraftStorageError
from tests.unit.drafts.evaluation.evaluation_parts import DATASET, digest_of, prompt

PROMPTS = [
    prompt(0, template="chat-1", context="0-1k"),
    prompt(1, template="chat-2", context="0-1k"),
    prompt(2, template="chat-1", context="16k-32k"),
    prompt(3, template="chat-1", context="2k-4k"),
]
ARMS = tuple(Arm)


def answered(place: int, mode: Mode, accepted_at=(), drafts=10, tokens=(1, 2, 3), near=()) -> PromptResult:
    return PromptResult(
        prompt=place,
        mode=mode,
        tokens=len(tokens),
        drafts=drafts,
        draft_tokens=3 * drafts,
        accepted=sum(accepted_at),
        accepted_at=accepted_at,
        trail=trail_of(PROMPTS[place], tokens) if mode is Mode.GREEDY else (),
        near=near,
    )


def step(arm: Arm, number: int, places: tuple[int, ...], **more) -> StepResult:
    given = [answered(place, mode, **more) for place in places for mode in Mode]
    if arm is Arm.TARGET:
        given = [answered(place, Mode.GREEDY, drafts=0) for place in places]
    return StepResult(arm=arm, number=number, answered=tuple(given))


def evidence(candidate=(8, 6, 4), incumbent=(5, 3, 1), arms=ARMS):
    results = [
        step(arm, number, places, accepted_at=candidate if arm is Arm.CANDIDATE else incumbent)
        for arm in arms
        for number, places in enumerate(((0, 1), (2, 3)))
    ]
    return gather(results, arms, PROMPTS, 3)


@pytest.fixture
def report() -> Evaluation:
    found = evidence()
    equal, differences = equalities(found, 1e-3)
    written = lines(found)
    interval = ConfidenceInterval(value=1.25, low=1.2, high=1.3)
    paces = (StepTotals(batch=1, draft_tokens=3, steps=10, seconds=0.5, requests=10, tokens=24),)
    return Evaluation(
        draft=digest_of("c"),
        incumbent=digest_of("b"),
        target=digest_of("a"),
        dataset=DATASET,
        verdict=EvaluationVerdict.REFUSED,
        reasons=("it is <slow>",),
        made="2026-11-22T10:00:00Z",
        engine="vllm 0.32.0",
        device="cpu",
        dtype="float32",
        draft_tokens=3,
        max_tokens=128,
        margin=0.02,
        epsilon=1e-3,
        prompts=4,
        compared=found.compared,
        missing=1,
        withheld=0,
        unusable=2,
        together=True,
        complete=True,
        lines=written,
        comparisons=length_ratios(found),
        speeds=(ArmSpeed(arm=Arm.CANDIDATE, gain=interval, paces=paces),),
        speed_ratio=interval,
        equalities=equal,
        differences=differences,
        expected=expected(written),
    )


def test_report_is_read_back_with_the_same_bytes_and_digest(report, tmp_path):
    path = save_evaluation(tmp_path, report, "<page>")
    assert path == tmp_path / "evaluations" / ("c" * 64) / "report.json"
    found = load_evaluation(tmp_path, report.draft)
    assert found == report
    assert (found.encode(), found.digest) == (report.encode(), report.digest)
    assert path.read_bytes() == report.encode()
    assert path.with_name("report.html").read_text() == "<page>"
    assert path.stat().st_mode & 0o077 == 0


def test_draft_without_evaluation_has_no_report(tmp_path):
    """A name that is not a digest is an error."""
    assert load_evaluation(tmp_path, digest_of("c")) is None
    with pytest.raises(DraftNotFoundError, match="is no digest"):
        load_evaluation(tmp_path, "../../etc")


@pytest.mark.parametrize(
    "alter",
    [
        lambda text: text.replace('"verdict":"refused"', '"verdict":"passed"').replace('"format":1,', ""),
        lambda text: text.replace('"verdict":"refused"', '"verdict": "passed"'),
        lambda text: text.replace('"verdict":"refused"', '"verdict":"splendid"'),
        lambda text: text[:-20],
        lambda text: text.replace('"margin":0.02', '"margin":0.020'),
        lambda text: text.replace('"prompts":4', '"prompts":"4"'),
        lambda text: text[:-1] + ',"more":1}',
        lambda text: text.replace("c" * 64, "e" * 64),
        lambda text: "",
    ],
)
def test_an_altered_report_is_refused(report, tmp_path, alter):
    """The audit log has the digest against deliberate changes."""
    path = save_evaluation(tmp_path, report, "")
    path.write_text(alter(path.read_text()))
    with pytest.raises(DraftRefusedError, match="evaluate"):
        load_evaluation(tmp_path, report.draft)


def test_storage_failure_raises_draft_storage_error(report, tmp_path):
    (tmp_path / "evaluations").write_text("a file in the way")
    for act in (
        lambda: load_evaluation(tmp_path, report.draft),
        lambda: save_evaluation(tmp_path, report, ""),
    ):
        with pytest.raises(DraftStorageError, match="evaluations"):
            act()


def test_acceptance_is_broken_down_by_mode_context_and_template():
    """Contexts are sorted by length; requests are counted once."""
    found = [line for line in lines(evidence()) if line.arm is Arm.CANDIDATE]
    assert [(line.aspect, line.value, line.requests, line.drafts) for line in found] == [
        (TrafficAspect.ALL, "all", 4, 80),
        (TrafficAspect.MODE, "greedy", 4, 40),
        (TrafficAspect.MODE, "sampled", 4, 40),
        (TrafficAspect.CONTEXT, "0-1k", 2, 40),
        (TrafficAspect.CONTEXT, "2k-4k", 1, 20),
        (TrafficAspect.CONTEXT, "16k-32k", 1, 20),
        (TrafficAspect.TEMPLATE, "chat-1", 3, 60),
        (TrafficAspect.TEMPLATE, "chat-2", 1, 20),
    ]
    assert found[0].acceptance_length.value == pytest.approx(2.8)
    assert found[0].per_position == (0.8, 0.6, 0.4)
    assert found[0].draft_tokens == 240


def test_length_ratio_uses_prompts_that_both_arms_answered():
    """A kind with one prompt has no ratio."""
    found = {(each.aspect, each.value): each for each in length_ratios(evidence())}
    assert found[TrafficAspect.ALL, "all"].ratio.value == pytest.approx(2.8 / 1.9)
    assert found[TrafficAspect.ALL, "all"].requests == 4
    assert (TrafficAspect.CONTEXT, "2k-4k") not in found
    assert length_ratios(evidence(arms=(Arm.TARGET, Arm.CANDIDATE))) == ()


def test_rounds_not_finished_by_every_arm_are_excluded():
    """As after a time limit."""
    results = [step(arm, 0, (0, 1), accepted_at=(5, 3, 1)) for arm in ARMS]
    results.append(step(Arm.CANDIDATE, 1, (2, 3), accepted_at=(8, 6, 4)))
    found = gather(results, ARMS, PROMPTS, 3)
    assert found.compared == 2
    assert {line.acceptance_length.value for line in lines(found)} == {1.9}
    nothing = gather([], ARMS, PROMPTS, 3)
    assert (nothing.compared, lines(nothing), length_ratios(nothing)) == (0, (), ())


def test_differences_are_counted_by_arm_and_listed_mismatches_first():
    near = ((1, trail_of(PROMPTS[0], (1, 9))[1], 0.0004),)
    own = StepResult(
        arm=Arm.TARGET,
        number=0,
        answered=tuple(
            answered(place, Mode.GREEDY, drafts=0, near=near if place == 0 else ()) for place in range(3)
        ),
    )
    others = {
        Arm.INCUMBENT: [(1, 2, 3), (1, 2, 3), (1, 2, 3)],
        Arm.CANDIDATE: [(1, 9, 3), (1, 2, 3), (1, 2, 4)],
    }
    results = [
        own,
        *(
            StepResult(
                arm=arm,
                number=0,
                answered=tuple(
                    answered(place, Mode.GREEDY, tokens=tokens) for place, tokens in enumerate(answers)
                ),
            )
            for arm, answers in others.items()
        ),
    ]
    found, differences = equalities(gather(results, ARMS, PROMPTS, 3), 1e-3)
    assert [(each.arm, each.same, each.ties, each.mismatches) for each in found] == [
        (Arm.INCUMBENT, 3, 0, 0),
        (Arm.CANDIDATE, 1, 1, 1),
    ]
    assert [(each.request_id, each.agreement, each.position, each.gap) for each in differences] == [
        ("r2", Agreement.MISMATCH, 2, None),
        ("r0", Agreement.TIE, 1, 0.0004),
    ]


def test_expected_acceptance_has_the_form_of_a_training_record(report):
    written = json.loads(report.encode())["expected"]
    record, wrong = parse_record({"expected": written})
    assert wrong == ()
    assert dict(record.expected) == report.expected
    assert sorted(written) == ["all", "chat-1", "chat-2"]
    assert written["all"] == {"acceptance_length": pytest.approx(2.8), "draft_tokens": 3}


def test_headline_numbers_cover_all_traffic(report):
    """They are shown in one line and written to the audit log."""
    assert report.acceptance_length(Arm.CANDIDATE).value == pytest.approx(2.8)
    assert report.acceptance_length(Arm.TARGET) is None
    assert report.acceptance_ratio.value == pytest.approx(2.8 / 1.9)
    assert report.mismatches == 0


class Page(HTMLParser):
    """Checks that tags are closed in order, and collects references and text."""

    VOID = ("meta", "rect", "line", "br")

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.references: list[str] = []
        self.text = ""

    def handle_starttag(self, tag, attrs):
        self.references += [value for name, value in attrs if name in {"href", "src", "xlink:href"}]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        pass

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data


def test_page_is_self_contained_and_shows_every_number(report):
    """Well-formed, without script or reference, text escaped."""
    html = render_page(report)
    page = Page()
    page.feed(html)
    assert page.open == []
    assert page.references == []
    assert "script" not in html
    assert "it is <slow>" in page.text
    assert "<slow>" not in html
    for piece in ("2.80", "1.25", "chat-2", "16k-32k", report.digest, "Position 3", "48.0"):
        assert piece in page.text, piece
    boxes = [float(number) for number in re.findall(r'(?:x1|x2|width)="([\d.]+)"', html)]
    assert boxes
    assert all(0 <= box <= 900 for box in boxes)


def test_report_without_measurements_has_a_page(report):
    empty = ("lines", "comparisons", "speeds", "speed_ratio", "equalities", "differences", "expected")
    kept = report.model_dump(exclude={*empty, "incumbent"})
    page = Page()
    page.feed(render_page(Evaluation(**kept)))
    assert page.open == []
    assert "Nothing was measured" in page.text
    assert "the target alone" in page.text

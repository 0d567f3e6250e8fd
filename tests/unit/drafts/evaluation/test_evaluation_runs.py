"""Order, resume, end, verdict."""

import asyncio
import contextlib
import json
from dataclasses import replace
from pathlib import Path

import pytest

from appliance.drafts.evaluation import evaluating, runner
from appliance.drafts.evaluation.arms import Arm
from appliance.drafts.evaluation.evaluating import evaluate, forget_work
from appliance.drafts.evaluation.report import Evaluation, EvaluationVerdict
from appliance.drafts.evaluation.runner import EvaluationOptions
from appliance.drafts.evaluation.worker import run_worker
from appliance.errors import DraftRefusedError, WorkerFailedError, WorkerStartError
from tests.unit.drafts.evaluation.evaluation_parts import (
    COMPARISON,
    NEW,
    OLD,
    STARTER,
    TARGET,
    Programs,
    data,
    digest_of,
    in_thread,
    site,
)

PROMPTS = 16
DRAFTS = {OLD.digest: {"rate": 0.4}, NEW.digest: {"rate": 0.75}}
OPTIONS = EvaluationOptions(max_tokens=24, draft_tokens=3)


@pytest.fixture
def programs(monkeypatch):
    """Choose what is started in place of vLLM."""

    def choose(holds: bool = True, processes: bool = False, **scripts) -> Programs:
        named = {"target": TARGET.digest, "old": OLD.digest, "new": NEW.digest}
        merged = {digest: {**script} for digest, script in DRAFTS.items()}
        for name, script in scripts.items():
            merged[named[name]] = {**merged.get(named[name], {}), **script}
        made = Programs(merged, holds)
        monkeypatch.setattr(evaluating, "WorkerTemplate", made)
        monkeypatch.setattr(runner, "run_worker", run_worker if processes else in_thread)
        return made

    return choose


def running_programs() -> list[int]:
    """Processes that these tests started and that live."""
    mark, found = "=".join(STARTER).encode(), []
    for entry in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            if mark in entry.read_bytes().split(b"\0"):
                found.append(int(entry.parent.name))
    return found


async def run(directory: Path, comparison=COMPARISON, prompts: int = PROMPTS, **more) -> Evaluation:
    options = more.pop("options", OPTIONS)
    return await evaluate(comparison, data(prompts), options, site(directory, **more))


async def test_a_better_draft_passes_with_its_numbers(programs, tmp_path):
    """Acceptance, speed and equality, all from what the workers said; no process is left."""
    programs(processes=True)
    found = await run(tmp_path)
    assert (found.verdict, found.reasons) == (EvaluationVerdict.PASSED, ())
    assert (found.prompts, found.compared, found.complete, found.together) == (PROMPTS, PROMPTS, True, True)
    # 1 + r + r^2 + r^3 for a chain whose every token is accepted with chance r.
    assert found.acceptance_length(Arm.CANDIDATE).value == pytest.approx(2.73, abs=0.2)
    assert found.acceptance_length(Arm.INCUMBENT).value == pytest.approx(1.62, abs=0.15)
    assert found.acceptance_ratio.low > 1.4
    assert found.speed_ratio.low > 1.2
    candidate = next(each for each in found.speeds if each.arm is Arm.CANDIDATE)
    # A step without drafts takes three quarters of one with.
    length = found.acceptance_length(Arm.CANDIDATE).value
    assert candidate.gain.value == pytest.approx(length * 0.75, rel=0.1)
    assert [(each.arm, each.same, each.mismatches) for each in found.equalities] == [
        (Arm.INCUMBENT, PROMPTS, 0),
        (Arm.CANDIDATE, PROMPTS, 0),
    ]
    assert running_programs() == []


async def test_a_draft_that_accepts_less_is_refused(programs, tmp_path):
    """And slower, which is another reason."""
    programs(new={"rate": 0.3})
    found = await run(tmp_path)
    assert found.verdict is EvaluationVerdict.REFUSED
    assert [reason.partition(" is ")[0] for reason in found.reasons] == ["its acceptance length", "its speed"]


async def test_a_draft_that_accepts_more_and_is_slower_is_refused(programs, tmp_path):
    """A larger head has to earn its time."""
    programs(new={"seconds": 0.005})
    found = await run(tmp_path)
    assert [reason.partition(" is ")[0] for reason in found.reasons] == ["its speed"]
    assert found.acceptance_ratio.low > 1


async def test_an_arm_that_answers_differently_is_refused(programs, tmp_path):
    """The target was not near that token; every answer counts."""
    programs(new={"parts": True})
    found = await run(tmp_path)
    assert found.verdict is EvaluationVerdict.REFUSED
    assert found.mismatches == PROMPTS
    assert found.reasons[0].startswith(f"{PROMPTS} of {PROMPTS} of its greedy answers differ")
    assert {each.position for each in found.differences} == {3}


async def test_an_arm_that_parts_at_ties_passes(programs, tmp_path):
    """Where the target itself had both tokens within rounding."""
    programs(target={"gap": 0.0005}, new={"parts": True})
    found = await run(tmp_path)
    assert (found.verdict, found.mismatches) == (EvaluationVerdict.PASSED, 0)
    assert found.equalities[1].ties == PROMPTS


async def test_without_a_draft_in_service_speed_over_the_target_alone_decides(programs, tmp_path):
    """A draft that does not pay is refused, whatever it accepts."""
    comparison = replace(COMPARISON, incumbent=None)
    programs()
    found = await run(tmp_path / "one", comparison)
    assert (found.verdict, found.incumbent, found.comparisons) == (EvaluationVerdict.PASSED, None, ())
    assert found.speed_ratio.low > 1.5
    programs(new={"rate": 0.1})
    found = await run(tmp_path / "two", comparison)
    assert [reason.partition(" is ")[0] for reason in found.reasons] == ["its speed"]


async def test_workers_that_do_not_fit_together_run_in_turn(programs, tmp_path):
    """Three starts for two drafts, the candidate in the middle."""
    started = programs(holds=False)
    found = await run(tmp_path)
    assert started.started == [TARGET.digest, OLD.digest, NEW.digest, OLD.digest]
    assert (found.verdict, found.together, found.compared) == (EvaluationVerdict.PASSED, False, PROMPTS)


async def test_a_killed_evaluation_goes_on_where_it_was(programs, tmp_path):
    """Finished rounds are not asked again, and the report is the one it would have been."""
    programs()
    whole = await run(tmp_path / "whole")
    # The candidate's worker dies while it answers in its fourth round or so.
    programs(processes=True, new={"dies_at": 30})
    with pytest.raises(WorkerFailedError):
        await run(tmp_path / "broken")
    assert running_programs() == []
    said: list[str] = []
    again = programs()
    found = await run(tmp_path / "broken", say=said.append)
    (kept,) = [line for line in said if "were finished before" in line]
    finished, of = (int(word) for word in kept.split() if word.isdecimal())
    assert 12 <= finished < of == 24
    assert TARGET.digest not in again.started, "the target's answers were all there"
    assert found == whole


async def test_an_evaluation_of_something_else_starts_from_nothing(programs, tmp_path):
    """Longer answers are other answers."""
    programs(processes=True, new={"dies_at": 30})
    with pytest.raises(WorkerFailedError):
        await run(tmp_path)
    again = programs()
    await run(tmp_path, options=EvaluationOptions(max_tokens=20, draft_tokens=3))
    assert TARGET.digest in again.started


async def test_a_time_limit_ends_it_and_what_is_missing_is_a_refusal(programs, tmp_path):
    """Nothing is guessed; the same command with more time goes on."""
    programs()
    # Each step takes a second by the clock given here, and reading the clock another.
    found = await run(tmp_path, options=EvaluationOptions(max_tokens=24, draft_tokens=3, seconds_limit=40))
    assert (found.verdict, found.complete) == (EvaluationVerdict.REFUSED, False)
    assert found.reasons == (
        "the time was over before every round was measured: the same command goes on from there",
    )
    again = programs()
    found = await run(tmp_path)
    assert (found.verdict, found.complete) == (EvaluationVerdict.PASSED, True)
    assert TARGET.digest not in again.started


async def test_it_says_how_far_it_is_and_how_long_it_will_take(programs, tmp_path):
    """Each round of each arm is one line, with the time that is left."""
    programs()
    said: list[str] = []
    await run(tmp_path, say=said.append)
    rounds = [line for line in said if " took " in line]
    assert len(rounds) == 24
    assert all("s left" in line or "min left" in line for line in rounds[:-1])
    assert rounds[0].startswith("target: round 1 of 8 took 1 s; about 23 s left")


@pytest.mark.parametrize("arm", ["target", "new"])
async def test_cancelled_at_any_moment_it_leaves_no_process(programs, tmp_path, arm):
    """As Ctrl-C does it: in the middle of an answer."""
    mark = tmp_path / "asked"
    programs(processes=True, **{arm: {"holds": str(mark)}})
    task = asyncio.create_task(run(tmp_path / "data"))
    async with asyncio.timeout(60):
        while not mark.exists():  # noqa: ASYNC110 - another process makes it
            await asyncio.sleep(0.02)
    assert running_programs()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert running_programs() == []
    assert not list((tmp_path / "data").rglob("control.token"))


async def test_a_worker_that_does_not_start_is_named_with_its_log(programs, tmp_path, monkeypatch):
    """The reason in one line, and where to read on; nothing runs afterwards."""
    started = programs(processes=True)
    plan = started.plan

    def broken(served):
        made = plan(served)
        return replace(made, argv=(made.argv[0], "-c", "raise ValueError('the draft is not to my taste')"))

    monkeypatch.setattr(started, "plan", broken, raising=False)
    with pytest.raises(WorkerStartError, match=r"not to my taste.*worker-target\.log"):
        await run(tmp_path)
    assert running_programs() == []


async def test_a_candidate_with_objections_is_refused_without_starting_anything(programs, tmp_path):
    """What lint says is enough."""
    started = programs()
    comparison = replace(COMPARISON, objections=("training-x: no",))
    found = await run(tmp_path, comparison)
    assert (found.verdict, found.reasons) == (EvaluationVerdict.REFUSED, ("training-x: no",))
    assert (started.started, found.lines) == ([], ())


async def test_without_a_single_prompt_there_is_nothing_to_evaluate(programs, tmp_path):
    """That is an error about the data set, not a verdict about the draft."""
    programs()
    with pytest.raises(DraftRefusedError, match="no held-out prompt"):
        await run(tmp_path, prompts=0)


async def test_few_prompts_are_too_few(programs, tmp_path):
    """However much better it looks."""
    programs()
    found = await run(tmp_path, prompts=6)
    assert found.verdict is EvaluationVerdict.REFUSED
    (reason,) = found.reasons
    assert reason.startswith("too few prompts for a decision: 6 were answered by every arm, and 8 are needed")


async def test_only_logs_are_left_when_the_work_is_forgotten(programs, tmp_path):
    """And neither logs nor anything else hold what was asked or said."""
    programs(processes=True)
    await run(tmp_path)
    forget_work(tmp_path, NEW.digest)
    place = tmp_path / "evaluations" / NEW.digest.removeprefix("sha256:")
    left = sorted(str(path.relative_to(place)) for path in place.rglob("*") if path.is_file())
    assert [name for name in left if not name.startswith("logs/")] == [".lock"]
    asked = data(PROMPTS).chosen.prompts[0].token_ids
    text = "".join(path.read_text() for path in place.rglob("*") if path.is_file())
    assert json.dumps(list(asked)) not in text


def test_digests_in_these_tests_are_told_apart():
    """The programs are chosen by them."""
    assert len({TARGET.digest, OLD.digest, NEW.digest, digest_of("d")}) == 4

"""Evaluations on small programs: order, resume, cancellation, verdict."""

import asyncio
import contextlib
import json
from dataclasses import replace
from pathlib import Path

import pytest

from appliance.drafts.evaluation import runner
from appliance.drafts.evaluation.arms import Arm
from appliance.drafts.evaluation.evaluating import evaluate, forget_work
from appliance.drafts.evaluation.evaluation_results import Evaluation, EvaluationVerdict
from appliance.drafts.evaluation.evaluation_worker import run_worker
from appliance.drafts.evaluation.runner import EvaluationOptions
from appliance.errors import DraftRefusedError, WorkerFailedError, WorkerStartError
from tests.unit.drafts.evaluation import evaluation_parts
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
    """Choose the programs that run instead of vLLM."""

    def choose(holds: bool = True, processes: bool = False, **scripts) -> Programs:
        named = {"target": TARGET.digest, "old": OLD.digest, "new": NEW.digest}
        merged = {digest: {**script} for digest, script in DRAFTS.items()}
        for name, script in scripts.items():
            merged[named[name]] = {**merged.get(named[name], {}), **script}
        made = Programs(merged, holds)
        monkeypatch.setattr(evaluation_parts, "TEMPLATE", made)
        monkeypatch.setattr(runner, "run_worker", run_worker if processes else in_thread)
        return made

    return choose


def running_programs() -> list[int]:
    """Live processes that these tests started."""
    mark, found = "=".join(STARTER).encode(), []
    for entry in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            if mark in entry.read_bytes().split(b"\0"):
                found.append(int(entry.parent.name))
    return found


async def run(directory: Path, comparison=COMPARISON, prompts: int = PROMPTS, **more) -> Evaluation:
    options = more.pop("options", OPTIONS)
    return await evaluate(comparison, data(prompts), options, site(directory, **more))


async def test_better_draft_passes_with_its_numbers(programs, tmp_path):
    """Acceptance, speed and equality as the workers report them; no process is left."""
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


async def test_draft_with_lower_acceptance_is_refused(programs, tmp_path):
    """It is slower as well, which is another reason."""
    programs(new={"rate": 0.3})
    found = await run(tmp_path)
    assert found.verdict is EvaluationVerdict.REFUSED
    assert [reason.partition(" is ")[0] for reason in found.reasons] == ["its acceptance length", "its speed"]


async def test_slower_draft_with_higher_acceptance_is_refused(programs, tmp_path):
    programs(new={"seconds": 0.005})
    found = await run(tmp_path)
    assert [reason.partition(" is ")[0] for reason in found.reasons] == ["its speed"]
    assert found.acceptance_ratio.low > 1


async def test_different_greedy_answers_are_refused(programs, tmp_path):
    """The target was not near that token; every answer counts."""
    programs(new={"parts": True})
    found = await run(tmp_path)
    assert found.verdict is EvaluationVerdict.REFUSED
    assert found.mismatches == PROMPTS
    assert found.reasons[0].startswith(f"{PROMPTS} of {PROMPTS} of its greedy answers differ")
    assert {each.position for each in found.differences} == {3}


async def test_answers_that_differ_at_ties_pass(programs, tmp_path):
    """The target had both tokens within rounding."""
    programs(target={"gap": 0.0005}, new={"parts": True})
    found = await run(tmp_path)
    assert (found.verdict, found.mismatches) == (EvaluationVerdict.PASSED, 0)
    assert found.equalities[1].ties == PROMPTS


async def test_without_incumbent_speed_over_the_target_decides(programs, tmp_path):
    comparison = replace(COMPARISON, incumbent=None)
    programs()
    found = await run(tmp_path / "one", comparison)
    assert (found.verdict, found.incumbent, found.comparisons) == (EvaluationVerdict.PASSED, None, ())
    assert found.speed_ratio.low > 1.5
    programs(new={"rate": 0.1})
    found = await run(tmp_path / "two", comparison)
    assert [reason.partition(" is ")[0] for reason in found.reasons] == ["its speed"]


async def test_workers_that_do_not_fit_together_run_in_three_turns(programs, tmp_path):
    started = programs(holds=False)
    found = await run(tmp_path)
    assert started.started == [TARGET.digest, OLD.digest, NEW.digest, OLD.digest]
    assert (found.verdict, found.together, found.compared) == (EvaluationVerdict.PASSED, False, PROMPTS)


async def test_killed_evaluation_resumes_with_the_same_report(programs, tmp_path):
    """Finished rounds are not measured again."""
    programs()
    whole = await run(tmp_path / "whole")
    # The candidate's worker dies while it answers in its fourth round or so.
    programs(processes=True, new={"dies_at": 30})
    with pytest.raises(WorkerFailedError):
        await run(tmp_path / "broken")
    assert running_programs() == []
    printed: list[str] = []
    again = programs()
    found = await run(tmp_path / "broken", say=printed.append)
    (kept,) = [line for line in printed if "were finished before" in line]
    finished, of = (int(word) for word in kept.split() if word.isdecimal())
    assert 12 <= finished < of == 24
    assert TARGET.digest not in again.started, "the target's answers were all there"
    assert found == whole


async def test_evaluation_with_other_options_starts_from_scratch(programs, tmp_path):
    programs(processes=True, new={"dies_at": 30})
    with pytest.raises(WorkerFailedError):
        await run(tmp_path)
    again = programs()
    await run(tmp_path, options=EvaluationOptions(max_tokens=20, draft_tokens=3))
    assert TARGET.digest in again.started


async def test_time_limit_refuses_an_incomplete_evaluation_which_can_resume(programs, tmp_path):
    programs()
    # Each step takes a second by the clock given here, and reading the clock another.
    found = await run(tmp_path, options=EvaluationOptions(max_tokens=24, draft_tokens=3, seconds_limit=40))
    assert (found.verdict, found.complete) == (EvaluationVerdict.REFUSED, False)
    assert found.reasons == (
        "the time was over before every round was measured: run the same command to continue",
    )
    again = programs()
    found = await run(tmp_path)
    assert (found.verdict, found.complete) == (EvaluationVerdict.PASSED, True)
    assert TARGET.digest not in again.started


async def test_progress_shows_each_round_and_the_time_left(programs, tmp_path):
    programs()
    printed: list[str] = []
    await run(tmp_path, say=printed.append)
    rounds = [line for line in printed if " took " in line]
    assert len(rounds) == 24
    assert all("s left" in line or "min left" in line for line in rounds[:-1])
    assert rounds[0].startswith("target: round 1 of 8 took 1 s; about 23 s left")


@pytest.mark.parametrize("arm", ["target", "new"])
async def test_cancellation_leaves_no_process(programs, tmp_path, arm):
    """As by Ctrl-C, in the middle of an answer."""
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


async def test_worker_start_failure_names_the_reason_and_the_log(programs, tmp_path, monkeypatch):
    started = programs(processes=True)
    plan = started.plan

    def broken(served, token_file):
        made = plan(served, token_file)
        return replace(made, argv=(made.argv[0], "-c", "raise ValueError('the draft is not to my taste')"))

    monkeypatch.setattr(started, "plan", broken, raising=False)
    with pytest.raises(WorkerStartError, match=r"not to my taste.*worker-target\.log"):
        await run(tmp_path)
    assert running_programs() == []


async def test_candidate_with_objections_is_refused_without_a_worker(programs, tmp_path):
    started = programs()
    comparison = replace(COMPARISON, objections=("training-x: no",))
    found = await run(tmp_path, comparison)
    assert (found.verdict, found.reasons) == (EvaluationVerdict.REFUSED, ("training-x: no",))
    assert (started.started, found.lines) == ([], ())


async def test_data_set_without_usable_prompts_is_an_error(programs, tmp_path):
    """Not a verdict about the draft."""
    programs()
    with pytest.raises(DraftRefusedError, match="no held-out prompt"):
        await run(tmp_path, prompts=0)


async def test_too_few_prompts_are_refused(programs, tmp_path):
    programs()
    found = await run(tmp_path, prompts=6)
    assert found.verdict is EvaluationVerdict.REFUSED
    (reason,) = found.reasons
    assert reason.startswith("too few prompts for a decision: 6 were answered by every arm, and 8 are needed")


async def test_forget_work_leaves_only_logs_without_content(programs, tmp_path):
    programs(processes=True)
    await run(tmp_path)
    forget_work(tmp_path, NEW.digest)
    place = tmp_path / "evaluations" / NEW.digest.removeprefix("sha256:")
    left = sorted(str(path.relative_to(place)) for path in place.rglob("*") if path.is_file())
    assert [name for name in left if not name.startswith("logs/")] == [".lock"]
    asked = data(PROMPTS).chosen.prompts[0].token_ids
    text = "".join(path.read_text() for path in place.rglob("*") if path.is_file())
    assert json.dumps(list(asked)) not in text


def test_digests_of_the_test_weights_differ():
    """The programs are chosen by them."""
    assert len({TARGET.digest, OLD.digest, NEW.digest, digest_of("d")}) == 4

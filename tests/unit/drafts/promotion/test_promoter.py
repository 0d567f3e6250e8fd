"""A draft comes into service one worker at a time, or leaves no trace of itself."""

import asyncio

import pytest

from appliance.drafts.evaluation.report import Verdict
from appliance.drafts.promotion import passage, store
from appliance.drafts.promotion.promotion import Stage
from appliance.drafts.registry.standing import Standing
from appliance.errors import (
    AuditUnavailableError,
    ControlRefusedError,
    DraftNotFoundError,
    DraftRefusedError,
)
from appliance.serving.restart_request import Candidate
from appliance.serving.worker import Worker
from appliance.speculation.values import Reason
from tests.unit.drafts.promotion.town import OWN, A, B, C, Town
from tests.unit.drafts.registry.site import Site, rewrite


@pytest.fixture
async def town(tmp_path, monkeypatch):
    """Three workers, a registry with one draft that was evaluated, and a gateway that steers."""
    site = Site.open(tmp_path / "site")
    site.add(site.draft("new"))
    made = Town(site=site)

    def fateful(write):
        """A crash may come before it or after it."""

        def step(*arguments):
            made.durable_step()
            write(*arguments)
            made.durable_step()

        return step

    monkeypatch.setattr(store, "write_private", fateful(store.write_private))
    monkeypatch.setattr(passage, "write_standing", fateful(passage.write_standing))
    made.evaluated(new(made))
    await made.gateway.run()
    yield made
    await made.gateway.close()


def new(town: Town) -> str:
    return town.site.registry.revisions()[-1].digest


async def promote(town: Town, draft: str | None = None, **how):
    """Begin, and wait until it is over."""
    given = {"actor": "k1", "without_evaluation": None, "allow_downtime": False, **how}
    await town.gateway.promoter.promote(draft or new(town), **given)
    return await town.gateway.until_over()


async def roll_back(town: Town, **how):
    given = {"to": None, "reason": "slow", "actor": "k2", "model": None, "allow_downtime": False, **how}
    await town.gateway.promoter.roll_back(**given)
    return await town.gateway.until_over()


def steps(town: Town) -> list[str]:
    """What the log says of promotions, in order."""
    return [f"{entry['type']} {entry.get('step', '')}".strip() for entry in town.entries]


def is_clean(town: Town) -> bool:
    """Whether the draft of the settings serves everywhere, and nothing is left of any other."""
    return set(town.drafts()) == {OWN} and town.standing == Standing(target=town.target)


async def test_a_good_draft_comes_into_service_one_worker_at_a_time(town):
    """On one first, beside the others for as long as it takes; then the log, then the standing say so."""
    done = await promote(town)
    assert (done.stage, done.reason) == (Stage.PROMOTED, None)
    assert town.drafts() == [new(town)] * 3
    assert town.standing == Standing(target=town.target, draft=new(town), previous=(None,))
    tried = ["draft.tried begun", "draft.tried canary", "draft.tried trial"]
    assert steps(town) == [*tried, *["draft.tried rollout"] * 2, "draft.promoted"]
    assert town.fewest == 2
    promoted = town.entries[-1]
    assert (promoted["draft"], promoted["previous_draft"]) == (new(town), OWN)
    assert promoted["evaluation"] == town.evaluated(new(town)).digest.removeprefix("sha256:")
    numbers = town.entries[2]
    assert numbers["drafts"] >= 256
    assert 0.85 < float(numbers["speed_ratio"]) < 1.15
    assert all(
        wish.candidate == Candidate(draft=new(town), promotion=done.promotion_id) for _, wish in town.wishes
    )
    assert [step.stage for step in done.timeline] == [
        *("begun", "canary", "trial", "rollout", "rollout", "rollout", "promoted")
    ]


def counted(town: Town) -> dict[str, float]:
    """How often each stage was entered, as the metrics of this gateway say."""
    value = town.gateway.metrics.registry.get_sample_value
    stages = {stage: value("appliance_draft_promotion_steps_total", {"stage": stage}) for stage in Stage}
    assert None not in stages.values()
    return {stage: count for stage, count in stages.items() if count}


async def test_the_metrics_say_how_far_it_is(town):
    """Each stage once it is entered, and while it runs that it does."""
    running = "appliance_draft_promotion_running"
    value = town.gateway.metrics.registry.get_sample_value
    assert (counted(town), value(running)) == ({}, 0)
    task = asyncio.ensure_future(promote(town))
    await town.gateway.until(lambda: "draft.tried canary" in steps(town))
    assert value(running) == 1
    await task
    assert counted(town) == {"begun": 1, "canary": 1, "trial": 1, "rollout": 3, "promoted": 1}
    await roll_back(town)
    assert counted(town)["rolled_back"] == 1
    assert value(running) == 0


async def test_whatever_starts_anew_afterwards_starts_with_it(town):
    """The wish it was first started by names a promotion that is over."""
    await promote(town)
    town.die(A)
    await town.gateway.until(lambda: not town.engines[A].is_dead and town.now > town.engines[A].up_at)
    assert town.drafts() == [new(town)] * 3


async def test_a_worse_draft_is_refused_and_given_back(town):
    """One worker has tried it; the numbers are in the log, and nothing else is left."""
    town.rates[new(town)] = 0.4
    done = await promote(town)
    assert done.stage is Stage.REFUSED
    assert "is the least allowed" in done.reason
    assert is_clean(town)
    assert len({worker for worker, _ in town.wishes}) == 1
    assert steps(town)[-2:] == ["draft.tried refused", "draft.rolled_back"]
    refused, back = town.entries[-2:]
    assert (refused["reason"], back["reason"]) == (done.reason, done.reason)
    assert float(refused["acceptance_length"]) < float(refused["previous_acceptance_length"])
    assert (back["draft"], back["previous_draft"]) == (OWN, new(town))


async def test_a_draft_with_which_the_worker_does_not_answer_is_given_back(town):
    """No request of anybody's has come near it."""
    town.mute.add(new(town))
    done = await promote(town)
    assert (done.stage, is_clean(town)) == (Stage.FAILED, True)
    assert "did not come back with it (without_draft)" in done.reason


@pytest.mark.parametrize("comes_back", [True, False])
async def test_a_first_worker_that_dies_in_the_trial_ends_it(town, comes_back):
    """Whether it comes back with the draft, as it was told to, or not at all for now."""
    task = asyncio.ensure_future(promote(town))
    await town.gateway.until(lambda: "draft.tried canary" in steps(town))
    canary = town.wishes[0][0]
    if comes_back:
        town.die(canary)
    else:
        town.engines[canary].is_dead = True
        town.at[town.now + 40.0] = lambda: town.start(canary)
    done = await task
    assert done.stage is Stage.FAILED
    assert "which tries it" in done.reason
    assert is_clean(town)


async def test_a_collapse_on_the_first_worker_alone_ends_it_at_once(town):
    """The monitor has seen enough; where drafts collapse everywhere it is the traffic's fault."""
    task = asyncio.ensure_future(promote(town))
    await town.gateway.until(lambda: "draft.tried canary" in steps(town))
    canary = town.wishes[0][0]
    for engine in town.engines.values():
        engine.verdict = Reason.COLLAPSED
    began = town.now
    await town.gateway.until(lambda: town.now > began + 30)
    assert not task.done()
    for name, engine in town.engines.items():
        engine.verdict = Reason.COLLAPSED if name == canary else None
    done = await task
    assert (done.stage, done.reason) == (Stage.REFUSED, f"its drafts collapsed on worker {canary}")
    for engine in town.engines.values():
        engine.verdict = None
    assert is_clean(town)


async def test_without_drafts_the_trial_waits_and_says_why_it_ended(town):
    """The monitor has stopped drafting: there is nothing to compare."""
    for engine in town.engines.values():
        engine.serves = 0
    task = asyncio.ensure_future(promote(town))
    await town.gateway.until(lambda: "draft.tried canary" in steps(town))
    for name, engine in town.engines.items():
        engine.serves = 0
        engine.verdict = Reason.BELOW_BREAK_EVEN if name == B else None
    done = await task
    assert done.stage is Stage.REFUSED
    assert done.reason.startswith("undecided after 600 s: the new draft made 0 drafts")
    assert "the monitor has stopped drafting on b (below_break_even)" in done.reason
    assert is_clean(town)


@pytest.mark.parametrize(
    ("evaluation", "why"),
    [
        (None, "was never evaluated"),
        ({"verdict": Verdict.REFUSED, "reasons": ("slow",)}, "refused it: slow"),
        ({"complete": False}, "it is not complete"),
        ({"incumbent": f"sha256:{'7' * 64}"}, "was compared with 777777777777"),
        ({"incumbent": None}, "was compared with of the settings"),
        ({"target": f"sha256:{'7' * 64}"}, "with another target"),
    ],
)
async def test_only_what_was_evaluated_against_this_draft_is_tried(town, evaluation, why):
    """Nothing is begun; a reason in words takes its place, and stands in the log."""
    site = town.site
    second = site.add(site.draft("second")).digest
    if evaluation is not None:
        town.evaluated(second, **evaluation)
    with pytest.raises(DraftRefusedError, match=why):
        await promote(town, second)
    assert (town.entries, town.wishes) == ([], [])
    done = await promote(town, second, without_evaluation="a patient waits")
    assert done.stage is Stage.PROMOTED
    assert town.entries[0]["reason"] == "without evaluation: a patient waits"
    assert "evaluation" not in town.entries[-1]


async def test_what_is_in_service_is_not_promoted_again(town):
    """It would restart every worker for nothing."""
    await promote(town)
    with pytest.raises(DraftRefusedError, match="in service already"):
        await promote(town)
    with pytest.raises(DraftNotFoundError):
        await promote(town, "ffff")


async def test_workers_that_serve_different_drafts_are_no_measure(town):
    """Whoever changed one of them has to say first what is right."""
    town.engines[B].draft = f"sha256:{'3' * 64}"
    town.gateway.look()
    with pytest.raises(ControlRefusedError, match="recycle it first"):
        await promote(town)


async def test_a_draft_that_was_damaged_since_is_found_before_any_worker_is_touched(town):
    """Its bytes are read once more."""
    file = town.directory / "revisions" / new(town)[7:] / "weights" / "model.safetensors"
    rewrite(file, file.read_bytes()[:-1] + b"\x01")
    done = await promote(town)
    assert (done.stage, town.wishes) == (Stage.FAILED, [])
    assert "not what was registered" in done.reason
    assert is_clean(town)
    assert "draft.rolled_back" not in steps(town)


async def test_without_the_log_nothing_is_begun(town):
    """Not even a file."""
    town.log_is_full = True
    with pytest.raises(AuditUnavailableError):
        await promote(town)
    assert not list((town.directory).glob("promotions/*"))
    assert is_clean(town)


async def test_a_log_that_fills_up_on_the_way_ends_it_and_keeps_nobody_from_going_back(town):
    """What cannot be recorded is not done; what has to be undone is undone all the same."""
    task = asyncio.ensure_future(promote(town))
    await town.gateway.until(lambda: "draft.tried rollout" in steps(town))
    town.log_is_full = True
    done = await task
    assert done.stage is Stage.FAILED
    assert is_clean(town)


async def test_a_rollback_goes_back_to_what_served_before(town):
    """Everywhere, one worker at a time; and once more to the draft of the settings."""
    await promote(town)
    first, second = new(town), town.site.add(town.site.draft("second")).digest
    town.evaluated(second, incumbent=first)
    await promote(town, second)
    assert town.standing.previous == (first, None)
    town.entries.clear()
    done = await roll_back(town)
    assert (done.stage, done.kind) == (Stage.ROLLED_BACK, "rollback")
    assert town.drafts() == [first] * 3
    assert town.standing == Standing(target=town.target, draft=first, previous=(None,))
    (entry,) = town.entries
    assert (entry["draft"], entry["previous_draft"], entry["reason"]) == (first, second, "slow")
    assert entry["actor"] == "k2"
    assert town.fewest == 2
    await roll_back(town, to="none")
    assert is_clean(town)
    assert (town.entries[-1]["draft"], town.entries[-1]["previous_draft"]) == (OWN, first)
    with pytest.raises(ControlRefusedError, match="nothing to roll back"):
        await roll_back(town)


async def test_a_rollback_goes_to_nothing_that_never_served(town):
    """That would be a promotion without a trial."""
    await promote(town)
    with pytest.raises(DraftNotFoundError, match="promote it instead"):
        await roll_back(town, to=new(town))
    assert town.standing.draft == new(town)


async def test_a_promotion_under_way_is_given_back_by_a_rollback(town):
    """With the operator's words; nobody has to wait for the trial."""
    task = asyncio.ensure_future(promote(town))
    await town.gateway.until(lambda: "draft.tried canary" in steps(town))
    with pytest.raises(ControlRefusedError, match="without --to"):
        await roll_back(town, to="none")
    await town.gateway.promoter.roll_back(
        to=None, reason="wrong one", actor="k2", model=None, allow_downtime=False
    )
    done = await task
    assert (done.stage, done.reason) == (Stage.ROLLED_BACK, "wrong one")
    assert is_clean(town)
    assert [entry["actor"] for entry in town.entries[-2:]] == ["k2", "k2"]


async def test_nobody_else_restarts_workers_meanwhile(town):
    """Neither the monitor's hard-off nor an operator; and there is one promotion at a time."""
    task = asyncio.ensure_future(promote(town))
    await town.gateway.until(lambda: "draft.tried canary" in steps(town))
    assert "promotion" in town.gateway.recycler.refusal(A)
    with pytest.raises(ControlRefusedError, match="is under way"):
        await promote(town)
    await task
    assert town.gateway.recycler.refusal(A) is None


async def test_a_worker_that_joins_meanwhile_gets_it_too(town):
    """In the end all workers of the target have the same draft."""
    task = asyncio.ensure_future(promote(town))
    await town.gateway.until(lambda: "draft.tried rollout" in steps(town))
    late = type(A)("late")
    town.in_force[late] = town.in_force[C]
    town.start(late)
    town.gateway.pool.add(Worker(worker_id=late, url="http://127.0.0.1/late"))
    assert (await task).stage is Stage.PROMOTED
    assert town.drafts() == [new(town)] * 4


async def test_the_last_worker_is_not_restarted_unless_somebody_allows_it(tmp_path):
    """Then it is compared with what it did before, and its requests wait meanwhile."""
    site = Site.open(tmp_path / "site")
    site.add(site.draft("new"))
    town = Town(site=site, names=(A,))
    town.engines[A].serves = 0
    town.evaluated(new(town))
    await town.gateway.run()
    with pytest.raises(ControlRefusedError, match="worker a is the only one"):
        await promote(town)
    done = await promote(town, allow_downtime=True)
    assert done.stage is Stage.REFUSED
    assert "too few to compare with" in done.reason
    assert town.wishes == []
    began, town.engines[A].serves = town.now, 4
    await town.gateway.until(lambda: town.now > began + 300)
    done = await promote(town, allow_downtime=True)
    assert done.stage is Stage.PROMOTED, done.reason
    with pytest.raises(ControlRefusedError, match="only one"):
        await promote(town, town.site.add(town.site.draft("other")).digest, without_evaluation="x")
    done = await roll_back(town, allow_downtime=True)
    assert (done.stage, town.drafts()) == (Stage.ROLLED_BACK, [OWN])
    await town.gateway.close()


# Crashes.


@pytest.mark.parametrize("fate", range(1, 45))
async def test_killed_at_any_step_it_leaves_the_former_draft_or_the_new_one_and_never_both(town, fate):
    """The next gateway ends what it finds, the log tells of it, and the next promotion works."""
    town.fate = town.steps + fate
    task = asyncio.ensure_future(promote(town))
    await town.gateway.until(lambda: task.done() or town.steps >= town.fate)
    was_killed = town.steps >= town.fate
    task.cancel()
    await asyncio.wait({task})
    gateway = await town.new_gateway()
    await gateway.run()
    await gateway.until_over()
    standing = town.standing
    assert (standing.promotion, standing.candidate) == (None, None)
    expected = standing.draft or OWN
    assert set(town.drafts()) == {expected}
    promotions = await gateway.promoter.promotions()
    assert all(promotion.is_over for promotion in promotions)
    if promotions:
        wanted = Stage.PROMOTED if standing.draft else Stage.INTERRUPTED
        assert promotions[0].stage is wanted
    assert (standing.draft is not None) == ("draft.promoted" in steps(town) and not _was_taken_back(town))
    assert town.fewest >= 2
    if not was_killed:
        assert standing.draft == new(town)
    if standing.draft is None:
        assert (await promote(town)).stage is Stage.PROMOTED


def _was_taken_back(town: Town) -> bool:
    return steps(town)[-1] == "draft.rolled_back"


@pytest.mark.parametrize("fate", range(1, 13))
async def test_a_rollback_that_is_killed_is_carried_on(town, fate):
    """It is on its way to where it wants to be."""
    await promote(town)
    town.fate = town.steps + fate
    task = asyncio.ensure_future(roll_back(town))
    await town.gateway.until(lambda: task.done() or town.steps >= town.fate)
    task.cancel()
    await asyncio.wait({task})
    gateway = await town.new_gateway()
    await gateway.run()
    await gateway.until_over()
    was_begun = any(each.kind == "rollback" for each in await gateway.promoter.promotions())
    assert set(town.drafts()) == {OWN if was_begun else new(town)}
    assert (town.standing.draft is None) == was_begun


async def test_a_gateway_that_loses_the_lease_stops_and_the_next_one_gives_everything_back(town):
    """Two of them must not pull at the same workers."""
    task = asyncio.ensure_future(promote(town))
    await town.gateway.until(lambda: "draft.tried canary" in steps(town))
    town.gateway.is_acting = False
    await town.gateway.until(lambda: town.gateway.promoter._running() is None)
    wished = len(town.wishes)
    began = town.now
    await town.gateway.until(lambda: town.now > began + 30)
    assert len(town.wishes) == wished
    with pytest.raises(ControlRefusedError, match="does not steer"):
        await promote(town)
    task.cancel()
    gateway = await town.new_gateway()
    await gateway.run()
    done = await gateway.until_over()
    assert (done.stage, is_clean(town)) == (Stage.INTERRUPTED, True)


async def test_a_lease_that_is_out_of_hand_for_a_moment_ends_nothing(town):
    """A slow database is no reason to throw a trial away."""
    task = asyncio.ensure_future(promote(town))
    await town.gateway.until(lambda: "draft.tried canary" in steps(town))
    town.gateway.is_acting = False
    town.at[town.now + 1.5] = lambda: setattr(town.gateway, "is_acting", True)
    assert (await task).stage is Stage.PROMOTED


async def test_a_promotion_whose_file_is_lost_is_forgotten_by_the_standing(town):
    """No worker goes on starting with its draft."""
    task = asyncio.ensure_future(promote(town))
    await town.gateway.until(lambda: "draft.tried canary" in steps(town))
    task.cancel()
    await town.gateway.close()
    (file,) = (town.directory / "promotions").glob("*.json")
    file.write_text("{")
    gateway = await town.new_gateway()
    await gateway.run()
    await gateway.until(lambda: gateway.promoter._has_taken_up)
    assert town.standing == Standing(target=town.target)


async def test_a_return_waits_for_somebody_to_stand_in(town):
    """The last worker that serves is never taken away, however bad its draft."""
    task = asyncio.ensure_future(promote(town))
    await town.gateway.until(lambda: "draft.tried canary" in steps(town))
    canary = town.wishes[0][0]
    for name in town.names:
        if name != canary:
            town.engines[name].is_dead = True
    town.gateway.look()
    await town.gateway.promoter.roll_back(to=None, reason="bad", actor="k2", model=None, allow_downtime=False)
    began = town.now
    await town.gateway.until(lambda: town.standing.promotion is None and town.now > began + 20)
    assert town.engines[canary].draft == new(town)
    await town.gateway.until(lambda: "is down" in (town.gateway.promoter._passage.promotion.waits or ""))
    for name in town.names:
        if name != canary:
            town.start(name)
    assert (await task).stage is Stage.ROLLED_BACK
    assert is_clean(town)

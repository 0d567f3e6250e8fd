"""A draft is promoted one worker at a time, or rolled back everywhere."""

import asyncio

import pytest

from appliance.drafts.evaluation.evaluation_results import EvaluationVerdict
from appliance.drafts.promotion import promotion_run
from appliance.drafts.promotion.promotion import PromotionStage
from appliance.drafts.registry.active_draft import ActiveDraft
from appliance.errors import (
    AuditUnavailableError,
    ControlRefusedError,
    DraftNotFoundError,
    DraftRefusedError,
)
from appliance.serving.restart_request import CandidateDraft
from appliance.serving.worker import Worker
from appliance.speculation.values import Reason
from tests.unit.drafts.promotion.promotion_cluster import OWN, A, B, C, PromotionCluster
from tests.unit.drafts.registry.site import Site, rewrite


@pytest.fixture
async def cluster(tmp_path, monkeypatch):
    """Three workers, a registry with one evaluated draft, and a gateway that holds the lease."""
    site = Site.open(tmp_path / "site")
    site.add(site.draft("new"))
    made = PromotionCluster(site=site)

    def fateful(write):
        """A kill may come before or after the write."""

        def step(*arguments):
            made.durable_step()
            write(*arguments)
            made.durable_step()

        return step

    for name in ("write_private", "write_active_draft"):
        monkeypatch.setattr(promotion_run, name, fateful(getattr(promotion_run, name)))
    made.evaluated(new(made))
    await made.gateway.run()
    yield made
    await made.gateway.close()


def new(cluster: PromotionCluster) -> str:
    return cluster.site.registry.revisions()[-1].digest


async def promote(cluster: PromotionCluster, draft: str | None = None, **how):
    """Begin a promotion and wait until it is over."""
    given = {"actor": "k1", "without_evaluation": None, "allow_downtime": False, **how}
    await cluster.gateway.promoter.promote(draft or new(cluster), **given)
    return await cluster.gateway.until_over()


async def roll_back(cluster: PromotionCluster, **how):
    given = {"to": None, "reason": "slow", "actor": "k2", "model": None, "allow_downtime": False, **how}
    await cluster.gateway.promoter.roll_back(**given)
    return await cluster.gateway.until_over()


def steps(cluster: PromotionCluster) -> list[str]:
    """The promotion entries of the audit log, in order."""
    return [f"{entry['type']} {entry.get('step', '')}".strip() for entry in cluster.entries]


def is_clean(cluster: PromotionCluster) -> bool:
    """Whether the draft of the settings serves everywhere and no promotion is left on disk."""
    return set(cluster.drafts()) == {OWN} and cluster.active == ActiveDraft(target=cluster.target)


async def test_good_draft_is_promoted_one_worker_at_a_time(cluster):
    """Canary, trial, rollout; then the audit log and the active draft name it."""
    done = await promote(cluster)
    assert (done.stage, done.reason) == (PromotionStage.PROMOTED, None)
    assert cluster.drafts() == [new(cluster)] * 3
    assert cluster.active == ActiveDraft(target=cluster.target, draft=new(cluster), previous=(None,))
    tried = ["draft.tried begun", "draft.tried canary", "draft.tried trial"]
    assert steps(cluster) == [*tried, *["draft.tried rollout"] * 2, "draft.promoted"]
    assert cluster.fewest == 2
    promoted = cluster.entries[-1]
    assert (promoted["draft"], promoted["previous_draft"]) == (new(cluster), OWN)
    assert promoted["evaluation"] == cluster.evaluated(new(cluster)).digest.removeprefix("sha256:")
    numbers = cluster.entries[2]
    assert numbers["drafts"] >= 256
    assert 0.85 < float(numbers["speed_ratio"]) < 1.15
    assert all(
        request.candidate == CandidateDraft(draft=new(cluster), promotion=done.promotion_id)
        for _, request in cluster.requests
    )
    assert [step.stage for step in done.timeline] == [
        *("begun", "canary", "trial", "rollout", "rollout", "rollout", "promoted")
    ]


def counted(cluster: PromotionCluster) -> dict[str, float]:
    """How often each stage was entered, by the gateway's metrics."""
    value = cluster.gateway.metrics.registry.get_sample_value
    stages = {
        stage: value("appliance_draft_promotion_steps_total", {"stage": stage}) for stage in PromotionStage
    }
    assert None not in stages.values()
    return {stage: count for stage, count in stages.items() if count}


async def test_metrics_count_the_stages_and_show_a_running_promotion(cluster):
    running = "appliance_draft_promotion_running"
    value = cluster.gateway.metrics.registry.get_sample_value
    assert (counted(cluster), value(running)) == ({}, 0)
    task = asyncio.ensure_future(promote(cluster))
    await cluster.gateway.until(lambda: "draft.tried canary" in steps(cluster))
    assert value(running) == 1
    await task
    assert counted(cluster) == {"begun": 1, "canary": 1, "trial": 1, "rollout": 3, "promoted": 1}
    await roll_back(cluster)
    assert counted(cluster)["rolled_back"] == 1
    assert value(running) == 0


async def test_worker_that_restarts_after_a_promotion_has_the_draft(cluster):
    """Although its restart request names a promotion that is over."""
    await promote(cluster)
    cluster.die(A)
    await cluster.gateway.until(
        lambda: not cluster.engines[A].is_dead and cluster.now > cluster.engines[A].up_at
    )
    assert cluster.drafts() == [new(cluster)] * 3


async def test_worse_draft_is_refused_and_rolled_back(cluster):
    """One worker tried it, and the numbers are in the audit log."""
    cluster.rates[new(cluster)] = 0.4
    done = await promote(cluster)
    assert done.stage is PromotionStage.REFUSED
    assert "is the least allowed" in done.reason
    assert is_clean(cluster)
    assert len({worker for worker, _ in cluster.requests}) == 1
    assert steps(cluster)[-2:] == ["draft.tried refused", "draft.rolled_back"]
    refused, back = cluster.entries[-2:]
    assert (refused["reason"], back["reason"]) == (done.reason, done.reason)
    assert float(refused["acceptance_length"]) < float(refused["previous_acceptance_length"])
    assert (back["draft"], back["previous_draft"]) == (OWN, new(cluster))


async def test_draft_that_fails_the_canary_request_is_rolled_back(cluster):
    """No client's request reached it."""
    cluster.mute.add(new(cluster))
    done = await promote(cluster)
    assert (done.stage, is_clean(cluster)) == (PromotionStage.FAILED, True)
    assert "did not come back with it (without_draft)" in done.reason


@pytest.mark.parametrize("comes_back", [True, False])
async def test_canary_worker_that_dies_in_the_trial_fails_it(cluster, comes_back):
    """Whether it comes back with the draft, or stays down."""
    task = asyncio.ensure_future(promote(cluster))
    await cluster.gateway.until(lambda: "draft.tried canary" in steps(cluster))
    canary = cluster.requests[0][0]
    if comes_back:
        cluster.die(canary)
    else:
        cluster.engines[canary].is_dead = True
        cluster.at[cluster.now + 40.0] = lambda: cluster.start(canary)
    done = await task
    assert done.stage is PromotionStage.FAILED
    assert "which tries it" in done.reason
    assert is_clean(cluster)


async def test_collapse_on_the_canary_alone_refuses_the_draft_at_once(cluster):
    """If drafts collapse on all workers, the traffic is the cause."""
    task = asyncio.ensure_future(promote(cluster))
    await cluster.gateway.until(lambda: "draft.tried canary" in steps(cluster))
    canary = cluster.requests[0][0]
    for engine in cluster.engines.values():
        engine.verdict = Reason.COLLAPSED
    began = cluster.now
    await cluster.gateway.until(lambda: cluster.now > began + 30)
    assert not task.done()
    for name, engine in cluster.engines.items():
        engine.verdict = Reason.COLLAPSED if name == canary else None
    done = await task
    assert (done.stage, done.reason) == (PromotionStage.REFUSED, f"its drafts collapsed on worker {canary}")
    for engine in cluster.engines.values():
        engine.verdict = None
    assert is_clean(cluster)


async def test_trial_without_drafts_times_out_and_names_the_cause(cluster):
    """The monitor stopped drafting: there is nothing to compare."""
    for engine in cluster.engines.values():
        engine.serves = 0
    task = asyncio.ensure_future(promote(cluster))
    await cluster.gateway.until(lambda: "draft.tried canary" in steps(cluster))
    for name, engine in cluster.engines.items():
        engine.serves = 0
        engine.verdict = Reason.BELOW_BREAK_EVEN if name == B else None
    done = await task
    assert done.stage is PromotionStage.REFUSED
    assert done.reason.startswith("undecided after 600 s: the new draft made 0 drafts")
    assert "the monitor has stopped drafting on b (below_break_even)" in done.reason
    assert is_clean(cluster)


@pytest.mark.parametrize(
    ("evaluation", "why"),
    [
        (None, "was never evaluated"),
        ({"verdict": EvaluationVerdict.REFUSED, "reasons": ("slow",)}, "refused it: slow"),
        ({"complete": False}, "it is not complete"),
        ({"incumbent": f"sha256:{'7' * 64}"}, "was compared with 777777777777"),
        ({"incumbent": None}, "was compared with of the settings"),
        ({"target": f"sha256:{'7' * 64}"}, "with another target"),
    ],
)
async def test_draft_needs_an_evaluation_against_the_incumbent_or_a_reason(cluster, evaluation, why):
    """The reason is in the audit log."""
    site = cluster.site
    second = site.add(site.draft("second")).digest
    if evaluation is not None:
        cluster.evaluated(second, **evaluation)
    with pytest.raises(DraftRefusedError, match=why):
        await promote(cluster, second)
    assert (cluster.entries, cluster.requests) == ([], [])
    done = await promote(cluster, second, without_evaluation="a patient waits")
    assert done.stage is PromotionStage.PROMOTED
    assert cluster.entries[0]["reason"] == "without evaluation: a patient waits"
    assert "evaluation" not in cluster.entries[-1]


async def test_draft_in_service_is_not_promoted_again(cluster):
    await promote(cluster)
    with pytest.raises(DraftRefusedError, match="in service already"):
        await promote(cluster)
    with pytest.raises(DraftNotFoundError):
        await promote(cluster, "ffff")


async def test_workers_with_different_drafts_refuse_a_promotion(cluster):
    """The operator has to recycle one of them first."""
    cluster.engines[B].draft = f"sha256:{'3' * 64}"
    cluster.gateway.poll()
    with pytest.raises(ControlRefusedError, match="recycle it first"):
        await promote(cluster)


async def test_damaged_draft_fails_before_any_worker_restarts(cluster):
    file = cluster.directory / "revisions" / new(cluster)[7:] / "weights" / "model.safetensors"
    rewrite(file, file.read_bytes()[:-1] + b"\x01")
    done = await promote(cluster)
    assert (done.stage, cluster.requests) == (PromotionStage.FAILED, [])
    assert "differs from what was registered" in done.reason
    assert is_clean(cluster)
    assert "draft.rolled_back" not in steps(cluster)


async def test_promotion_does_not_begin_without_the_audit_log(cluster):
    """Not even its file is written."""
    cluster.log_is_full = True
    with pytest.raises(AuditUnavailableError):
        await promote(cluster)
    assert not list((cluster.directory).glob("promotions/*"))
    assert is_clean(cluster)


async def test_audit_log_that_fills_up_fails_the_promotion_but_not_the_rollback(cluster):
    """Forward steps fail closed, the way back fails open."""
    task = asyncio.ensure_future(promote(cluster))
    await cluster.gateway.until(lambda: "draft.tried rollout" in steps(cluster))
    cluster.log_is_full = True
    done = await task
    assert done.stage is PromotionStage.FAILED
    assert is_clean(cluster)


async def test_rollback_restores_the_draft_that_served_before(cluster):
    """On one worker at a time; a second one restores the draft of the settings."""
    await promote(cluster)
    first, second = new(cluster), cluster.site.add(cluster.site.draft("second")).digest
    cluster.evaluated(second, incumbent=first)
    await promote(cluster, second)
    assert cluster.active.previous == (first, None)
    cluster.entries.clear()
    done = await roll_back(cluster)
    assert (done.stage, done.kind) == (PromotionStage.ROLLED_BACK, "rollback")
    assert cluster.drafts() == [first] * 3
    assert cluster.active == ActiveDraft(target=cluster.target, draft=first, previous=(None,))
    (entry,) = cluster.entries
    assert (entry["draft"], entry["previous_draft"], entry["reason"]) == (first, second, "slow")
    assert entry["actor"] == "k2"
    assert cluster.fewest == 2
    await roll_back(cluster, to="none")
    assert is_clean(cluster)
    assert (cluster.entries[-1]["draft"], cluster.entries[-1]["previous_draft"]) == (OWN, first)
    with pytest.raises(ControlRefusedError, match="nothing to roll back"):
        await roll_back(cluster)


async def test_rollback_to_a_draft_that_never_served_is_refused(cluster):
    """That would be a promotion without a trial."""
    await promote(cluster)
    with pytest.raises(DraftNotFoundError, match="promote it instead"):
        await roll_back(cluster, to=new(cluster))
    assert cluster.active.draft == new(cluster)


async def test_rollback_cancels_the_running_promotion(cluster):
    """With the operator's reason, and without waiting for the trial."""
    task = asyncio.ensure_future(promote(cluster))
    await cluster.gateway.until(lambda: "draft.tried canary" in steps(cluster))
    with pytest.raises(ControlRefusedError, match="without --to"):
        await roll_back(cluster, to="none")
    await cluster.gateway.promoter.roll_back(
        to=None, reason="wrong one", actor="k2", model=None, allow_downtime=False
    )
    done = await task
    assert (done.stage, done.reason) == (PromotionStage.ROLLED_BACK, "wrong one")
    assert is_clean(cluster)
    assert [entry["actor"] for entry in cluster.entries[-2:]] == ["k2", "k2"]


async def test_promotion_reserves_the_recycler(cluster):
    """Against the monitor's hard-off, operators and a second promotion."""
    task = asyncio.ensure_future(promote(cluster))
    await cluster.gateway.until(lambda: "draft.tried canary" in steps(cluster))
    assert "promotion" in cluster.gateway.recycler.refusal(A)
    with pytest.raises(ControlRefusedError, match="is running"):
        await promote(cluster)
    await task
    assert cluster.gateway.recycler.refusal(A) is None


async def test_worker_that_joins_during_the_rollout_gets_the_draft(cluster):
    task = asyncio.ensure_future(promote(cluster))
    await cluster.gateway.until(lambda: "draft.tried rollout" in steps(cluster))
    late = type(A)("late")
    cluster.in_force[late] = cluster.in_force[C]
    cluster.start(late)
    cluster.gateway.pool.add(Worker(worker_id=late, url="http://127.0.0.1/late"))
    assert (await task).stage is PromotionStage.PROMOTED
    assert cluster.drafts() == [new(cluster)] * 4


async def test_only_worker_is_restarted_only_with_allow_downtime(tmp_path):
    """It is compared with its own counts from before."""
    site = Site.open(tmp_path / "site")
    site.add(site.draft("new"))
    cluster = PromotionCluster(site=site, names=(A,))
    cluster.engines[A].serves = 0
    cluster.evaluated(new(cluster))
    await cluster.gateway.run()
    with pytest.raises(ControlRefusedError, match="worker a is the only one"):
        await promote(cluster)
    done = await promote(cluster, allow_downtime=True)
    assert done.stage is PromotionStage.REFUSED
    assert "too few to compare with" in done.reason
    assert cluster.requests == []
    began, cluster.engines[A].serves = cluster.now, 4
    await cluster.gateway.until(lambda: cluster.now > began + 300)
    done = await promote(cluster, allow_downtime=True)
    assert done.stage is PromotionStage.PROMOTED, done.reason
    with pytest.raises(ControlRefusedError, match="only one"):
        await promote(cluster, cluster.site.add(cluster.site.draft("other")).digest, without_evaluation="x")
    done = await roll_back(cluster, allow_downtime=True)
    assert (done.stage, cluster.drafts()) == (PromotionStage.ROLLED_BACK, [OWN])
    await cluster.gateway.close()


# Crashes.


@pytest.mark.parametrize("fate", range(1, 45))
async def test_promotion_killed_at_any_step_leaves_one_draft_on_all_workers(cluster, fate):
    """The next gateway ends it, the log shows it, and the next promotion succeeds."""
    cluster.fate = cluster.steps + fate
    task = asyncio.ensure_future(promote(cluster))
    await cluster.gateway.until(lambda: task.done() or cluster.steps >= cluster.fate)
    was_killed = cluster.steps >= cluster.fate
    task.cancel()
    await asyncio.wait({task})
    gateway = await cluster.new_gateway()
    await gateway.run()
    await gateway.until_over()
    active = cluster.active
    assert (active.promotion, active.candidate) == (None, None)
    expected = active.draft or OWN
    assert set(cluster.drafts()) == {expected}
    promotions = await gateway.promoter.promotions()
    assert all(promotion.is_over for promotion in promotions)
    if promotions:
        wanted = PromotionStage.PROMOTED if active.draft else PromotionStage.INTERRUPTED
        assert promotions[0].stage is wanted
    assert (active.draft is not None) == ("draft.promoted" in steps(cluster) and not _was_taken_back(cluster))
    assert cluster.fewest >= 2
    if not was_killed:
        assert active.draft == new(cluster)
    if active.draft is None:
        assert (await promote(cluster)).stage is PromotionStage.PROMOTED


def _was_taken_back(cluster: PromotionCluster) -> bool:
    return steps(cluster)[-1] == "draft.rolled_back"


@pytest.mark.parametrize("fate", range(1, 13))
async def test_killed_rollback_is_continued_by_the_next_gateway(cluster, fate):
    await promote(cluster)
    cluster.fate = cluster.steps + fate
    task = asyncio.ensure_future(roll_back(cluster))
    await cluster.gateway.until(lambda: task.done() or cluster.steps >= cluster.fate)
    task.cancel()
    await asyncio.wait({task})
    gateway = await cluster.new_gateway()
    await gateway.run()
    await gateway.until_over()
    was_begun = any(each.kind == "rollback" for each in await gateway.promoter.promotions())
    assert set(cluster.drafts()) == {OWN if was_begun else new(cluster)}
    assert (cluster.active.draft is None) == was_begun


async def test_lease_loss_stops_the_promotion_and_the_next_holder_rolls_back(cluster):
    """Two gateways never restart the same workers."""
    task = asyncio.ensure_future(promote(cluster))
    await cluster.gateway.until(lambda: "draft.tried canary" in steps(cluster))
    cluster.gateway.is_acting = False
    await cluster.gateway.until(lambda: cluster.gateway.promoter._running() is None)
    before = len(cluster.requests)
    began = cluster.now
    await cluster.gateway.until(lambda: cluster.now > began + 30)
    assert len(cluster.requests) == before
    with pytest.raises(ControlRefusedError, match="does not hold the control lease"):
        await promote(cluster)
    task.cancel()
    gateway = await cluster.new_gateway()
    await gateway.run()
    done = await gateway.until_over()
    assert (done.stage, is_clean(cluster)) == (PromotionStage.INTERRUPTED, True)


async def test_short_loss_of_the_lease_does_not_end_a_promotion(cluster):
    """A slow database is no reason to abort a trial."""
    task = asyncio.ensure_future(promote(cluster))
    await cluster.gateway.until(lambda: "draft.tried canary" in steps(cluster))
    cluster.gateway.is_acting = False
    cluster.at[cluster.now + 1.5] = lambda: setattr(cluster.gateway, "is_acting", True)
    assert (await task).stage is PromotionStage.PROMOTED


async def test_promotion_with_a_damaged_file_is_cleared_from_the_active_draft(cluster):
    """Workers stop starting with its draft."""
    task = asyncio.ensure_future(promote(cluster))
    await cluster.gateway.until(lambda: "draft.tried canary" in steps(cluster))
    task.cancel()
    await cluster.gateway.close()
    (file,) = (cluster.directory / "promotions").glob("*.json")
    file.write_text("{")
    gateway = await cluster.new_gateway()
    await gateway.run()
    await gateway.until(lambda: gateway.promoter._has_recovered)
    assert cluster.active == ActiveDraft(target=cluster.target)


async def test_rollback_waits_rather_than_restart_the_last_worker(cluster):
    task = asyncio.ensure_future(promote(cluster))
    await cluster.gateway.until(lambda: "draft.tried canary" in steps(cluster))
    canary = cluster.requests[0][0]
    for name in cluster.names:
        if name != canary:
            cluster.engines[name].is_dead = True
    cluster.gateway.poll()
    await cluster.gateway.promoter.roll_back(
        to=None, reason="bad", actor="k2", model=None, allow_downtime=False
    )
    began = cluster.now
    await cluster.gateway.until(lambda: cluster.active.promotion is None and cluster.now > began + 20)
    assert cluster.engines[canary].draft == new(cluster)
    await cluster.gateway.until(lambda: "is down" in (cluster.gateway.promoter._run.promotion.waits or ""))
    for name in cluster.names:
        if name != canary:
            cluster.start(name)
    assert (await task).stage is PromotionStage.ROLLED_BACK
    assert is_clean(cluster)

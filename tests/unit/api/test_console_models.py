"""Models, their drafts and the life cycle of each draft in the console, over real promotions."""

import html
import re
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from appliance.drafts.evaluation.evaluation_results import EvaluationVerdict
from appliance.drafts.promotion.promotion import short
from appliance.errors import DraftStorageError
from appliance.serving.pool import WorkerPool
from appliance.serving.worker import ServedModel, Worker, WorkerId, WorkerSnapshot
from appliance.speculation.values import Capability, EngineReading
from appliance.tenancy import AdminScope
from tests.fakes import FakeControl, FakeView
from tests.unit.api.console_site import HOSTILE, logged_in
from tests.unit.drafts.promotion.conftest import no_threads
from tests.unit.drafts.promotion.promotion_cluster import OWN, PromotionCluster
from tests.unit.drafts.registry.site import Site, rewrite

__all__ = ["no_threads"]  # the cluster's clock advances only when a task sleeps


@pytest.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[PromotionCluster]:
    """Three workers and a registry with one draft, not evaluated."""
    site = Site.open(tmp_path / "site")
    site.add(site.draft("new", recipe={"tool": "speculators", "version": "0.9", "name": HOSTILE}))
    made = PromotionCluster(site=site)
    await made.gateway.run()
    yield made
    await made.gateway.close()


async def shown(cluster: PromotionCluster, acts: AdminScope | None = None) -> str:
    gateway = cluster.gateway
    async with logged_in(pool=gateway.pool, promoter=gateway.promoter, acts=acts) as client:
        answer = await client.get("/console/models")
    assert answer.status_code == 200
    return answer.text


async def act(cluster: PromotionCluster, path: str, acts: AdminScope | None = AdminScope.DRAFTS, **form: str):
    """Send a form of the page; its status, and what the next page says."""
    status, page = await after(cluster, path, acts, **form)
    notice = re.search(r"data-notice>(.*?)</div>", page, re.DOTALL)
    return status, html.unescape(notice[1]) if notice and status == 303 else page


async def after(
    cluster: PromotionCluster, path: str, acts: AdminScope | None = AdminScope.DRAFTS, **form: str
):
    """Send a form of the page; its status, and the next page."""
    gateway = cluster.gateway
    async with logged_in(pool=gateway.pool, promoter=gateway.promoter, acts=acts) as client:
        csrf = re.search(r'name="csrf" value="([^"]+)"', (await client.get("/console/models")).text)
        assert csrf is not None
        answer = await client.post(
            f"/console/models/{path}",
            data={"csrf": csrf[1], **form},
            headers={"Sec-Fetch-Site": "same-origin"},
        )
        if answer.status_code != 303:
            return answer.status_code, answer.text
        assert answer.headers["location"] == "/console/models"
        return answer.status_code, (await client.get("/console/models")).text


def draft_of(cluster: PromotionCluster) -> str:
    return cluster.site.registry.revisions()[-1].digest


def life_cycle(page: str, draft: str) -> list[str]:
    """The steps of a draft with their states."""
    card = page.split(f'aria-label="Draft {short(draft)}"')[1].split("</article>", maxsplit=1)[0]
    return [re.sub(r"<[^>]*>", "", step) for step in re.findall(r"<li><span[^>]*>(.*?)</span>", card)]


async def promote(cluster: PromotionCluster) -> None:
    given = {"actor": "k1", "without_evaluation": None, "allow_downtime": False}
    await cluster.gateway.promoter.promote(draft_of(cluster), **given)
    await cluster.gateway.until_over()


async def test_a_draft_passes_each_step_until_it_is_promoted_and_rolled_back(cluster):
    """What is served and in the history changes with it."""
    draft = draft_of(cluster)
    page = await shown(cluster)
    assert life_cycle(page, draft) == ["trained: done", "evaluated: open", "trial: open", "promoted: open"]
    assert "tool speculators, version 0.9" in page
    cluster.evaluated(draft)
    page = await shown(cluster)
    assert life_cycle(page, draft)[1:] == ["evaluated: done", "trial: open", "promoted: open"]
    await promote(cluster)
    page = await shown(cluster)
    assert life_cycle(page, draft)[1:] == ["evaluated: done", "trial: done", "promoted: done"]
    assert "in service since the promotion of" in page
    assert page.count(f"<code>{short(draft)}</code>") == 3 + 1, "three workers and the history"
    await cluster.gateway.promoter.roll_back(
        to=None, reason="slow <b>", actor="k2", model=None, allow_downtime=False
    )
    await cluster.gateway.until_over()
    page = await shown(cluster)
    assert life_cycle(page, draft)[3] == "promoted: open"
    assert page.count(f"<code>{short(OWN)}</code>") == 3
    assert "rolled back" in page
    assert "slow &lt;b&gt;" in page


async def test_a_draft_is_promoted_and_rolled_back_from_the_page(cluster):
    """The audit log has the operator's key and the reason, as with the admin API."""
    draft = draft_of(cluster)
    cluster.evaluated(draft)
    page = await shown(cluster, AdminScope.DRAFTS)
    assert page.count('action="/console/models/promote"') == 1
    assert "without_evaluation" not in page
    assert "/console/models/rollback" not in page, "the draft of the settings is in service"
    status, said = await act(cluster, "promote", draft=draft)
    assert (status, "has begun with a canary" in said) == (303, True)
    page = await shown(cluster, AdminScope.DRAFTS)
    assert "/console/models/promote" not in page
    assert "Cancel the promotion" in page
    await cluster.gateway.until_over()
    page = await shown(cluster, AdminScope.DRAFTS)
    assert life_cycle(page, draft)[3] == "promoted: done"
    assert "/console/models/promote" not in page, "it is in service"
    status, said = await act(
        cluster, "rollback", to="none", model="demo", reason="slow", allow_downtime="yes"
    )
    assert (status, said.strip().startswith("Workers leave the draft")) == (303, True), said
    await cluster.gateway.until_over()
    (undone,) = (entry for entry in cluster.entries if entry["type"] == "draft.rolled_back")
    assert undone["reason"] == "slow"
    newest = (await cluster.gateway.promoter.promotions())[0]
    assert (newest.kind, newest.actor, newest.allow_downtime) == ("rollback", undone["actor"], True)
    assert re.fullmatch(r"[a-z2-7]{8}", newest.actor)


async def test_a_draft_without_evaluation_needs_a_reason_on_the_page_too(cluster):
    draft = draft_of(cluster)
    page = await shown(cluster, AdminScope.DRAFTS)
    assert 'name="without_evaluation" value="" maxlength="200" autocomplete="off" required' in page
    _, said = await act(cluster, "promote", draft=draft)
    assert "evaluat" in said
    assert await cluster.gateway.promoter.promotions() == ()
    _, said = await act(cluster, "promote", draft=draft, without_evaluation="a drill")
    assert "has begun" in said
    (running,) = await cluster.gateway.promoter.promotions()
    assert running.without_evaluation == "a drill"
    status, said = await act(cluster, "rollback", reason="enough")
    assert (status, said.strip().startswith("The promotion of")) == (303, True)
    await cluster.gateway.until_over()
    (ended,) = await cluster.gateway.promoter.promotions()
    assert (ended.stage, ended.reason) == ("rolled_back", "enough")


async def test_a_promotion_that_was_refused_keeps_its_form(cluster):
    """That of its draft alone."""
    cluster.site.add(cluster.site.draft("other"))
    mine = cluster.site.registry.revisions()[0].digest
    _, page = await after(cluster, "promote", draft=mine, allow_downtime="yes")
    forms = page.split('<details class="confirm"')[1:]
    (opened,) = (form for form in forms if form.startswith(" open>"))
    assert f'value="{mine}"' in opened
    assert [form for form in forms if " checked" in form] == [opened]
    assert len(forms) == 2


async def test_an_admin_without_the_scope_drafts_has_no_form_and_no_action(cluster):
    draft = draft_of(cluster)
    cluster.evaluated(draft)
    page = await shown(cluster, AdminScope.WORKERS)
    assert "the scope <code>drafts</code>" in page
    assert "/console/models/" not in page
    for path in ("promote", "rollback"):
        status, said = await act(cluster, path, AdminScope.WORKERS, draft=draft, reason="mine")
        assert (status, "lacks the scope `drafts`" in said) == (403, True)
    assert await cluster.gateway.promoter.promotions() == ()


async def test_a_rollback_without_a_reason_or_anything_to_restore_is_refused(cluster):
    assert "must give a reason" in (await act(cluster, "rollback"))[1]
    assert "nothing to roll back" in (await act(cluster, "rollback", reason="why not"))[1]


async def test_a_refused_evaluation_and_a_failed_promotion_say_why(cluster):
    draft = draft_of(cluster)
    cluster.evaluated(draft, verdict=EvaluationVerdict.REFUSED, reasons=("it is <slower>",))
    page = await shown(cluster)
    assert life_cycle(page, draft)[1] == "evaluated: failed"
    assert "it is &lt;slower&gt;" in page
    cluster.evaluated(draft)
    cluster.mute.add(draft)
    await promote(cluster)
    assert life_cycle(await shown(cluster), draft)[2] == "trial: failed"


async def test_a_running_promotion_is_shown_as_such(cluster):
    draft = draft_of(cluster)
    cluster.evaluated(draft)
    given = {"actor": "k1", "without_evaluation": None, "allow_downtime": False}
    await cluster.gateway.promoter.promote(draft, **given)
    assert life_cycle(await shown(cluster), draft)[2] == "trial: running"
    await cluster.gateway.until_over()


async def test_an_altered_draft_is_a_warning_and_hides_nothing_else(cluster):
    other = cluster.site.add(cluster.site.draft("other"))
    rewrite(cluster.site.home(other) / "revision.sig", b"forged")
    page = await shown(cluster)
    assert 'aria-label="Problems"' in page
    assert life_cycle(page, draft_of(cluster))[0] == "trained: done"
    assert f"Draft {short(other.digest)}" not in page


async def test_models_are_shown_if_the_registry_cannot_be_read(cluster, monkeypatch):
    def broken() -> None:
        raise DraftStorageError("cannot read the drafts")

    monkeypatch.setattr(cluster.gateway.promoter, "_registered", broken)
    page = await shown(cluster)
    assert "cannot read the drafts" in page
    assert page.count('data-label="Payoff"') == 3


async def test_the_page_shows_what_each_worker_serves_and_lacks():
    """Without a draft registry, and with names that are escaped."""
    pool, control = WorkerPool(), FakeControl()
    for number, context in ((1, 4096), (2, 8192)):
        worker = Worker(
            worker_id=WorkerId(f"w{number}"), url=f"http://w{number}", weights=f"sha256:{'1' * 64}"
        )
        pool.add(worker)
        adapter = ServedModel(name="adapter", max_model_len=None, created=0, parent=HOSTILE)
        reading = EngineReading(
            controllable=True, epoch="e", missing_capabilities={Capability.ATTRIBUTION: "vllm 0.26"}
        )
        pool.update(
            WorkerSnapshot(
                worker=worker,
                healthy=True,
                engine="vllm 0.32.0",
                models=(ServedModel(name=HOSTILE, max_model_len=context, created=0), adapter),
                reading=reading if number == 1 else None,
            )
        )
    pool.add(Worker(worker_id=WorkerId("w3"), url="http://w3"))
    control.views["w1"] = FakeView()
    async with logged_in(pool=pool, control=control) as client:
        page = (await client.get("/console/models")).text
    assert HOSTILE not in page
    assert not re.search(r"<style|\sstyle=|\son[a-z]+=|https?://", page)
    assert "2 models, 3 workers." in page
    assert "Workers without a model yet: 1." in page
    assert "4,096 or 8,192 tokens, by worker" in page
    assert "Adapter of &lt;script&gt;" in page
    assert "attribution: vllm 0.26" in page
    assert "all: not scraped yet" in page
    assert "+28 %" in page, "the payoff is the logarithm of the gain"
    assert "vllm 0.32.0" in page
    assert "This gateway has no draft registry." in page


async def test_the_page_needs_the_scope_read():
    async with logged_in(scope=AdminScope.WORKERS) as client:
        refused = await client.get("/console/models")
    assert (refused.status_code, "lacks the scope `read`" in refused.text) == (403, True)

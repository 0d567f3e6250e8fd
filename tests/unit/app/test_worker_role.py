"""Pool and audit log show what the worker runs, with and without its draft."""

import io
import json
import shutil

import pytest
from prometheus_client import CollectorRegistry

from appliance.app.announcer import Announcer
from appliance.app.worker_process import WORKER_ID, Listeners, WorkerRole
from appliance.audit.entry_types import EntryType
from appliance.drafts.evaluation.store import save_evaluation
from appliance.drafts.registry.active_draft import ActiveDraft, write_active_draft
from appliance.errors import ControlRefusedError
from appliance.infra.data_directory import locate
from appliance.infra.logs import configure_logs
from appliance.infra.metrics import Metrics
from appliance.infra.settings import DataSettings, LogSettings, Settings, WorkerSettings
from appliance.serving.launch import LaunchPlan
from appliance.serving.plans import ChosenPlan
from appliance.serving.pool import WorkerPool
from appliance.serving.restart_request import WITH_DRAFT, CandidateDraft, RestartRequest
from appliance.serving.supervise import WorkerEvent, WorkerEventKind
from appliance.serving.weights import digest_weights
from appliance.serving.worker import Admission, Worker, WorkerId
from appliance.serving.worker_protocol import DRAFT_DIGEST, EXPECTATION, RESTART_FILE, TARGET_DIGEST
from appliance.speculation.values import Expectation, Reason, SpeculationMode
from tests.fakes import audit_fields
from tests.unit.drafts.evaluation.bare_report import bare_report
from tests.unit.drafts.lint.builder import eagle31, write
from tests.unit.drafts.registry.site import Site, rewrite


class Recorder:
    """Keeps audit entries that fit their schema."""

    def __init__(self) -> None:
        self.entries = []

    def submit(self, entry_type, /, **fields):
        self.entries.append((entry_type, audit_fields(entry_type, fields)))


class StandIn:
    """A supervisor that only records its calls."""

    def __init__(self) -> None:
        self.restarts, self.requests = [], []

    def restart(self, request):
        self.restarts.append(request.with_draft)
        self.requests.append(request)


@pytest.fixture
def site(tmp_path) -> Site:
    """The registry, in the data directory of the worker."""
    return Site.open(tmp_path / "data")


@pytest.fixture
def plan(tmp_path, site):
    """A worker that is planned, reports events, and is never started."""
    target, draft = write(eagle31(), tmp_path)

    def run(**fields) -> tuple[WorkerRole, WorkerPool, Recorder]:
        chosen = {"model": target.path, "draft": draft.path, "device": "cpu", **fields}
        settings = Settings(worker=WorkerSettings(**chosen), data=DataSettings(directory=tmp_path / "data"))
        logger = configure_logs(LogSettings(level="error"), terminal=False)
        said = io.StringIO()
        role = WorkerRole.plan(
            settings, locate(settings), logger, Announcer(said), open_registry=lambda: site.registry
        )
        role.said = said
        pool, recorder = WorkerPool(), Recorder()
        role._listeners = Listeners(pool=pool, audit=recorder, metrics=Metrics(CollectorRegistry()))
        return role, pool, recorder

    return run


def saw(
    role: WorkerRole,
    *kinds: WorkerEventKind,
    hard_off: bool = False,
    exit_code: int | None = None,
    draft: str | None = None,
):
    """Send a supervisor's event; by default with the draft of the settings."""
    planned = "" if hard_off else role._planned.draft
    for kind in kinds:
        event = WorkerEvent(
            kind=kind,
            worker=WORKER_ID,
            detail="x",
            hard_off=hard_off,
            exit_code=exit_code,
            draft=planned if draft is None else draft,
        )
        role.on_event(event)


UP = (WorkerEventKind.STARTING, WorkerEventKind.HEALTHY)
WITHOUT = RestartRequest(with_draft=False)


def test_a_worker_can_open_its_own_tokens_and_certificate_in_the_data_directory(plan, tmp_path):
    """Which the file wall hides apart from them."""
    names = ("scrape_token_file", "tls_certificate_file", "tls_key_file", "tls_client_ca_file")
    files = {name: tmp_path / "data" / name for name in names}
    role, _, _ = plan(**files)
    assert tmp_path / "data" in role._wall.hidden
    assert {*files.values(), tmp_path / "data" / "control.token"} <= role._wall.shown


def test_a_worker_opens_nothing_else_in_the_data_directory(plan, tmp_path):
    """The control token, registered drafts, and its directory of restart requests."""
    role, _, _ = plan()
    data = tmp_path / "data"
    shown = {path.relative_to(data).as_posix() for path in role._wall.shown if path.is_relative_to(data)}
    assert shown == {"control.token", "drafts/revisions", "worker"}


@pytest.mark.parametrize("task", ["embed", "score"])
def test_a_worker_that_does_not_generate_is_planned_without_draft(plan, tmp_path, task):
    """The settings' draft is not read: it may be for another model."""
    role, _, _ = plan(task=task, draft=tmp_path / "nowhere")
    assert (role.worker.draft, role.worker.mode) == ("", SpeculationMode.TARGET_ONLY)
    assert role._supervisor._plans._target_only is None


def test_both_plans_differ_only_in_the_draft(plan):
    """Same port, same environment, same target: a hard-off changes nothing else."""
    role, _, _ = plan()
    plans = role._supervisor._plans
    both, alone = plans._plan, plans._target_only
    assert json.loads(both.argv[both.argv.index("--speculative-config") + 1])["method"] == "eagle3"
    assert "--speculative-config" not in alone.argv
    assert (both.url, both.port) == (alone.url, alone.port)
    assert {**both.environment, DRAFT_DIGEST: ""} == dict(alone.environment)
    assert set(alone.argv) < set(both.argv)


def test_the_worker_receives_the_digests_it_was_started_with(plan):
    """Its plugin reports them to gateways elsewhere."""
    role, _, _ = plan()
    plans = role._supervisor._plans
    told = plans._plan.environment[TARGET_DIGEST], plans._plan.environment[DRAFT_DIGEST]
    assert told == (role.worker.weights, role.worker.draft)
    assert plans._plan.draft == role.worker.draft
    assert plans._target_only.draft == ""


def test_a_method_without_weights_can_be_switched_off(plan):
    role, _, _ = plan(method="ngram", draft=None)
    assert role._supervisor._plans._target_only is not None


def test_a_target_alone_has_one_plan(plan):
    role, _, _ = plan(method="none", draft=None)
    assert role._supervisor._plans._target_only is None
    assert role.worker.mode is SpeculationMode.TARGET_ONLY


def test_worker_and_supervisor_agree_on_the_restart_file(plan, tmp_path):
    """In the data directory, in the only place there that a worker can write to."""
    role, _, _ = plan()
    plans, request = role._supervisor._plans, tmp_path / "data" / "worker" / "worker-1.restart"
    assert request.parent in role._wall.shown
    assert plans._restart_file == request
    assert {each.environment[RESTART_FILE] for each in (plans._plan, plans._target_only)} == {str(request)}


def test_worker_may_be_scraped_once_the_audit_log_has_its_start(plan):
    """The entry binds the requests after it to the weights it names."""
    role, pool, recorder = plan()
    saw(role, WorkerEventKind.STARTING)
    assert pool.snapshot(WORKER_ID).starting
    submit, seen = recorder.submit, []
    recorder.submit = lambda *args, **fields: (
        seen.append(pool.snapshot(WORKER_ID).starting),
        submit(*args, **fields),
    )
    saw(role, WorkerEventKind.HEALTHY)
    assert (seen, pool.snapshot(WORKER_ID).starting) == ([True], False)
    saw(role, WorkerEventKind.DIED, WorkerEventKind.STARTING)
    assert pool.snapshot(WORKER_ID).starting


async def test_pool_and_audit_log_show_a_start_without_draft(plan):
    """And with it again: mode, digest and method."""
    role, pool, recorder = plan()
    role._supervisor = StandIn()
    digest = role.worker.draft
    saw(role, *UP)
    await role.restart(pool.snapshot(WORKER_ID).worker, request=WITHOUT, reason=Reason.COLLAPSED)
    saw(role, *UP, hard_off=True)
    worker = pool.snapshot(WORKER_ID).worker
    assert (worker.mode, worker.draft) == (SpeculationMode.TARGET_ONLY, "")
    assert worker.reason is role.worker.reason is Reason.COLLAPSED
    await role.restart(worker, request=WITH_DRAFT, reason=Reason.TOO_FEW_DRAFTS)
    saw(role, *UP)
    worker = pool.snapshot(WORKER_ID).worker
    assert (worker.mode, worker.draft) == (SpeculationMode.SPECULATIVE, digest)
    assert worker.reason is None
    assert role._supervisor.restarts == [False, True]
    assert [entry_type for entry_type, _ in recorder.entries] == [EntryType.WORKER_STARTED] * 3
    methods = [(fields["speculation_method"], fields.get("draft")) for _, fields in recorder.entries]
    assert methods == [("eagle3", digest), ("none", None), ("eagle3", digest)]


def test_the_audit_log_names_the_method_of_a_draft_model(plan, tmp_path):
    """A target can be its own draft."""
    role, _, recorder = plan(method="draft_model", draft=tmp_path / "target")
    saw(role, *UP)
    ((_, fields),) = recorder.entries
    assert (fields["speculation_method"], fields["draft"]) == ("draft_model", role.worker.weights)


def test_a_crash_after_a_hard_off_keeps_it(plan):
    """The supervisor starts the same plan, and the pool gets the same mode."""
    role, pool, _ = plan()
    saw(role, *UP, hard_off=True)
    before = pool.snapshot(WORKER_ID).worker
    saw(role, WorkerEventKind.DIED, WorkerEventKind.RESTARTING, *UP, hard_off=True)
    after = pool.snapshot(WORKER_ID).worker
    assert after == before
    assert after is not before


def test_a_start_without_draft_records_no_lint_findings(plan):
    """The entry records what is served, not what was requested."""
    role, _, recorder = plan(max_model_len=2048)
    saw(role, *UP)
    saw(role, *UP, hard_off=True)
    assert [fields.get("draft_lint") for _, fields in recorder.entries] == [
        ["max-position-embeddings"],
        None,
    ]


def test_a_recycle_is_not_recorded_as_a_failure(plan):
    """It gets no requests until the next poll."""
    role, pool, recorder = plan()
    saw(role, *UP)
    saw(role, WorkerEventKind.RECYCLING, exit_code=-15)
    assert recorder.entries[-1] == (
        EntryType.WORKER_STOPPED,
        {"worker": WORKER_ID, "reason": "recycled", "exit_code": -15},
    )
    assert not pool.any_healthy()


def test_a_start_does_not_change_the_admission(plan):
    """The recycler decides when it gets requests."""
    role, pool, _ = plan()
    saw(role, *UP)
    pool.set_admission(WORKER_ID, Admission.CANARY)
    saw(role, WorkerEventKind.RECYCLING, *UP)
    assert pool.snapshot(WORKER_ID).admission is Admission.CANARY


def test_the_worker_tracks_its_mode_without_a_gateway(plan):
    """`appliance worker` has no pool."""
    role, _, _ = plan()
    role._listeners = None
    saw(role, *UP, hard_off=True)
    assert role.worker.mode is SpeculationMode.TARGET_ONLY


async def test_an_impossible_restart_request_is_refused(plan):
    """Of another worker, with a draft it lacks, or while it does not run."""
    role, _, _ = plan()
    other = Worker(worker_id=WorkerId("other"), url="http://127.0.0.1:9")
    with pytest.raises(ControlRefusedError, match="worker other was not started by this process"):
        await role.restart(other, request=WITH_DRAFT, reason=Reason.COLLAPSED)
    with pytest.raises(ControlRefusedError, match="not kept running"):
        await role.restart(role.worker, request=WITH_DRAFT, reason=Reason.COLLAPSED)
    alone, _, _ = plan(method="none", draft=None)
    alone._supervisor = StandIn()
    with pytest.raises(ControlRefusedError, match="planned without a draft"):
        await alone.restart(alone.worker, request=WITH_DRAFT, reason=Reason.COLLAPSED)
    await alone.restart(alone.worker, request=WITHOUT, reason=Reason.OPERATOR_OVERRIDE)
    assert alone._supervisor.restarts == [False]


# Which draft it is started with.


def registered(site: Site, tmp_path, name: str = "new", draft=None) -> str:
    """Register a draft for the worker's own target; its digest."""
    source = site.draft(name, draft)
    return site.add(source, target=digest_weights(tmp_path / "target")).digest


def stand(site: Site, role: WorkerRole, **fields) -> None:
    write_active_draft(site.directory, ActiveDraft(target=role.worker.weights, **fields))


def chosen(role: WorkerRole, candidate: CandidateDraft | None = None) -> ChosenPlan:
    return role._choose(RestartRequest(with_draft=True, candidate=candidate))


def drafts_with(plan: LaunchPlan) -> str:
    """The directory of the draft in a plan's command line."""
    return json.loads(plan.argv[plan.argv.index("--speculative-config") + 1])["model"]


async def test_the_active_draft_replaces_that_of_the_settings(plan, site, tmp_path):
    """And pool, plugin and audit log show it; all else is the same."""
    role, pool, recorder = plan()
    new = registered(site, tmp_path)
    stand(site, role, draft=new)
    start = chosen(role)
    usual = role._supervisor._plans._plan
    assert drafts_with(start.plan) == str(site.directory / "revisions" / new[7:] / "weights")
    assert {**start.plan.environment, DRAFT_DIGEST: usual.draft} == dict(usual.environment)
    assert (start.plan.draft, start.is_trial, start.plan.port) == (new, False, usual.port)
    saw(role, *UP, draft=new)
    assert pool.snapshot(WORKER_ID).worker.draft == new
    assert pool.snapshot(WORKER_ID).worker.mode is SpeculationMode.SPECULATIVE
    assert recorder.entries[-1][1]["draft"] == new
    assert recorder.entries[-1][1]["speculation_method"] == "eagle3"


@pytest.mark.parametrize(
    ("report", "promised"),
    [
        ({}, 2.6),
        ({"complete": False}, None),
        ({"target": f"sha256:{'9' * 64}"}, None),
        ({"expected": {}}, None),
        (None, None),
    ],
    ids=["measured", "half measured", "on another target", "measured nothing", "damaged"],
)
async def test_the_expectation_of_a_draft_is_its_evaluations(plan, site, tmp_path, report, promised):
    """Without an evaluation it is the training's, and here is none."""
    role, _, _ = plan()
    new = registered(site, tmp_path)
    stand(site, role, draft=new)
    assert EXPECTATION not in chosen(role).plan.environment
    measured = {"all": Expectation(acceptance_length=2.6, draft_tokens=3)}
    said = {"target": role.worker.weights, "expected": measured, **(report or {})}
    path = save_evaluation(site.directory, bare_report(new, **said), "<p>")
    if report is None:
        path.write_bytes(b"{")
    told = chosen(role).plan.environment.get(EXPECTATION)
    assert told == (promised and f'{{"acceptance_length":{promised},"draft_tokens":3}}')


async def test_a_draft_on_trial_is_started_only_during_its_promotion(plan, site, tmp_path):
    """Not for another promotion, and not after its end."""
    role, _, _ = plan()
    new = registered(site, tmp_path)
    stand(site, role, promotion="P1", candidate=new)
    tried = chosen(role, CandidateDraft(draft=new, promotion="P1"))
    assert (tried.plan.draft, tried.is_trial) == (new, True)
    for promotion, requested in (("P2", "P1"), (None, "P1")):
        stand(site, role, promotion=promotion, candidate=new if promotion else None)
        start = chosen(role, CandidateDraft(draft=new, promotion=requested))
        assert (start.plan, start.is_trial) == (role._supervisor._plans._plan, False)
    stand(site, role, draft=new)
    start = chosen(role, CandidateDraft(draft=new, promotion="P1"))
    assert (start.plan.draft, start.is_trial) == (new, False)


def damaged(site: Site, digest: str) -> None:
    """Change one byte of a registered draft."""
    file = site.directory / "revisions" / digest[7:] / "weights" / "model.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    rewrite(file, bytes(content))


@pytest.mark.parametrize("in_service", [True, False])
@pytest.mark.parametrize("fault", ["damaged", "gone", "does not fit", "for another target"])
async def test_an_unusable_draft_gives_way_to_the_next(plan, site, tmp_path, fault, in_service):
    """It is never started; output, log and audit log report it once per start."""
    role, _, recorder = plan()
    broken = eagle31()
    broken.drop("fc.weight")
    if fault == "for another target":
        new = site.add(site.draft("new"), target=f"sha256:{'9' * 64}").digest
    else:
        new = registered(site, tmp_path, draft=broken if fault == "does not fit" else None)
    if fault == "damaged":
        damaged(site, new)
    if fault == "gone":
        shutil.move(site.directory / "revisions" / new[7:], tmp_path / "gone")
    stand(site, role, **({"draft": new} if in_service else {"promotion": "P1", "candidate": new}))
    start = chosen(role, None if in_service else CandidateDraft(draft=new, promotion="P1"))
    assert (start.plan, start.is_trial) == (role._supervisor._plans._plan, False)
    saw(role, WorkerEventKind.STARTING)
    assert f"the draft {new} is not started: " in role.said.getvalue()
    ((entry_type, fields),) = recorder.entries
    if in_service:
        assert (entry_type, fields["previous_draft"]) == (EntryType.DRAFT_ROLLED_BACK, new)
        assert fields["draft"] == role.worker.draft
    else:
        assert (entry_type, fields["step"], fields["promotion"]) == (EntryType.DRAFT_TRIED, "failed", "P1")
    assert fields["actor"] == "worker"
    saw(role, WorkerEventKind.HEALTHY, WorkerEventKind.STARTING)
    assert len(recorder.entries) == 2


async def test_an_unusable_draft_on_trial_gives_way_to_the_active_one(plan, site, tmp_path):
    """Not to that of the settings, which may be outdated."""
    role, _, _ = plan()
    old, new = registered(site, tmp_path, "old"), registered(site, tmp_path, "new")
    damaged(site, new)
    stand(site, role, draft=old, promotion="P1", candidate=new)
    start = chosen(role, CandidateDraft(draft=new, promotion="P1"))
    assert (start.plan.draft, start.is_trial) == (old, False)


async def test_an_unreadable_record_of_the_active_draft_is_ignored(plan, site):
    """The draft of the settings serves, and the failure is reported."""
    role, _, recorder = plan()
    stand(site, role, draft=f"sha256:{'5' * 64}")
    (file,) = (site.directory / "standing").iterdir()
    rewrite(file, b"{")
    assert chosen(role).plan == role._supervisor._plans._plan
    saw(role, WorkerEventKind.STARTING)
    ((entry_type, fields),) = recorder.entries
    assert (entry_type, fields["previous_draft"]) == (EntryType.DRAFT_ROLLED_BACK, "unknown")


async def test_the_draft_of_the_settings_needs_no_registry(plan, site, tmp_path):
    """Also if the active draft is the same by digest."""
    role, _, _ = plan()
    stand(site, role, draft=role.worker.draft)
    start = chosen(role)
    assert start.plan == role._supervisor._plans._plan
    assert role._problems == ()


async def test_a_defect_in_choosing_starts_the_worker_as_the_settings_say(plan):
    role, _, _ = plan()
    role._choice.choose = lambda _candidate: 1 / 0
    assert chosen(role) == ChosenPlan(plan=role._supervisor._plans._plan)


async def test_a_worker_with_a_refused_settings_draft_may_get_another(plan, site, tmp_path):
    """It runs target-only until a draft that fits is active."""
    broken = eagle31()
    broken.drop("fc.weight")
    _, refused = write(broken, tmp_path / "refused")
    role, pool, _ = plan(draft=refused.path, bad_draft="target_only")
    assert role.worker.mode is SpeculationMode.TARGET_ONLY
    new = registered(site, tmp_path)
    stand(site, role, draft=new)
    assert chosen(role).plan.draft == new
    saw(role, *UP, draft=new)
    worker = pool.snapshot(WORKER_ID).worker
    assert (worker.draft, worker.mode, worker.reason) == (new, SpeculationMode.SPECULATIVE, None)


async def test_no_draft_is_tried_on_a_worker_with_another_method(plan):
    role, _, _ = plan(method="ngram", draft=None)
    role._supervisor = StandIn()
    request = RestartRequest(
        with_draft=True, candidate=CandidateDraft(draft=f"sha256:{'a' * 64}", promotion="P1")
    )
    with pytest.raises(ControlRefusedError, match="makes drafts by ngram"):
        await role.restart(role.worker, request=request, reason=Reason.OPERATOR_OVERRIDE)
    assert role._supervisor.requests == []

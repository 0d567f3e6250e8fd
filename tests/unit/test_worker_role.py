"""Promises of `appliance.worker_role`: what runs is what pool and audit log say, draft or no draft."""

import io
import json

import pytest
from prometheus_client import CollectorRegistry

from appliance.announce import Announcer
from appliance.audit.registry import REGISTRY, EntryType
from appliance.errors import ControlRefusedError
from appliance.installation import locate
from appliance.logs import configure_logs
from appliance.metrics import Metrics
from appliance.serving.pool import WorkerPool
from appliance.serving.supervise import WorkerEvent, WorkerEventKind
from appliance.serving.worker import Admission, Worker, WorkerId
from appliance.serving.worker_protocol import RESTART_FILE
from appliance.settings import DataSettings, LogSettings, Settings, WorkerSettings
from appliance.speculation import Reason, SpeculationMode
from appliance.worker_role import WORKER_ID, Listeners, WorkerRole
from tests.unit.drafts.lint.builder import eagle31, write


class Recorder:
    """Takes audit entries that fit their schema, and keeps them."""

    def __init__(self) -> None:
        self.entries = []

    def submit(self, entry_type, /, **fields):
        given = {name: value for name, value in fields.items() if value is not None}
        known = REGISTRY[entry_type].fields
        assert set(given) <= set(known)
        assert {name for name, field in known.items() if field.required} <= set(given)
        self.entries.append((entry_type, given))


class StandIn:
    """A supervisor that only remembers what it was told."""

    def __init__(self) -> None:
        self.restarts = []

    def restart(self, *, with_draft):
        self.restarts.append(with_draft)


@pytest.fixture
def plan(tmp_path):
    """A worker that is planned and told of, and never started."""
    target, draft = write(eagle31(), tmp_path)

    def run(**fields) -> tuple[WorkerRole, WorkerPool, Recorder]:
        chosen = {"model": target.path, "draft": draft.path, "device": "cpu", **fields}
        settings = Settings(worker=WorkerSettings(**chosen), data=DataSettings(directory=tmp_path / "data"))
        logger = configure_logs(LogSettings(level="error"), terminal=False)
        role = WorkerRole.plan(settings, locate(settings), logger, Announcer(io.StringIO()))
        pool, recorder = WorkerPool(), Recorder()
        role._listeners = Listeners(pool=pool, audit=recorder, metrics=Metrics(CollectorRegistry()))
        return role, pool, recorder

    return run


def saw(role: WorkerRole, *kinds: WorkerEventKind, hard_off: bool = False, exit_code: int | None = None):
    for kind in kinds:
        role.saw(WorkerEvent(kind=kind, worker=WORKER_ID, detail="x", hard_off=hard_off, exit_code=exit_code))


UP = (WorkerEventKind.STARTING, WorkerEventKind.HEALTHY)


@pytest.mark.parametrize("task", ["embed", "score"])
def test_a_worker_that_generates_nothing_is_planned_without_a_draft(plan, tmp_path, task):
    """The draft of the settings is neither judged nor read: it may be for another model."""
    role, _, _ = plan(task=task, draft=tmp_path / "nowhere")
    assert (role.worker.draft, role.worker.mode) == ("", SpeculationMode.TARGET_ONLY)
    assert role._supervisor._plans._target_only is None


def test_both_plans_differ_in_the_draft_alone(plan):
    """Same port, same environment, same target: a hard-off changes nothing else."""
    role, _, _ = plan()
    plans = role._supervisor._plans
    both, alone = plans._plan, plans._target_only
    assert json.loads(both.argv[both.argv.index("--speculative-config") + 1])["method"] == "eagle3"
    assert "--speculative-config" not in alone.argv
    assert (both.url, both.port, dict(both.environment)) == (alone.url, alone.port, dict(alone.environment))
    assert set(alone.argv) < set(both.argv)


@pytest.mark.parametrize("method", ["ngram", "mtp"])
def test_a_method_without_weights_can_be_left_out_as_well(plan, method):
    """What costs is drafting, whoever drafts."""
    role, _, _ = plan(method=method, draft=None)
    assert role._supervisor._plans._target_only is not None


def test_a_target_alone_has_one_plan(plan):
    """There is nothing to leave out."""
    role, _, _ = plan(method="none", draft=None)
    assert role._supervisor._plans._target_only is None
    assert role.worker.mode is SpeculationMode.TARGET_ONLY


def test_worker_and_supervisor_agree_on_where_the_wish_is_left(plan, tmp_path):
    """In the data directory, where only we can write."""
    role, _, _ = plan()
    plans, wish = role._supervisor._plans, tmp_path / "data" / "worker-1.restart"
    assert plans._restart_file == wish
    assert {each.environment[RESTART_FILE] for each in (plans._plan, plans._target_only)} == {str(wish)}


async def test_without_its_draft_pool_and_audit_log_say_so(plan):
    """And with it again: mode, digest and method follow what runs."""
    role, pool, recorder = plan()
    role._supervisor = StandIn()
    digest = role.worker.draft
    saw(role, *UP)
    await role.restart(pool.snapshot(WORKER_ID).worker, with_draft=False, reason=Reason.COLLAPSED)
    saw(role, *UP, hard_off=True)
    worker = pool.snapshot(WORKER_ID).worker
    assert (worker.mode, worker.draft) == (SpeculationMode.TARGET_ONLY, "")
    assert worker.reason is role.worker.reason is Reason.COLLAPSED
    await role.restart(worker, with_draft=True, reason=Reason.PROBING)
    saw(role, *UP)
    worker = pool.snapshot(WORKER_ID).worker
    assert (worker.mode, worker.draft) == (SpeculationMode.SPECULATIVE, digest)
    assert worker.reason is None
    assert role._supervisor.restarts == [False, True]
    assert [entry_type for entry_type, _ in recorder.entries] == [EntryType.WORKER_STARTED] * 3
    methods = [(fields["speculation_method"], fields.get("draft")) for _, fields in recorder.entries]
    assert methods == [("eagle3", digest), ("none", None), ("eagle3", digest)]


def test_a_crash_later_changes_nothing_of_that(plan):
    """The supervisor starts the same plan, and the pool hears the same."""
    role, pool, _ = plan()
    saw(role, *UP, hard_off=True)
    before = pool.snapshot(WORKER_ID).worker
    saw(role, WorkerEventKind.DIED, WorkerEventKind.RESTARTING, *UP, hard_off=True)
    after = pool.snapshot(WORKER_ID).worker
    assert after == before
    assert after is not before


def test_what_was_found_about_a_draft_is_not_said_of_a_worker_without(plan):
    """The entry binds what is served, not what was asked for."""
    role, _, recorder = plan(max_model_len=2048)
    saw(role, *UP)
    saw(role, *UP, hard_off=True)
    assert [fields.get("draft_lint") for _, fields in recorder.entries] == [
        ["max-position-embeddings"],
        None,
    ]


def test_a_wanted_end_is_no_failure_in_the_audit_log(plan):
    """It stopped because it was told to, and takes nothing until it is looked at again."""
    role, pool, recorder = plan()
    saw(role, *UP)
    saw(role, WorkerEventKind.RECYCLING, exit_code=-15)
    assert recorder.entries[-1] == (
        EntryType.WORKER_STOPPED,
        {"worker": WORKER_ID, "reason": "recycled", "exit_code": -15},
    )
    assert not pool.any_healthy()


def test_a_start_admits_nobody(plan):
    """Whoever recycles decides when it gets requests."""
    role, pool, _ = plan()
    saw(role, *UP)
    pool.set_admission(WORKER_ID, Admission.CANARY)
    saw(role, WorkerEventKind.RECYCLING, *UP)
    assert pool.snapshot(WORKER_ID).admission is Admission.CANARY


def test_the_worker_knows_how_it_runs_also_where_nobody_listens(plan):
    """`appliance worker` has no pool."""
    role, _, _ = plan()
    role._listeners = None
    saw(role, *UP, hard_off=True)
    assert role.worker.mode is SpeculationMode.TARGET_ONLY


async def test_a_worker_that_cannot_be_restarted_as_asked_refuses(plan):
    """Another one, one without a draft to come back with, one that does not run."""
    role, _, _ = plan()
    other = Worker(worker_id=WorkerId("other"), url="http://127.0.0.1:9")
    with pytest.raises(ControlRefusedError, match="worker other was not started by this process"):
        await role.restart(other, with_draft=True, reason=Reason.COLLAPSED)
    with pytest.raises(ControlRefusedError, match="not kept running"):
        await role.restart(role.worker, with_draft=True, reason=Reason.COLLAPSED)
    alone, _, _ = plan(method="none", draft=None)
    alone._supervisor = StandIn()
    with pytest.raises(ControlRefusedError, match="planned without a draft"):
        await alone.restart(alone.worker, with_draft=True, reason=Reason.COLLAPSED)
    await alone.restart(alone.worker, with_draft=False, reason=Reason.OPERATOR_OVERRIDE)
    assert alone._supervisor.restarts == [False]

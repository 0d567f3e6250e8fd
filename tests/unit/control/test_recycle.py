"""One worker at a time, never the last, and none is admitted without a canary."""

import asyncio
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry

from appliance.audit.entry_types import EntryType
from appliance.control.recycle import RecycleParts, Recycler, RecycleResult, is_new_process, refusal
from appliance.errors import AuditUnavailableError, ControlRefusedError, WorkerFailedError
from appliance.infra.logs import configure_logs
from appliance.infra.metrics import Metrics
from appliance.infra.settings import LogSettings, RecycleSettings
from appliance.serving.pool import WorkerPool
from appliance.serving.restart_request import CandidateDraft, RestartRequest
from appliance.serving.worker import Admission, ServedModel, Worker, WorkerId, WorkerSnapshot
from appliance.serving.worker_metrics import WorkerMetrics
from appliance.speculation.values import NO_DRAFTS, EngineReading, Reason, SpeculationMode
from tests.fakes import audit_fields

A, B = WorkerId("a"), WorkerId("b")
DRAIN, START = 30.0, 100.0
SETTINGS = RecycleSettings(drain_seconds=DRAIN, start_seconds=START)
OLD, NEW = f"sha256:{'1' * 64}", f"sha256:{'2' * 64}"
TRIED = CandidateDraft(draft=NEW, promotion="P1")
LOADED = 5.0
"""Seconds a worker takes to start."""


def metrics(*, running: int = 0, waiting: int = 0, draft: bool = True) -> WorkerMetrics:
    return WorkerMetrics(
        running=running,
        waiting=waiting,
        kv_cache_usage=0.0,
        prompt_tokens_total=0,
        generation_tokens_total=0,
        preemptions_total=0,
        finished_requests_total={},
        speculation=NO_DRAFTS if draft else None,
    )


def snapshot(name: str, **fields) -> WorkerSnapshot:
    worker = Worker(worker_id=WorkerId(name), url=f"http://127.0.0.1/{name}")
    models = fields.pop("models", ("demo",))
    served = tuple(ServedModel(name=model, max_model_len=None, created=1) for model in models)
    return WorkerSnapshot(worker=worker, models=served, **{"healthy": True, "metrics": metrics(), **fields})


def reading_of(engine) -> EngineReading | None:
    target = f"sha256:{'0' * 64}"
    if not engine.epoch:
        return None
    return EngineReading(controllable=True, epoch=engine.epoch, target=target, draft=engine.serves)


@dataclass
class Engine:
    """One process of a worker, as the control loop finds it."""

    draft: bool = True
    epoch: str = "1"
    running: int = 0
    waiting: int = 0
    up_at: float = 0.0
    answers: bool = True
    """Whether it completes a canary."""
    models: tuple[str, ...] = ("demo",)
    serves: str = OLD
    """The draft that its plugin reports."""


@dataclass
class World:
    """Two workers, a control loop that polls each second, and a clock that only waiting moves."""

    own: bool = True
    """Whether this process supervises the worker `a`."""
    now: float = 0.0
    polled_at: float = 0.0
    drains: float = 2.0
    """Seconds for which the old process still answers after the restart request."""
    brings: list[Engine] = field(default_factory=list)
    """The processes after each restart, in order; by default healthy ones as requested."""
    refuses: list[Exception] = field(default_factory=list)
    """What restarts raise, in order."""
    audit_is_full: bool = False
    restarts: list[bool] = field(default_factory=list)
    requests: list[RestartRequest] = field(default_factory=list)
    canaries: list[Admission] = field(default_factory=list)
    entries: list[dict] = field(default_factory=list)
    admissions: list[Admission] = field(default_factory=list)
    at: dict[float, object] = field(default_factory=dict)
    """What happens at a time."""

    def __post_init__(self):
        self.pool = WorkerPool()
        self.metrics = Metrics(CollectorRegistry())
        self.engines = {A: Engine(), B: Engine()}
        self.ending: tuple[float, Engine] | None = None
        for name in (A, B):
            self.pool.add(snapshot(name).worker)
        self.poll()
        set_admission = self.pool.set_admission

        def note_admission(worker_id, admission):
            if worker_id == A:
                self.admissions.append(admission)
            set_admission(worker_id, admission)

        self.pool.set_admission = note_admission
        self.recycler = Recycler(
            RecycleParts(
                pool=self.pool,
                client=self,
                own={A: self} if self.own else {},
                others=self,
                audit=self,
                metrics=self.metrics,
                logger=configure_logs(LogSettings(level="error"), terminal=False),
            ),
            settings=SETTINGS,
            clock=lambda: self.now,
            sleep=self.sleep,
        )

    def poll(self):
        """Poll every worker."""
        for name, engine in self.engines.items():
            before = self.pool.snapshot(name)
            if self.now < engine.up_at:
                self.pool.update(replace(before, healthy=False))
                continue
            self.pool.update(
                replace(
                    snapshot(name, models=engine.models),
                    worker=before.worker,
                    metrics=metrics(running=engine.running, waiting=engine.waiting, draft=engine.draft),
                    reading=reading_of(engine),
                    seen_at=self.now,
                )
            )

    async def sleep(self, seconds: float):
        self.now += seconds
        for due in sorted(time for time in self.at if time <= self.now):
            self.at.pop(due)()
        if self.ending is not None and self.now >= self.ending[0]:
            self.engines[A], self.ending = self.ending[1], None
            if self.own:
                self.pool.add(replace(self.pool.snapshot(A).worker))
        if self.now - self.polled_at >= 1.0:
            self.polled_at = self.now
            self.poll()
        await asyncio.sleep(0)

    async def restart(self, worker, *, request, reason):
        assert worker.worker_id == A
        if self.refuses and (refusal := self.refuses.pop(0)) is not None:
            raise refusal
        self.restarts.append(request.with_draft)
        self.requests.append(request)
        serves = (request.candidate.draft if request.candidate else OLD) if request.with_draft else ""
        coming = self.brings.pop(0) if self.brings else Engine(draft=request.with_draft, serves=serves)
        coming.up_at += self.now + self.drains + LOADED
        coming.epoch = coming.epoch and f"{len(self.restarts) + 1}"
        self.ending = (self.now + self.drains, coming)

    async def canary(self, worker, model, timeout_seconds):
        assert (worker, model) == (self.pool.snapshot(A).worker, "demo")
        self.canaries.append(self.pool.snapshot(A).admission)
        if not self.engines[A].answers:
            raise WorkerFailedError("The worker answered 500 to /v1/completions.")
        return 8

    def submit(self, entry_type, /, **fields):
        if self.audit_is_full:
            raise AuditUnavailableError("full")
        assert entry_type is EntryType.WORKER_RECYCLED
        self.entries.append(audit_fields(entry_type, fields))

    @property
    def admission(self) -> Admission:
        return self.pool.snapshot(A).admission

    async def recycle(self, *, with_draft: bool = True, reason: Reason = Reason.COLLAPSED) -> RecycleResult:
        async with asyncio.timeout(20):
            return await self.recycler.begin(A, with_draft=with_draft, reason=reason)

    def counted(self, result: RecycleResult, reason: Reason = Reason.COLLAPSED) -> float:
        return self.metrics.worker_recycles.labels(A, reason, result)._value.get()

    def is_left_out(self) -> bool:
        return bool(self.metrics.worker_left_out.labels(A)._value.get())


BOTH = pytest.mark.parametrize("own", [True, False], ids=["own", "elsewhere"])


@BOTH
@pytest.mark.parametrize("with_draft", [True, False])
async def test_a_recycle_drains_restarts_tests_and_admits(own, with_draft):
    """In that order; before its canary it gets no client's request."""
    world = World(own=own)
    old = world.pool.snapshot(A).worker
    assert await world.recycle(with_draft=with_draft) is RecycleResult.RECYCLED
    assert world.admissions == [Admission.DRAINING, Admission.CANARY, Admission.ADMITTED]
    assert (world.restarts, world.canaries) == ([with_draft], [Admission.CANARY] * 3)
    assert world.pool.snapshot(A).takes_requests
    assert world.pool.snapshot(A).worker is not old
    assert world.counted(RecycleResult.RECYCLED) == 1
    assert not world.is_left_out()


@BOTH
async def test_a_recycle_is_recorded_with_reason_and_canary_result(own):
    world = World(own=own)
    task = world.recycler.begin(A, with_draft=False, reason=Reason.OPERATOR_OVERRIDE, actor="k1", note="hot")
    await task
    common = {"worker": A, "reason": "operator_override", "with_draft": False, "actor": "k1", "note": "hot"}
    assert world.entries == [common, {**common, "canary": "passed"}]


async def test_a_log_that_takes_no_entry_does_not_stop_a_restart():
    """A worker in the middle of a recycle must not stay there."""
    world = World(audit_is_full=True)
    assert await world.recycle() is RecycleResult.RECYCLED


async def test_the_pool_learns_mode_and_reason_of_a_worker_elsewhere():
    """No supervisor in this process reports it."""
    world = World(own=False)
    await world.recycle(with_draft=False)
    worker = world.pool.snapshot(A).worker
    assert (worker.mode, worker.reason) == (SpeculationMode.TARGET_ONLY, Reason.COLLAPSED)
    await world.recycle(with_draft=True, reason=Reason.TOO_FEW_DRAFTS)
    worker = world.pool.snapshot(A).worker
    assert (worker.mode, worker.reason) == (SpeculationMode.SPECULATIVE, None)


async def test_no_restart_while_this_gateway_has_requests_in_flight():
    world = World()
    world.pool.begin(A)
    seen = []
    world.at[10.0] = lambda: (seen.append(list(world.restarts)), world.pool.end(A))
    assert await world.recycle() is RecycleResult.RECYCLED
    assert seen == [[]]
    assert world.restarts == [True]


@pytest.mark.parametrize("busy", ["running", "waiting"])
async def test_no_restart_while_other_gateways_have_requests_in_flight(busy):
    """Other gateways' requests show in the worker's metrics only."""
    world, seen = World(), []
    setattr(world.engines[A], busy, 1)
    world.poll()

    def ends():
        seen.append(list(world.restarts))
        setattr(world.engines[A], busy, 0)

    world.at[10.0] = ends
    assert await world.recycle() is RecycleResult.RECYCLED
    assert seen == [[]]


async def test_a_scrape_from_before_the_last_request_ended_does_not_count():
    world = World()
    assert world.pool.snapshot(A).metrics.running == 0
    world.engines[A].running = 1
    world.at[DRAIN - 1] = lambda: setattr(world.engines[A], "running", 0)
    told = []
    world.at[DRAIN - 2] = lambda: told.append(list(world.restarts))
    await world.recycle()
    assert told == [[]]


async def test_a_scrape_older_than_our_last_request_does_not_count():
    """It may have got another gateway's request since."""
    world, told = World(), []
    world.pool.begin(A)

    def ends():
        world.engines[A].running = 1
        world.pool.end(A)

    world.at[10.3] = ends
    world.at[20.0] = lambda: (told.append(list(world.restarts)), setattr(world.engines[A], "running", 0))
    assert await world.recycle() is RecycleResult.RECYCLED
    assert told == [[]]


async def test_a_drain_that_times_out_ends_in_a_restart():
    """A client that reads slowly must not keep a failing worker in service."""
    world, restarted = World(), []
    world.at[DRAIN - 1] = lambda: restarted.append(list(world.restarts))
    world.at[DRAIN + 1] = lambda: restarted.append(list(world.restarts))
    world.pool.begin(A)
    assert await world.recycle() is RecycleResult.RECYCLED
    assert restarted == [[], [True]]


async def test_a_worker_that_is_down_is_not_waited_for():
    world = World()
    world.engines[A].up_at = 1e9
    world.poll()
    task = world.recycler.begin(A, with_draft=True, reason=Reason.COLLAPSED)
    world.at[1.0] = lambda: world.entries.append("one second")
    assert await task is RecycleResult.RECYCLED
    assert world.entries.index("one second") == 1


@BOTH
async def test_the_draining_process_does_not_pass_for_the_new_one(own):
    """It still answers health checks; a canary that it passes proves nothing."""
    world = World(own=own, drains=20.0)
    assert await world.recycle() is RecycleResult.RECYCLED
    assert len(world.restarts) == 1
    assert world.now > 20.0 + LOADED


async def test_a_supervised_worker_is_back_only_with_a_new_process():
    world = World(drains=20.0)
    world.engines[A].epoch = ""
    world.poll()
    world.at[5.0] = lambda: world.pool.report_unreachable(A)
    assert await world.recycle() is RecycleResult.RECYCLED
    assert len(world.restarts) == 1
    assert world.now > 20.0 + LOADED


async def test_a_worker_without_the_plugin_is_back_once_it_was_down():
    """There is no epoch to distinguish the processes."""
    world = World(own=False, brings=[Engine(epoch="")])
    world.engines[A].epoch = ""
    world.poll()
    assert await world.recycle() is RecycleResult.RECYCLED


@BOTH
async def test_a_worker_that_fails_its_canary_is_restarted_again(own):
    world = World(own=own, brings=[Engine(answers=False)])
    assert await world.recycle() is RecycleResult.RECYCLED
    assert world.restarts == [True, True]
    assert [entry.get("canary") for entry in world.entries] == [None, "failed", None, "passed"]
    assert Admission.ADMITTED not in world.admissions[:-1]


@BOTH
@pytest.mark.parametrize(
    "unsound",
    [{"answers": False}, {"draft": False}, {"up_at": 1e9}, {"models": ()}],
    ids=["does not answer", "came back without its draft", "does not start", "serves nothing"],
)
async def test_a_worker_that_fails_with_its_draft_comes_back_without(own, unsound):
    world = World(own=own, brings=[Engine(**unsound), Engine(**unsound)])
    assert await world.recycle() is RecycleResult.WITHOUT_DRAFT
    assert world.restarts == [True, True, False]
    assert world.admission is Admission.ADMITTED
    assert [entry.get("canary") for entry in world.entries] == [None, "failed"] * 2 + [None, "passed"]
    assert [entry["with_draft"] for entry in world.entries] == [True] * 4 + [False] * 2


@BOTH
@pytest.mark.parametrize(("with_draft", "restarts"), [(True, [True, True, False]), (False, [False, False])])
async def test_a_worker_that_keeps_failing_is_excluded_and_reported(own, with_draft, restarts):
    world = World(own=own, brings=[Engine(answers=False, draft=draft) for draft in restarts])
    assert await world.recycle(with_draft=with_draft) is RecycleResult.FAILED
    assert world.restarts == restarts
    assert world.admission is Admission.CANARY
    assert world.is_left_out()
    assert world.counted(RecycleResult.FAILED) == 1
    assert world.entries[-1]["canary"] == "failed"
    # Recycling it again is how it comes back.
    assert world.recycler.refusal(A) is None
    assert await world.recycle() is RecycleResult.RECYCLED
    assert not world.is_left_out()


@pytest.mark.parametrize("error", [ControlRefusedError("no"), WorkerFailedError("gone")])
async def test_a_worker_that_cannot_be_restarted_continues_unchanged(error):
    """And nothing is recorded."""
    world = World(refuses=[error])
    assert await world.recycle() is RecycleResult.NOT_RESTARTED
    assert world.admissions == [Admission.DRAINING, Admission.ADMITTED]
    assert (world.entries, world.canaries) == ([], [])
    assert not world.is_left_out()


async def test_an_excluded_worker_stays_excluded_if_its_restart_is_refused():
    world = World(refuses=[ControlRefusedError("no")])
    world.pool.set_admission(A, Admission.CANARY)
    assert await world.recycle() is RecycleResult.NOT_RESTARTED
    assert world.admission is Admission.CANARY
    assert world.is_left_out()


async def test_a_refused_second_attempt_continues_with_the_next():
    """And in the end without the draft."""
    world = World(brings=[Engine(answers=False)], refuses=[None, WorkerFailedError("gone"), None])
    assert await world.recycle() is RecycleResult.WITHOUT_DRAFT
    assert world.restarts == [True, False]


async def test_a_defect_ends_in_a_result_and_excludes_the_worker():
    world = World(refuses=[RuntimeError("a bug")])
    assert await world.recycle() is RecycleResult.FAILED
    assert world.admission is Admission.CANARY
    assert world.is_left_out()


async def test_only_one_worker_is_recycled_at_a_time():
    """A second one is refused until the first is done."""
    world = World()
    task = world.recycler.begin(A, with_draft=True, reason=Reason.COLLAPSED)
    assert world.recycler.current == A
    for name in (A, B):
        with pytest.raises(ControlRefusedError, match="worker a is being recycled"):
            await world.recycler.begin(name, with_draft=True, reason=Reason.COLLAPSED)
    assert await task is RecycleResult.RECYCLED
    assert world.recycler.current is None
    assert world.recycler.refusal(B) is None


async def test_a_refused_recycle_changes_nothing():
    """The last worker continues to serve."""
    world = World()
    world.engines[B].up_at = 1e9
    world.poll()
    with pytest.raises(ControlRefusedError, match="worker b is down"):
        world.recycler.begin(A, with_draft=True, reason=Reason.COLLAPSED)
    assert (world.admissions, world.restarts, world.recycler.current) == ([], [], None)


@pytest.mark.parametrize("steps", range(0, 60, 4))
async def test_a_cancelled_recycle_restores_or_excludes_the_worker(steps):
    """Before the restart it takes requests again; after it, not without a canary."""
    world = World()
    world.pool.begin(A)
    world.at[2.0] = lambda: world.pool.end(A)
    task = world.recycler.begin(A, with_draft=True, reason=Reason.COLLAPSED)
    for _ in range(steps):
        await asyncio.sleep(0)
    was_done = task.done()
    await world.recycler.close()
    assert world.recycler.current is None
    if was_done:
        assert task.result() is RecycleResult.RECYCLED
    else:
        assert task.cancelled()
    is_let_in = was_done or not world.restarts
    assert world.admission is (Admission.ADMITTED if is_let_in else Admission.CANARY)
    assert world.is_left_out() is not is_let_in
    if steps and not was_done:
        assert world.counted(RecycleResult.CANCELLED) == 1


async def test_a_recycle_cancelled_during_the_restart_request_excludes_it():
    """The request may have arrived."""
    world, asked = World(), asyncio.Event()

    async def never(*_, **__):
        asked.set()
        await asyncio.Event().wait()

    world.restart = never
    world.recycler.begin(A, with_draft=True, reason=Reason.COLLAPSED)
    async with asyncio.timeout(5):
        await asked.wait()
    await world.recycler.close()
    assert world.admission is Admission.CANARY


async def tried(world: World, **how) -> RecycleResult:
    """Recycle the worker with a draft on trial."""
    async with asyncio.timeout(20):
        return await world.recycler.begin(
            A, with_draft=True, reason=Reason.OPERATOR_OVERRIDE, candidate=TRIED, **how
        )


async def test_the_restart_request_names_the_draft_on_trial():
    """With the promotion it belongs to: the supervisor starts it for no other reason."""
    world = World(own=False)
    assert await tried(world) is RecycleResult.RECYCLED
    assert world.requests == [RestartRequest(with_draft=True, candidate=TRIED)]
    assert world.pool.snapshot(A).draft == NEW


@pytest.mark.parametrize(
    "unsound",
    [{"answers": False}, {"draft": False}, {"up_at": 1e9}, {"models": ()}],
    ids=["does not answer", "came back without", "does not start", "serves nothing"],
)
async def test_a_draft_on_trial_gets_one_attempt_then_the_active_one(unsound):
    """It is not worth a second restart: the worker is worth more."""
    world = World(own=False, brings=[Engine(serves=NEW, **unsound)])
    assert await tried(world) is RecycleResult.WITHOUT_DRAFT
    assert world.requests == [
        RestartRequest(with_draft=True, candidate=TRIED),
        RestartRequest(with_draft=True),
    ]
    assert (world.admission, world.pool.snapshot(A).draft) == (Admission.ADMITTED, OLD)


async def test_a_worker_with_another_draft_serves_and_is_reported():
    """Its supervisor refused the draft on trial; another restart would change nothing."""
    world = World(own=False, brings=[Engine(serves=OLD)])
    assert await tried(world) is RecycleResult.WITHOUT_DRAFT
    assert len(world.requests) == 1
    assert world.admission is Admission.ADMITTED


async def test_a_worker_is_not_admitted_before_it_reports_its_draft():
    coming = Engine(serves=NEW, epoch="")
    world = World(own=False, brings=[coming])
    world.at[20.0] = lambda: setattr(coming, "epoch", "2")
    assert await tried(world) is RecycleResult.RECYCLED
    assert world.now >= 20.0


async def test_only_the_holder_of_the_reservation_can_begin():
    """A promotion restarts several workers in a row without another restart in between."""
    world = World()
    world.recycler.reserve("promotion P1")
    assert world.recycler.refusal(A) == "promotion P1 is in progress: wait until it is done"
    with pytest.raises(ControlRefusedError, match="promotion P1 is in progress"):
        world.recycler.begin(A, with_draft=False, reason=Reason.COLLAPSED)
    with pytest.raises(ControlRefusedError, match="promotion P1 is in progress"):
        world.recycler.reserve("promotion P2")
    world.recycler.release("promotion P2")
    assert world.recycler.refusal(A, holder="promotion P1") is None
    world.recycler.release("promotion P1")
    assert await world.recycle() is RecycleResult.RECYCLED


def test_allowed_downtime_waives_only_the_last_worker_rule():
    """The last worker may be restarted; one next to a worker that is down may not."""
    assert refusal([snapshot("a")], A, allow_downtime=True) is None
    others = [snapshot("a"), snapshot("b", healthy=False)]
    assert "worker b is down" in refusal(others, A, allow_downtime=True)


async def test_closing_an_idle_recycler_does_nothing():
    await World().recycler.close()


def test_the_only_worker_is_never_recycled():
    assert "only one" in refusal([snapshot("a")], A)


def test_a_worker_that_leaves_is_not_recycled():
    assert "leaving" in refusal([snapshot("a", leaving=True), snapshot("b")], A)


@pytest.mark.parametrize(("at", "result"), [(0.0, RecycleResult.NOT_RESTARTED), (8.0, RecycleResult.FAILED)])
async def test_a_worker_that_leaves_ends_its_recycle(at, result):
    world = World()
    world.brings = [Engine(answers=False)]
    world.at[at] = lambda: (world.pool.leave(A), world.engines.pop(A))
    world.pool.begin(A)
    world.at[0.1] = lambda: world.pool.end(A)
    assert await world.recycler.begin(A, with_draft=True, reason=Reason.COLLAPSED) is result
    assert world.pool.snapshot(A) is None


def test_an_unknown_worker_is_not_recycled():
    assert refusal([snapshot("b")], A) == "there is no worker a"


@pytest.mark.parametrize(
    ("other", "why"),
    [
        ({"healthy": False}, "worker b is down"),
        ({"admission": Admission.DRAINING}, "worker b is being recycled"),
        ({"admission": Admission.CANARY}, "worker b is not admitted"),
        ({"drained": True}, "worker b is drained"),
        ({"leaving": True}, "only one"),
        ({"models": ("other",)}, "last one that serves demo"),
        ({"models": ()}, "last one that serves demo"),
    ],
)
def test_no_recycle_if_the_other_worker_cannot_take_over(other, why):
    assert why in refusal([snapshot("a"), snapshot("b", **other)], A)


def test_each_of_its_models_must_have_another_worker():
    """Not necessarily the same one."""
    chosen = snapshot("a", models=("demo", "large"))
    assert "serves large" in refusal([chosen, snapshot("b")], A)
    assert refusal([chosen, snapshot("b"), snapshot("c", models=("large",))], A) is None


ANY = st.builds(
    lambda name, healthy, admission, models: snapshot(
        name, healthy=healthy, admission=admission, models=tuple(models)
    ),
    st.just("x"),
    st.booleans(),
    st.sampled_from(Admission),
    st.sets(st.sampled_from(["demo", "large"])),
)


@given(st.lists(ANY, min_size=1, max_size=4), st.data())
def test_a_recycle_leaves_every_model_with_a_worker(snapshots, data):
    """And no two workers are down at once."""
    snapshots = [
        replace(one, worker=replace(one.worker, worker_id=WorkerId(str(number))))
        for number, one in enumerate(snapshots)
    ]
    chosen = data.draw(st.sampled_from(snapshots))
    if refusal(snapshots, chosen.worker.worker_id) is not None:
        return
    others = [one for one in snapshots if one is not chosen]
    assert all(one.admission is not Admission.DRAINING for one in others)
    for model in ("demo", "large"):
        if any(one.takes_requests and one.serves(model) for one in snapshots):
            assert any(one.takes_requests and one.serves(model) for one in others)


def test_a_new_process_shows_by_supervisor_epoch_or_downtime():
    before = snapshot("a")
    one, two = (
        replace(before, reading=EngineReading(controllable=True, epoch=epoch)) for epoch in ("1", "2")
    )
    assert is_new_process(before, replace(before, worker=replace(before.worker)), was_down=False)
    assert is_new_process(one, two, was_down=False)
    assert not is_new_process(one, replace(one), was_down=True)
    assert not is_new_process(before, before, was_down=False)
    assert is_new_process(before, before, was_down=True)
    assert is_new_process(one, before, was_down=True)

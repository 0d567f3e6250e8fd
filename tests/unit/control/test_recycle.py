"""One worker at a time, never the last, and none comes back untried."""

import asyncio
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry

from appliance.audit.registry import EntryType
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
    """One process of a worker, as the control loop would find it."""

    draft: bool = True
    epoch: str = "1"
    running: int = 0
    waiting: int = 0
    up_at: float = 0.0
    answers: bool = True
    """Whether it completes a canary."""
    models: tuple[str, ...] = ("demo",)
    serves: str = OLD
    """The draft that its plugin says it has."""


@dataclass
class World:
    """Two workers, a control loop that looks each second, and a clock that only waiting moves."""

    own: bool = True
    """Whether this process supervises the worker `a`, or another one does."""
    now: float = 0.0
    looked_at: float = 0.0
    drains: float = 2.0
    """Seconds for which the old process still answers after it was told to end."""
    brings: list[Engine] = field(default_factory=list)
    """The processes that restarts bring, in order; by default sound ones, as asked for."""
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
        self.look()
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

    def look(self):
        """See of every worker what the control loop would."""
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
        """Let time pass, and what falls due with it."""
        self.now += seconds
        for due in sorted(time for time in self.at if time <= self.now):
            self.at.pop(due)()
        if self.ending is not None and self.now >= self.ending[0]:
            self.engines[A], self.ending = self.ending[1], None
            if self.own:
                self.pool.add(replace(self.pool.snapshot(A).worker))
        if self.now - self.looked_at >= 1.0:
            self.looked_at = self.now
            self.look()
        await asyncio.sleep(0)

    async def restart(self, worker, *, request, reason):
        """Be the restarter."""
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
        """Be the client."""
        assert (worker, model) == (self.pool.snapshot(A).worker, "demo")
        self.canaries.append(self.pool.snapshot(A).admission)
        if not self.engines[A].answers:
            raise WorkerFailedError("The worker answered 500 to /v1/completions.")
        return 8

    def submit(self, entry_type, /, **fields):
        """Be the audit log."""
        if self.audit_is_full:
            raise AuditUnavailableError("full")
        assert entry_type is EntryType.WORKER_RECYCLED
        self.entries.append(audit_fields(entry_type, fields))

    @property
    def admission(self) -> Admission:
        return self.pool.snapshot(A).admission

    async def recycle(self, *, with_draft: bool = True, reason: Reason = Reason.COLLAPSED) -> RecycleResult:
        async with asyncio.timeout(20):
            return await self.recycler.recycle(A, with_draft=with_draft, reason=reason)

    def counted(self, result: RecycleResult, reason: Reason = Reason.COLLAPSED) -> float:
        return self.metrics.worker_recycles.labels(A, reason, result)._value.get()

    def is_left_out(self) -> bool:
        return bool(self.metrics.worker_left_out.labels(A)._value.get())


BOTH = pytest.mark.parametrize("own", [True, False], ids=["own", "elsewhere"])


@BOTH
@pytest.mark.parametrize("with_draft", [True, False])
async def test_a_worker_is_drained_restarted_tried_out_and_let_in(own, with_draft):
    """In that order; until it has answered us it answers nobody."""
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
async def test_the_audit_log_says_why_and_how_it_went(own):
    """Before the gap and after it, in the reason's own word."""
    world = World(own=own)
    task = world.recycler.begin(A, with_draft=False, reason=Reason.OPERATOR_OVERRIDE, actor="k1", note="hot")
    await task
    common = {"worker": A, "reason": "operator_override", "with_draft": False, "actor": "k1", "note": "hot"}
    assert world.entries == [common, {**common, "canary": "passed"}]


async def test_a_log_that_takes_nothing_stops_no_restart():
    """A worker that is half-way through must not stay there."""
    world = World(audit_is_full=True)
    assert await world.recycle() is RecycleResult.RECYCLED


async def test_a_worker_elsewhere_is_known_to_run_without_its_draft_and_why():
    """Nobody else in this process could say so."""
    world = World(own=False)
    await world.recycle(with_draft=False)
    worker = world.pool.snapshot(A).worker
    assert (worker.mode, worker.reason) == (SpeculationMode.TARGET_ONLY, Reason.COLLAPSED)
    await world.recycle(with_draft=True, reason=Reason.PROBING)
    worker = world.pool.snapshot(A).worker
    assert (worker.mode, worker.reason) == (SpeculationMode.SPECULATIVE, None)


async def test_nothing_is_restarted_while_the_gateway_has_requests_there():
    """What runs is finished."""
    world = World()
    world.pool.begin(A)
    seen = []
    world.at[10.0] = lambda: (seen.append(list(world.restarts)), world.pool.end(A))
    assert await world.recycle() is RecycleResult.RECYCLED
    assert seen == [[]]
    assert world.restarts == [True]


@pytest.mark.parametrize("busy", ["running", "waiting"])
async def test_nothing_is_restarted_while_the_worker_has_requests_of_others(busy):
    """Another gateway's requests count as well, and they do not show here."""
    world, seen = World(), []
    setattr(world.engines[A], busy, 1)
    world.look()

    def ends():
        seen.append(list(world.restarts))
        setattr(world.engines[A], busy, 0)

    world.at[10.0] = ends
    assert await world.recycle() is RecycleResult.RECYCLED
    assert seen == [[]]


async def test_what_was_seen_before_the_last_request_ended_is_not_believed():
    """The last look may be older than the request it does not show."""
    world = World()
    assert world.pool.snapshot(A).metrics.running == 0
    world.engines[A].running = 1
    world.at[DRAIN - 1] = lambda: setattr(world.engines[A], "running", 0)
    told = []
    world.at[DRAIN - 2] = lambda: told.append(list(world.restarts))
    await world.recycle()
    assert told == [[]]


async def test_a_look_older_than_our_own_last_request_is_not_believed():
    """The worker was seen idle while we still had a request there; it may have got another since."""
    world, told = World(), []
    world.pool.begin(A)

    def ends():
        world.engines[A].running = 1
        world.pool.end(A)

    world.at[10.3] = ends
    world.at[20.0] = lambda: (told.append(list(world.restarts)), setattr(world.engines[A], "running", 0))
    assert await world.recycle() is RecycleResult.RECYCLED
    assert told == [[]]


async def test_a_drain_that_takes_too_long_ends_in_a_restart_all_the_same():
    """A client that reads slowly must not keep a sick worker in its place."""
    world, restarted = World(), []
    world.at[DRAIN - 1] = lambda: restarted.append(list(world.restarts))
    world.at[DRAIN + 1] = lambda: restarted.append(list(world.restarts))
    world.pool.begin(A)
    assert await world.recycle() is RecycleResult.RECYCLED
    assert restarted == [[], [True]]


async def test_a_worker_that_is_down_is_not_waited_for():
    """It finishes nothing any more."""
    world = World()
    world.engines[A].up_at = 1e9
    world.look()
    task = world.recycler.begin(A, with_draft=True, reason=Reason.COLLAPSED)
    world.at[1.0] = lambda: world.entries.append("one second")
    assert await task is RecycleResult.RECYCLED
    assert world.entries.index("one second") == 1


@BOTH
async def test_the_process_that_still_drains_is_not_taken_for_the_new_one(own):
    """It answers health checks and metrics for a while; a canary it passed would prove nothing."""
    world = World(own=own, drains=20.0)
    assert await world.recycle() is RecycleResult.RECYCLED
    assert len(world.restarts) == 1
    assert world.now > 20.0 + LOADED


async def test_a_worker_of_ours_is_not_back_before_its_supervisor_says_so():
    """The gateway found it unreachable while it drained, and then it answered again."""
    world = World(drains=20.0)
    world.engines[A].epoch = ""
    world.look()
    world.at[5.0] = lambda: world.pool.report_unreachable(A)
    assert await world.recycle() is RecycleResult.RECYCLED
    assert len(world.restarts) == 1
    assert world.now > 20.0 + LOADED


async def test_a_worker_without_the_plugin_is_back_once_it_was_down():
    """There is no epoch to tell the processes apart by."""
    world = World(own=False, brings=[Engine(epoch="")])
    world.engines[A].epoch = ""
    world.look()
    assert await world.recycle() is RecycleResult.RECYCLED


@BOTH
async def test_a_worker_that_fails_its_canary_is_restarted_once_more(own):
    """Once may be chance."""
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
async def test_a_worker_that_is_not_sound_with_its_draft_comes_back_without(own, unsound):
    """The target alone is worth more than no worker."""
    world = World(own=own, brings=[Engine(**unsound), Engine(**unsound)])
    assert await world.recycle() is RecycleResult.WITHOUT_DRAFT
    assert world.restarts == [True, True, False]
    assert world.admission is Admission.ADMITTED
    assert [entry.get("canary") for entry in world.entries] == [None, "failed"] * 2 + [None, "passed"]
    assert [entry["with_draft"] for entry in world.entries] == [True] * 4 + [False] * 2


@BOTH
@pytest.mark.parametrize(("with_draft", "restarts"), [(True, [True, True, False]), (False, [False, False])])
async def test_a_worker_that_never_comes_back_sound_is_left_out_and_said_to_be(own, with_draft, restarts):
    """Nobody's request is the first to find out."""
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
async def test_a_worker_that_cannot_be_restarted_goes_on_as_it_was(error):
    """Nothing happened to it, so nothing changes and nothing is recorded."""
    world = World(refuses=[error])
    assert await world.recycle() is RecycleResult.NOT_RESTARTED
    assert world.admissions == [Admission.DRAINING, Admission.ADMITTED]
    assert (world.entries, world.canaries) == ([], [])
    assert not world.is_left_out()


async def test_a_worker_that_was_left_out_stays_out_when_it_cannot_be_restarted():
    """As it was means as it was."""
    world = World(refuses=[ControlRefusedError("no")])
    world.pool.set_admission(A, Admission.CANARY)
    assert await world.recycle() is RecycleResult.NOT_RESTARTED
    assert world.admission is Admission.CANARY
    assert world.is_left_out()


async def test_a_restart_refused_half_way_goes_on_to_the_next():
    """A draft that cannot be had is left out in the end."""
    world = World(brings=[Engine(answers=False)], refuses=[None, WorkerFailedError("gone"), None])
    assert await world.recycle() is RecycleResult.WITHOUT_DRAFT
    assert world.restarts == [True, False]


async def test_a_defect_ends_in_a_result_and_leaves_the_worker_out():
    """Whoever waits for the task must not go down with it."""
    world = World(refuses=[RuntimeError("a bug")])
    assert await world.recycle() is RecycleResult.FAILED
    assert world.admission is Admission.CANARY
    assert world.is_left_out()


async def test_only_one_worker_is_recycled_at_a_time():
    """The second is refused at once, and with the first done it is not."""
    world = World()
    task = world.recycler.begin(A, with_draft=True, reason=Reason.COLLAPSED)
    assert world.recycler.current == A
    for name in (A, B):
        with pytest.raises(ControlRefusedError, match="worker a is being recycled"):
            await world.recycler.recycle(name, with_draft=True, reason=Reason.COLLAPSED)
    assert await task is RecycleResult.RECYCLED
    assert world.recycler.current is None
    assert world.recycler.refusal(B) is None


async def test_a_refused_recycling_touches_nothing():
    """The last worker goes on serving."""
    world = World()
    world.engines[B].up_at = 1e9
    world.look()
    with pytest.raises(ControlRefusedError, match="worker b is down"):
        world.recycler.begin(A, with_draft=True, reason=Reason.COLLAPSED)
    assert (world.admissions, world.restarts, world.recycler.current) == ([], [], None)


@pytest.mark.parametrize("steps", range(0, 60, 4))
async def test_a_recycling_given_up_leaves_the_pool_honest(steps):
    """Before the restart the worker takes requests again; after it, not until somebody tried it."""
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


async def test_a_recycling_given_up_while_the_restart_is_asked_for_leaves_the_worker_out():
    """Nobody can say whether the request arrived."""
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


async def test_a_draft_on_trial_is_named_in_the_wish():
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
async def test_a_draft_on_trial_is_tried_once_and_then_the_one_in_service_comes_back(unsound):
    """It is not worth a second restart: the worker is worth more."""
    world = World(own=False, brings=[Engine(serves=NEW, **unsound)])
    assert await tried(world) is RecycleResult.WITHOUT_DRAFT
    assert world.requests == [RestartRequest(with_draft=True, candidate=TRIED), RestartRequest(with_draft=True)]
    assert (world.admission, world.pool.snapshot(A).draft) == (Admission.ADMITTED, OLD)


async def test_a_worker_that_came_back_sound_with_another_draft_serves_and_it_is_said():
    """Its supervisor would not start the one on trial; restarting it again would change nothing."""
    world = World(own=False, brings=[Engine(serves=OLD)])
    assert await tried(world) is RecycleResult.WITHOUT_DRAFT
    assert len(world.requests) == 1
    assert world.admission is Admission.ADMITTED


async def test_a_worker_is_not_let_in_before_it_says_which_draft_it_has():
    """A plugin that is late with its first answer must not pass for another draft."""
    coming = Engine(serves=NEW, epoch="")
    world = World(own=False, brings=[coming])
    world.at[20.0] = lambda: setattr(coming, "epoch", "2")
    assert await tried(world) is RecycleResult.RECYCLED
    assert world.now >= 20.0


async def test_who_has_reserved_the_recycler_is_the_only_one_to_begin():
    """A promotion restarts several workers in a row, and nobody comes in between."""
    world = World()
    world.recycler.reserve("promotion P1")
    assert world.recycler.refusal(A) == "promotion P1 is under way: wait until it is done"
    with pytest.raises(ControlRefusedError, match="promotion P1 is under way"):
        world.recycler.begin(A, with_draft=False, reason=Reason.COLLAPSED)
    with pytest.raises(ControlRefusedError, match="promotion P1 is under way"):
        world.recycler.reserve("promotion P2")
    world.recycler.release("promotion P2")
    assert world.recycler.refusal(A, holder="promotion P1") is None
    world.recycler.release("promotion P1")
    assert await world.recycle() is RecycleResult.RECYCLED


def test_downtime_that_is_allowed_waives_one_rule_alone():
    """The last worker may be restarted; one beside another that is away may not."""
    assert refusal([snapshot("a")], A, allow_downtime=True) is None
    others = [snapshot("a"), snapshot("b", healthy=False)]
    assert "worker b is down" in refusal(others, A, allow_downtime=True)


async def test_closing_a_recycler_that_does_nothing_is_nothing():
    """Every process closes its own."""
    await World().recycler.close()


def test_the_only_worker_is_never_recycled():
    """There is nobody else."""
    assert "only one" in refusal([snapshot("a")], A)


def test_a_worker_that_leaves_is_not_recycled():
    """It would never come back."""
    assert "leaving" in refusal([snapshot("a", leaving=True), snapshot("b")], A)


@pytest.mark.parametrize(("at", "result"), [(0.0, RecycleResult.NOT_RESTARTED), (8.0, RecycleResult.FAILED)])
async def test_a_worker_that_leaves_meanwhile_ends_its_recycling(at, result):
    """Its address is gone from the list, so whoever comes back there is a new worker."""
    world = World()
    world.brings = [Engine(answers=False)]
    world.at[at] = lambda: (world.pool.leave(A), world.engines.pop(A))
    world.pool.begin(A)
    world.at[0.1] = lambda: world.pool.end(A)
    assert await world.recycler.recycle(A, with_draft=True, reason=Reason.COLLAPSED) is result
    assert world.pool.snapshot(A) is None


def test_an_unknown_worker_is_not_recycled():
    """The name may be a slip."""
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
def test_a_worker_that_would_be_missed_is_not_recycled(other, why):
    """The other one must be able to take all of its requests, now."""
    assert why in refusal([snapshot("a"), snapshot("b", **other)], A)


def test_each_of_its_models_has_to_be_served_by_somebody():
    """Not necessarily all by the same."""
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
def test_whatever_is_recycled_nobody_is_left_without_a_worker(snapshots, data):
    """A model that had a worker before has one meanwhile, and no two are away at once."""
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


def test_processes_are_told_apart_by_supervisor_epoch_or_absence():
    """In that order: what is known for certain goes first."""
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

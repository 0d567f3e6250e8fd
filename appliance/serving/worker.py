"""
What is known about one worker, as frozen values.
"""

from dataclasses import dataclass, field
from enum import StrEnum
from typing import NewType

from appliance.serving.worker_metrics import WorkerMetrics
from appliance.speculation.state import Watch
from appliance.speculation.values import EngineReading, Reason, SpeculationMode

WorkerId = NewType("WorkerId", str)


class Admission(StrEnum):
    """Whether a worker gets requests, apart from its health."""

    ADMITTED = "admitted"
    DRAINING = "draining"
    """It finishes what it has, then it is restarted."""
    CANARY = "canary"
    """It has restarted and has to answer a request of ours before it gets any other."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Worker:
    """One vLLM server process: its name here, and where it listens."""

    worker_id: WorkerId
    url: str
    """Base URL without a trailing slash."""
    weights: str = ""
    """Content digest of the target's weights where we started the worker, else empty."""
    draft: str = ""
    """Content digest of the draft's weights; empty without a draft."""
    mode: SpeculationMode = SpeculationMode.SPECULATIVE
    """The mode it was started in."""
    reason: Reason | None = None
    """Why it was started without a draft, where that was not what the settings asked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """One name a worker answers to."""

    name: str
    max_model_len: int | None
    """Longest context in tokens."""
    created: int
    """Unix time, as the worker reports it."""
    parent: str | None = None
    """Model it adapts; None for one that is no LoRA adapter."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSnapshot:
    """What the last look at a worker showed."""

    worker: Worker
    healthy: bool = False
    models: tuple[ServedModel, ...] = ()
    engine: str = ""
    """The engine and its version, such as `vllm 0.32.0`."""
    metrics: WorkerMetrics | None = None
    watch: Watch = field(default_factory=lambda: Watch(mode=SpeculationMode.SPECULATIVE))
    tokens_per_second: float = 0.0
    """Generated tokens per second between the last two looks."""
    seen_at: float = 0.0
    """Clock reading of the last successful look."""
    missed: int = 0
    """Looks that failed since then."""
    reading: EngineReading | None = None
    """What the plugin in the worker said; None where there is none or no token for it."""
    admission: Admission = Admission.ADMITTED
    avoided: bool = False
    """Set where drafts do not pay and cannot be switched off: any other worker is taken first."""
    drained: bool = False
    """Set while an operator keeps requests away from it."""
    leaving: bool = False
    """Set once it is listed no longer: it finishes what it has, then it is forgotten."""

    @property
    def speculates(self) -> bool:
        """Whether the engine was started with a draft, so that it may draft and refuses some parameters."""
        if self.metrics is None:
            return self.worker.mode is not SpeculationMode.TARGET_ONLY
        return self.metrics.speculation is not None

    @property
    def weights(self) -> str:
        """Content digest of the target: its supervisor's word here, else its own; empty if neither says."""
        return self.worker.weights or (self.reading.target if self.reading is not None else "")

    @property
    def draft(self) -> str:
        """Content digest of the draft it runs with, likewise; empty without one."""
        if self.worker.weights or self.reading is None:
            return self.worker.draft
        return self.reading.draft

    @property
    def takes_requests(self) -> bool:
        """Whether the gateway may send it a request."""
        return self.healthy and self.admission is Admission.ADMITTED and not self.drained and not self.leaving

    def serves(self, model: str) -> bool:
        """Whether the worker answers to this model name."""
        return any(served.name == model for served in self.models)

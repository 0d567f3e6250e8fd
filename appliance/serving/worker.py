"""
What is known about one worker, as frozen values.
"""

from dataclasses import dataclass, field
from typing import NewType

from appliance.monitor import SpeculationMode, Watch
from appliance.serving.vllm_metrics import WorkerMetrics

WorkerId = NewType("WorkerId", str)


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


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """One name a worker answers to."""

    name: str
    max_model_len: int | None
    """Longest context in tokens."""
    created: int
    """Unix time, as the worker reports it."""


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

    def serves(self, model: str) -> bool:
        """Whether the worker answers to this model name."""
        return any(served.name == model for served in self.models)

"""
Where and how the workers of an evaluation run: like the serving worker, but apart from it.

Loopback only, an offline environment, own ports, own logs, an own control token, nothing shared with
what serves.  They take memory beside a serving worker: on a GPU that is full of one, an evaluation
fails to start and says so.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from appliance.drafts.evaluation.arms import Served
from appliance.drafts.lint.pair import language_model
from appliance.errors import ConfigurationError
from appliance.infra.settings import WorkerSettings
from appliance.serving.devices import Device, DeviceKind, choose_dtype
from appliance.serving.launch import GIB, SEVERAL_NODES, LaunchPlan, plan_launch
from appliance.serving.supervise import free_port
from appliance.serving.weights import Weights
from appliance.sovereignty.environment import offline_environment

LOOPBACK = "127.0.0.1"
MODEL = "evaluated"
PLUGIN = "appliance"
"""Our entry point in `vllm.general_plugins`."""
LARGEST_BATCH = 8
"""Requests decoded together at most; a smaller number of batch sizes is compiled sooner."""
PROCESS_BYTES = 3 * GIB
"""What a worker on a CPU takes beside weights and KV cache."""
CPU_NUMBER_BYTES = 4
GPU_SHARE = 0.98
"""Of a GPU's memory that two workers may ask for together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """What all workers of one evaluation are started with."""

    settings: WorkerSettings
    """The `worker` section of the site."""
    device: Device
    python: str
    """Interpreter to run vLLM with."""
    environment: Mapping[str, str]
    """Of the process that starts them."""
    token_file: Path
    """The control token, made for this evaluation."""
    choose_port: Callable[[str], int] = free_port

    def plan(self, served: Served) -> LaunchPlan:
        """
        Decide how to start a worker.

        Raises:
            ConfigurationError: the settings do not allow it.
        """
        chosen = worker_settings(self.settings, served)
        return plan_launch(
            chosen,
            python=self.python,
            port=self.choose_port(chosen.host),
            device=self.device,
            target=served.target,
            draft=served.draft,
            environment=offline_environment(self.environment, plugins=(PLUGIN,)),
            control_token_file=self.token_file,
        )

    def dtype(self, target: Weights) -> str:
        """The arithmetic type its workers compute in, as far as the target's config says it."""
        chosen = choose_dtype(self.settings.dtype, self.device)
        if chosen != "auto":
            return chosen
        fields: Mapping[str, Any] = {**target.config, **language_model(target.config)}
        return str(fields.get("dtype") or fields.get("torch_dtype") or "unknown")

    def holds_two(self, first: Served, second: Served, available_bytes: int) -> bool:
        """
        Whether two workers may run at the same time.

        Args:
            first: what one of them serves.
            second: what the other serves.
            available_bytes: memory of the machine that is free for use.
        """
        if self.device.kind is DeviceKind.GPU:
            return 2 * self.settings.gpu_memory_fraction <= GPU_SHARE
        need = sum(
            PROCESS_BYTES + self.settings.cpu_kv_cache_gib * GIB + CPU_NUMBER_BYTES * _numbers(served)
            for served in (first, second)
        )
        return need <= available_bytes


def worker_settings(settings: WorkerSettings, served: Served) -> WorkerSettings:
    """
    Return the site's settings as an evaluation's worker needs them.

    Raises:
        ConfigurationError: the worker is one of several nodes, which nobody but their operator can start.
    """
    if SEVERAL_NODES in settings.extra_arguments:
        message = "worker.extra_arguments make it one of several nodes, and an evaluation starts its workers"
        raise ConfigurationError(f"{message} on one: evaluate with settings for a single machine")
    return settings.model_copy(
        update={
            "model": served.target.path,
            "draft": served.draft.path if served.draft else None,
            "method": "eagle3" if served.draft else "none",
            "task": "generate",
            "served_name": MODEL,
            "host": LOOPBACK,
            "port": 0,
            "max_num_seqs": min(settings.max_num_seqs, LARGEST_BATCH),
            "draft_token_schedule": None,
            "tool_call_parser": None,
            "reasoning_parser": None,
        }
    )


def context_of(settings: WorkerSettings, target: Weights) -> int:
    """
    Longest context in tokens.

    Raises:
        ConfigurationError: neither the settings nor the target's config say it.
    """
    longest = settings.max_model_len or language_model(target.config).get("max_position_embeddings")
    if not isinstance(longest, int):
        message = "neither worker.max_model_len nor the target's config.json say how long a context is"
        raise ConfigurationError(f"{message}: set worker.max_model_len")
    return longest


def available_memory(meminfo: str) -> int:
    """Bytes of memory that are free for use, from the text of /proc/meminfo; 0 where it does not say."""
    for line in meminfo.splitlines():
        name, _, rest = line.partition(":")
        words = rest.split()
        if name == "MemAvailable" and words and words[0].isdecimal():
            return int(words[0]) * 1024
    return 0


def _numbers(served: Served) -> int:
    """How many numbers the weights are."""
    models = [served.target, *([served.draft] if served.draft else [])]
    return sum(math.prod(tensor.shape) for weights in models for tensor in weights.tensors.values())

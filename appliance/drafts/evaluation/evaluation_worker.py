"""
The workers of an evaluation: like the serving worker, but isolated from it.

Loopback only, an offline environment, their own ports, logs and control token.  They need memory in addition
to it: on a GPU whose memory is taken, the worker fails to start and says so.
"""

import asyncio
import math
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from appliance.drafts.evaluation.arms import Served
from appliance.drafts.evaluation.asking import CompletionClient
from appliance.drafts.lint.pair import language_model
from appliance.errors import ConfigurationError, WorkerFailedError
from appliance.infra.settings import PoolSettings, WorkerSettings
from appliance.serving.devices import Device, DeviceKind, choose_dtype
from appliance.serving.launch import SEVERAL_NODES, LaunchPlan, engine_version, plan_launch
from appliance.serving.plugin_client import SpeculationClient, SpeculationCommand
from appliance.serving.supervise import StartProgress, Supervisor, WorkerEvent, free_port
from appliance.serving.weights import Weights
from appliance.serving.worker import Worker, WorkerId
from appliance.serving.worker_tls import WorkerTls
from appliance.sovereignty.environment import offline_environment
from appliance.speculation.values import EngineReading, Reason, SpeculationMode

MODEL = "evaluated"
PLUGIN = "appliance"
"""Our entry point in `vllm.general_plugins`."""
LARGEST_BATCH = 8
"""Maximum requests in a batch: fewer batch sizes compile sooner."""
PROCESS_BYTES = 3 * 2**30
"""Memory of a worker on a CPU in addition to weights and KV cache."""
CPU_NUMBER_BYTES = 4
GPU_SHARE = 0.98
"""Maximum share of a GPU's memory for all workers."""
PROGRESS_SECONDS = 10.0
PLUGIN_SECONDS = 30.0
ATTEMPTS, PAUSE_SECONDS = 4, 2.0
"""Of requests to the plugin: on a busy machine the engine may answer too late."""
Say = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerTemplate:
    settings: WorkerSettings
    """The `worker` section of the site."""
    device: Device
    python: str
    environment: Mapping[str, str]
    """Of the process that starts them."""
    largest_batch: int = LARGEST_BATCH
    choose_port: Callable[[str], int] = free_port

    def plan(self, served: Served, token_file: Path) -> LaunchPlan:
        """Plan the launch of a worker; raises `ConfigurationError` if the settings do not allow it."""
        chosen = worker_settings(self.settings, served, self.largest_batch)
        return plan_launch(
            chosen,
            python=self.python,
            port=self.choose_port(chosen.host),
            device=self.device,
            target=served.target,
            draft=served.draft,
            environment=offline_environment(self.environment, plugins=(PLUGIN,)),
            control_token_file=token_file,
            engine=engine_version(),
        )

    def dtype(self, target: Weights) -> str:
        """The workers' arithmetic type; `unknown` if neither settings nor the target's config name it."""
        chosen = choose_dtype(self.settings.dtype, self.device)
        if chosen != "auto":
            return chosen
        fields: Mapping[str, Any] = {**target.config, **language_model(target.config)}
        return str(fields.get("dtype") or fields.get("torch_dtype") or "unknown")

    def holds(self, available_bytes: int, *workers: Served) -> bool:
        """Whether memory suffices for these workers at a time."""
        if self.device.kind is DeviceKind.GPU:
            return len(workers) * min(self.settings.gpu_memory_fraction, GPU_SHARE) <= GPU_SHARE
        models = [weights for served in workers for weights in (served.target, served.draft)]
        tensors = [tensor for weights in models if weights is not None for tensor in weights.tensors.values()]
        parameters = sum(math.prod(tensor.shape) for tensor in tensors)
        process = PROCESS_BYTES + self.settings.cpu_kv_cache_bytes
        return len(workers) * process + CPU_NUMBER_BYTES * parameters <= available_bytes


def worker_settings(settings: WorkerSettings, served: Served, largest_batch: int) -> WorkerSettings:
    """The settings of an evaluation's worker; raises `ConfigurationError` if it would span several nodes."""
    if SEVERAL_NODES in settings.extra_arguments:
        message = "worker.extra_arguments make it one of several nodes, and an evaluation starts its workers"
        raise ConfigurationError(f"{message} on one: evaluate with settings for a single machine")
    return settings.model_copy(
        update={
            "model": served.target.path,
            "draft": served.draft.path if served.draft else None,
            "method": served.method or ("eagle3" if served.draft else "none"),
            "task": "generate",
            "served_name": MODEL,
            "host": "127.0.0.1",
            "port": 0,
            "control_port": None,
            "max_num_seqs": min(settings.max_num_seqs, largest_batch),
            "scrape_token_file": None,
            "tls_certificate_file": None,
            "tls_key_file": None,
            "tls_client_ca_file": None,
            "draft_token_schedule": None,
            "tool_call_parser": None,
            "reasoning_parser": None,
        }
    )


def context_of(settings: WorkerSettings, target: Weights) -> int:
    """Maximum context in tokens; raises `ConfigurationError` if nothing names it."""
    longest = settings.max_model_len or language_model(target.config).get("max_position_embeddings")
    if not isinstance(longest, int):
        message = "neither worker.max_model_len nor the target's config.json give the maximum context"
        raise ConfigurationError(f"{message}: set worker.max_model_len")
    return longest


def available_memory(meminfo: str) -> int:
    """Bytes of available memory in the text of /proc/meminfo; 0 if it has none."""
    for line in meminfo.splitlines():
        name, _, rest = line.partition(":")
        words = rest.split()
        if name == "MemAvailable" and words and words[0].isdecimal():
            return int(words[0]) * 1024
    return 0


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationWorker:
    worker: Worker
    client: CompletionClient
    speculation: SpeculationClient

    async def set_draft_tokens(self, draft_tokens: int) -> tuple[EngineReading, str]:
        """Set the number of draft tokens for all batches; return the reading then, and why it cannot be."""
        reading = await self._read()
        if reading.controllable and draft_tokens in reading.choices:
            command = SpeculationCommand(
                table=((1, reading.largest_batch, draft_tokens),),
                mode=SpeculationMode.SPECULATIVE if draft_tokens else SpeculationMode.TARGET_ONLY,
                reason=Reason.OPERATOR_OVERRIDE,
            )
            apply = partial(self.speculation.apply, self.worker, command, PLUGIN_SECONDS)
            reading = await _with_retries(apply)
        if not reading.controllable:
            return reading, "; ".join(reading.problems) or "the worker's speculation cannot be controlled"
        if draft_tokens not in reading.choices:
            return reading, f"the worker cannot draft {draft_tokens} tokens"
        return reading, ""

    async def read_since(self, before: EngineReading) -> EngineReading:
        """Read the plugin; raises `WorkerFailedError` if the engine restarted since `before`."""
        reading = await self._read()
        if before.epoch != reading.epoch:
            raise WorkerFailedError("the worker restarted during the measurement: see its log")
        return reading

    async def _read(self) -> EngineReading:
        return await _with_retries(partial(self.speculation.read, self.worker, PLUGIN_SECONDS))


async def _with_retries(ask: Callable[[], Awaitable[EngineReading]]) -> EngineReading:
    """Ask the plugin again if that fails: these requests are idempotent."""
    for _ in range(ATTEMPTS - 1):
        try:
            return await ask()
        except WorkerFailedError:
            await asyncio.sleep(PAUSE_SECONDS)
    return await ask()


@asynccontextmanager
async def run_worker(
    name: str, plan: LaunchPlan, *, token: str, max_tokens: int, logs: Path, say: Say
) -> AsyncIterator[EvaluationWorker]:
    """
    Run the worker `name` while the context lasts; every process of it ends, also on an error or cancellation.

    If this process is killed, the guardian above the worker ends it (`appliance.serving.guardian`).  Raises
    `WorkerStartError`, which names the reason and the log.
    """
    reported = 0.0

    def report(progress: StartProgress) -> None:
        nonlocal reported
        if progress.seconds - reported >= PROGRESS_SECONDS:
            reported = progress.seconds
            say(f"{name}: worker is {progress.phase}, {progress.seconds:.0f} s")

    def observe(event: WorkerEvent) -> None:
        say(f"{name}: worker {event.kind.replace('_', ' ')}, {event.detail}")

    supervisor = Supervisor(
        plan, worker=name, log_directory=logs, max_restarts=0, observe=observe, report=report
    )
    task = asyncio.create_task(supervisor.run())
    try:
        await supervisor.healthy()
        async with (
            CompletionClient.open(
                url=plan.url, model=plan.model, max_tokens=max_tokens, token=token
            ) as client,
            SpeculationClient.open(token=token, tls=WorkerTls(PoolSettings())) as speculation,
        ):
            worker = Worker(worker_id=WorkerId(name), url=plan.url, control_port=plan.control_port)
            yield EvaluationWorker(worker=worker, client=client, speculation=speculation)
    finally:
        # A second cancellation interrupts these waits; the task's own end then kills what is left.
        try:
            await supervisor.stop()
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

"""
One worker of an evaluation, from its start to its end, which comes whatever happens.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from appliance.drafts.evaluation.arms import Arm
from appliance.drafts.evaluation.asking import Asker
from appliance.serving.launch import LaunchPlan
from appliance.serving.plugin_client import SpeculationClient
from appliance.serving.supervise import StartProgress, Supervisor, WorkerEvent
from appliance.serving.worker import Worker, WorkerId

Say = Callable[[str], None]
"""Takes one line for the person who watches."""
PROGRESS_SECONDS = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Running:
    """A worker that answers."""

    arm: Arm
    worker: Worker
    asker: Asker
    speculation: SpeculationClient


@asynccontextmanager
async def running(
    arm: Arm, plan: LaunchPlan, *, token: str, max_tokens: int, logs: Path, say: Say
) -> AsyncIterator[Running]:
    """
    Start a worker, hold it for as long as the context lasts, and end every process of it.

    It is ended on an error and on cancellation as well; and should this process be killed, the guardian
    above the worker ends it (`appliance.serving.guardian`).

    Args:
        arm: what it is for.
        plan: how it is started.
        token: secret that its plugin expects.
        max_tokens: longest answer.
        logs: directory of its log.
        say: told how far the start is.

    Raises:
        WorkerStartError: it does not start; the line says why and where its log is.
    """
    told = 0.0

    def report(progress: StartProgress) -> None:
        nonlocal told
        if progress.seconds - told >= PROGRESS_SECONDS:
            told = progress.seconds
            say(f"{arm}: worker is {progress.phase}, {progress.seconds:.0f} s")

    def observe(event: WorkerEvent) -> None:
        say(f"{arm}: worker {event.kind.replace('_', ' ')}, {event.detail}")

    supervisor = Supervisor(
        plan, worker=str(arm), log_directory=logs, max_restarts=0, observe=observe, report=report
    )
    task = asyncio.create_task(supervisor.run())
    try:
        await supervisor.healthy()
        async with (
            Asker.open(url=plan.url, model=plan.model, max_tokens=max_tokens) as asker,
            SpeculationClient.open(token=token) as speculation,
        ):
            worker = Worker(worker_id=WorkerId(str(arm)), url=plan.url)
            yield Running(arm=arm, worker=worker, asker=asker, speculation=speculation)
    finally:
        # A second cancellation breaks these waits off; the task's own end then kills what is left.
        try:
            await supervisor.stop()
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

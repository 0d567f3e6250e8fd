"""
The appliance's changes to a worker, loaded by vLLM in each of its processes.

vLLM finds `register` through the entry point `vllm.general_plugins`; the launcher allows this plugin and no
other.  The only module that imports vllm, and only when called.

Fails by leaving vLLM unchanged: if a vLLM lacks a part that is needed here, that part stays as it is, and
the worker reports that it cannot be controlled.
"""

import multiprocessing
from collections.abc import Callable
from typing import Any

from appliance.infra.settings import process_environment
from appliance.serving.vllm.capabilities import ASK_RUNNER, find_missing
from appliance.serving.vllm.deferred_prefill import ARGUMENTS, defer_draft_prefill, find_runner_problem
from appliance.serving.vllm.listener import ControlledEngine, start_listener
from appliance.serving.vllm.media_salt import salt_media
from appliance.serving.vllm.redaction import redact_before, replace_failure_dump
from appliance.serving.vllm.repairs import (
    bypass_rejection_without_drafts,
    follow_table_in_suffix_decoding,
    repair_cpu_sampling,
    sleep_while_waiting,
)
from appliance.serving.vllm.scheduler_control import SchedulerControl, find_problems
from appliance.serving.vllm.token_counts import count_sequences

SEVERAL_ENGINES = (
    "the worker has several engines (data parallel), and control reaches one: start a worker for each"
)


def register() -> None:
    """Entry point; called once in every process of the worker."""
    from vllm import __version__ as version  # noqa: PLC0415 - never imported outside a worker
    from vllm.platforms import current_platform  # noqa: PLC0415
    from vllm.renderers.base import BaseRenderer  # noqa: PLC0415
    from vllm.v1.core.sched.scheduler import Scheduler  # noqa: PLC0415
    from vllm.v1.engine import core  # noqa: PLC0415
    from vllm.v1.engine.output_processor import OutputProcessor  # noqa: PLC0415
    from vllm.v1.spec_decode.suffix_decoding import SuffixDecodingProposer  # noqa: PLC0415
    from vllm.v1.worker.worker_base import WorkerWrapperBase  # noqa: PLC0415

    # In the API server the middleware does it.
    redact_before(core.EngineCore, "preprocess_add_request")
    redact_before(WorkerWrapperBase, "execute_model")
    replace_failure_dump(core)
    salt_media(BaseRenderer)
    count_sequences(OutputProcessor)
    follow_table_in_suffix_decoding(SuffixDecodingProposer)
    problem = "it has been checked on a CPU only"
    if current_platform.is_cpu():
        from vllm.distributed.device_communicators import shm_broadcast  # noqa: PLC0415
        from vllm.v1.sample import rejection_sampler  # noqa: PLC0415
        from vllm.v1.sample.ops import topk_topp_sampler  # noqa: PLC0415

        repair_cpu_sampling(rejection_sampler, topk_topp_sampler)
        sleep_while_waiting(shm_broadcast)
        problem = install_deferred_prefill()
    install_control(Scheduler, core.EngineCore)
    for name in ("EngineCoreProc", "DPEngineCoreProc"):
        install_listener(getattr(core, name, None), engine=f"vllm {version}", deferred_prefill=problem)
    setattr(WorkerWrapperBase, ASK_RUNNER, _deferred_prefill_problem)


def _deferred_prefill_problem(wrapper: Any) -> str:  # noqa: ANN401 - a worker of vLLM
    return find_runner_problem(wrapper.model_runner)


def install_deferred_prefill() -> str:
    """Run the draft only where it drafts; returns why not if this vLLM has another structure."""
    import inspect  # noqa: PLC0415 - only in a worker

    import torch  # noqa: PLC0415
    from vllm.v1.spec_decode.llm_base_proposer import SpecDecodeBaseProposer  # noqa: PLC0415
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner  # noqa: PLC0415

    propose = getattr(GPUModelRunner, "propose_draft_token_ids", None)
    bypass_rejection_without_drafts(GPUModelRunner)
    if propose is None or tuple(inspect.signature(propose).parameters)[1:] != ARGUMENTS:
        return "this vLLM's runner proposes drafts in another way"
    defer_draft_prefill(GPUModelRunner, SpecDecodeBaseProposer, torch)
    return ""


def install_control(scheduler_class: Any, core_class: Any) -> None:  # noqa: ANN401 - classes of vLLM
    """
    Control every scheduler created later: `EngineCore.__init__` loads plugins before it makes its own.
    """
    if hasattr(core_class.post_step, "appliance_control"):
        return  # vLLM may load plugins more than once in a process
    original = scheduler_class.__init__

    def initialise(scheduler: Any, *arguments: Any, **named: Any) -> None:  # noqa: ANN401
        original(scheduler, *arguments, **named)
        if not find_problems(scheduler):
            scheduler.appliance_control = SchedulerControl(scheduler)

    post_step = core_class.post_step

    def post_step_with_drafts(core: Any, model_executed: bool) -> None:  # noqa: ANN401, FBT001
        """After a step that drafted nothing, do not ask the workers for drafts: a round trip each step."""
        control: SchedulerControl | None = getattr(core.scheduler, "appliance_control", None)
        if control is None or control.draft_tokens != 0:
            post_step(core, model_executed)

    post_step_with_drafts.appliance_control = True  # type: ignore[attr-defined]
    scheduler_class.__init__ = initialise
    core_class.post_step = post_step_with_drafts


def install_listener(process_class: Any, *, engine: str, deferred_prefill: str = "") -> None:  # noqa: ANN401 - of vLLM
    """
    Open the control listener once the engine is complete, before its first step.

    `process_class` is the engine core of a process of its own; without its `run_busy_loop` nothing listens.
    `deferred_prefill` is why no runner defers the draft's prefill; empty if the runner knows.
    """
    run = vars(process_class).get("run_busy_loop") if process_class is not None else None
    if run is None or hasattr(run, "appliance_listens"):
        return  # vLLM may load plugins more than once in a process

    def run_busy_loop(core: Any) -> Any:  # noqa: ANN401
        # With data parallel the first engine answers for all: that they cannot be controlled.
        if not getattr(core, "engine_index", 0):
            server = multiprocessing.parent_process()
            controlled = ControlledEngine(
                command=command_of(core, engine, find_missing(core, deferred_prefill)),
                gpus=_gpus_of(core),
                server=None if server is None else server.pid,
            )
            start_listener(controlled, process_environment())
        return run(core)

    run_busy_loop.appliance_listens = True  # type: ignore[attr-defined]
    process_class.run_busy_loop = run_busy_loop


def command_of(core: Any, engine: str, missing: dict[str, str]) -> Callable[[str], str]:  # noqa: ANN401 - an engine core of vLLM
    """The engine's answers to commands."""
    control: SchedulerControl | None = getattr(core.scheduler, "appliance_control", None)
    problems = [SEVERAL_ENGINES] if _has_several_engines(core) else find_problems(core.scheduler)

    def command(text: str) -> str:
        if control is None or problems:
            return SchedulerControl.cannot(problems, engine, missing)
        return control.command(text, engine, missing)

    return command


def _has_several_engines(core: Any) -> bool:  # noqa: ANN401 - an engine core of vLLM
    # Dense models: each engine is told that it is alone, but has a coordinator.
    parallel = getattr(getattr(core, "vllm_config", None), "parallel_config", None)
    return getattr(parallel, "data_parallel_size", 1) > 1 or bool(getattr(core, "has_coordinator", False))


def _gpus_of(core: Any) -> int | None:  # noqa: ANN401 - an engine core of vLLM
    try:
        return int(core.vllm_config.parallel_config.world_size_across_dp)
    except AttributeError:  # an engine of another structure
        return None

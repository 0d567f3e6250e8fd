"""
The steps that start one worker through the launcher: the plugin on a model runner, and costs of steps.
"""

import asyncio
import json
import os
import random
import secrets
import sys
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import replace
from functools import partial
from itertools import count, cycle, islice
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from appliance.drafts.evaluation.arms import Arm, Mode, Prompt
from appliance.drafts.evaluation.asking import ask_all
from appliance.drafts.evaluation.evaluation_worker import MODEL, PLUGIN, EvaluationWorker, run_worker
from appliance.drafts.training.head_shape import new_config
from appliance.infra.settings import DEMO_DRAFT, DEMO_TARGET, WorkerSettings
from appliance.serving.devices import choose_device, detect_hardware
from appliance.serving.launch import LaunchPlan, plan_launch
from appliance.serving.plugin_client import SpeculationCommand
from appliance.serving.supervise import free_port
from appliance.serving.weights import Weights, load_weights
from appliance.sovereignty.environment import offline_environment
from appliance.speculation.values import NO_STEPS, EngineReading, Reason, SpeculationMode
from benchmarks.gpu.sizes import Shape, Sizes
from benchmarks.gpu.steps import Found, Slice
from benchmarks.speculation.conductor import without
from demo.training.corpus import held_out_prompts, load_corpus
from demo.training.target import target_config

RUNNER = "VLLM_USE_V2_MODEL_RUNNER"
V2_SAYS = "Using V2 Model Runner"
ANSWER_SECONDS, SETTLE_SECONDS = 10.0, 1.0
ENOUGH_STEPS, MAX_WINDOWS = 8, 10
PROMPTS, PROMPT_TOKENS, CHECKED_AT_ONCE = 16, 128, 2
SHARE = 0.3
"""Of the GPU's memory, for a worker that is only checked."""


def plugin(sizes: Sizes, part: Slice, *, runner: int) -> Found:
    """Whether the plugin controls a worker on one of vLLM's model runners; of the committed demo pair."""
    if runner == 2 and sizes.device == "cpu":
        return {"skipped": "the V2 model runner needs Triton, which has no CPU backend"}
    tokenizer = Tokenizer.from_file(str(DEMO_TARGET / "tokenizer.json"))
    prompts = prompts_of(
        tuple(tokenizer.encode(text).ids) for text in held_out_prompts(load_corpus(), count=PROMPTS)
    )
    logs = part.state / f"plugin-v{runner}-worker"
    plan, token = planned(
        *(sizes, part, load_weights(DEMO_TARGET), load_weights(DEMO_DRAFT)),
        environment={RUNNER: str(runner - 1)},
        shares=True,
    )

    async def check() -> dict[str, Any]:
        async with serving(plan, token, logs, sizes.tokens) as worker:
            reading = await read(worker)
            checks = [await check_table(worker, k, prompts) for k in reading.choices if reading.controllable]
        return {"controllable": reading.controllable, "problems": reading.problems, "tables": checks}

    found = asyncio.run(check())
    said = "".join(file.read_text(errors="replace") for file in logs.rglob("*") if file.is_file())
    return {**found, "runner": 2 if V2_SAYS in said else 1}


async def check_table(worker: EvaluationWorker, k: int, prompts: Iterator[Prompt]) -> dict[str, Any]:
    """Steps by K under a table of one K; `follows` judges them."""
    before = await set_table(worker, k)
    chosen = list(islice(prompts, PROMPTS))
    await ask_all(lambda prompt: worker.client.ask(prompt, Mode.GREEDY), chosen, at_once=CHECKED_AT_ONCE)
    spent = without(await read(worker), before)
    steps: Counter[str] = Counter()
    for (_batch, used), cell in spent.steps.items():
        steps[str(used)] += cell.steps
    drafting = spent.drafting
    length = 1 + drafting.accepted_tokens / drafting.drafts if drafting.drafts else 1.0
    return {"draft_tokens": k, "steps": steps, "drafts": drafting.drafts, "acceptance_length": length}


def follows(check: Mapping[str, Any]) -> bool:
    """Whether a worker did what its table said: steps with this K and no other, and drafts only then."""
    k = check["draft_tokens"]
    return list(check["steps"]) == [str(k)] and bool(check["drafts"]) == bool(k)


def costs(sizes: Sizes, part: Slice, *, shape: Shape, depth: int) -> Found:
    """Costs of the steps of a shape of random weights, by requests and draft tokens."""
    directory = part.state / f"{shape.name}-{depth}"
    target, draft = write_random(shape, depth, directory)
    plan, token = planned(
        *(sizes, part, target, draft),
        environment={},
        extra=("--load-format", "dummy"),
    )
    is_synthetic = sizes.device == "gpu"  # vLLM's CPU build has no synthetic acceptance
    if is_synthetic:
        plan = with_synthetic_acceptance(plan, sizes.acceptance_length)

    async def measure() -> list[dict[str, float]]:
        async with serving(plan, token, directory / "worker", sizes.tokens) as worker:
            reading = await read(worker)
            prompts = prompts_of(random_ids(seed) for seed in range(PROMPTS * max(sizes.concurrency)))
            return [
                await cost(worker, prompts, sizes, concurrency, k)
                for concurrency in sizes.concurrency
                for k in reading.choices
            ]

    return {
        "shape": shape.name,
        "layers": shape.size.layers,
        "depth": depth,
        "synthetic": sizes.acceptance_length if is_synthetic else None,
        "costs": asyncio.run(measure()),
    }


async def cost(
    worker: EvaluationWorker, prompts: Iterator[Prompt], sizes: Sizes, concurrency: int, k: int
) -> dict[str, float]:
    """Means of the steps with a table of one K and this many requests."""
    await set_table(worker, k)
    async with busy(worker, prompts, concurrency):
        await asyncio.sleep(SETTLE_SECONDS)
        before = await read(worker)
        for _time in range(MAX_WINDOWS):
            await asyncio.sleep(sizes.measured_seconds)
            # The plugin counts batches by the next power of two.
            kind = 1 << (concurrency - 1).bit_length(), k
            cell = without(await read(worker), before).steps.get(kind, NO_STEPS)
            if cell.steps >= ENOUGH_STEPS:
                break
    many = max(1, cell.steps)
    return {
        "concurrency": concurrency,
        "draft_tokens": k,
        "steps": cell.steps,
        "seconds": cell.seconds / many,
        "batch": cell.requests / many,
        "tokens": cell.tokens / many,
    }


async def read(worker: EvaluationWorker) -> EngineReading:
    return await worker.speculation.read(worker.worker, ANSWER_SECONDS)


async def set_table(worker: EvaluationWorker, k: int) -> EngineReading:
    """Use one K at every batch size; returns the reading after it."""
    command = SpeculationCommand(
        table=((1, (await read(worker)).largest_batch, k),),
        mode=SpeculationMode.SPECULATIVE if k else SpeculationMode.TARGET_ONLY,
        reason=Reason.OPERATOR_OVERRIDE,
    )
    return await worker.speculation.apply(worker.worker, command, ANSWER_SECONDS)


@asynccontextmanager
async def busy(worker: EvaluationWorker, prompts: Iterator[Prompt], concurrency: int) -> AsyncIterator[None]:
    """Keep this many requests in flight while the context lasts."""

    async def client() -> None:
        while True:
            await worker.client.ask(next(prompts), Mode.GREEDY)

    async with asyncio.TaskGroup() as group:
        clients = [group.create_task(client()) for _ in range(concurrency)]
        yield
        for each in clients:
            each.cancel()


def planned(
    sizes: Sizes,
    part: Slice,
    target: Weights,
    draft: Weights,
    *,
    environment: Mapping[str, str],
    extra: tuple[str, ...] = (),
    shares: bool = False,
) -> tuple[LaunchPlan, str]:
    """The launch of a worker, and its control token; one that `shares` leaves room for training beside it."""
    token, token_file = secrets.token_hex(16), part.state / "control.token"
    token_file.write_text(token, encoding="utf-8")
    settings = WorkerSettings(
        model=target.path,
        draft=draft.path,
        served_name=MODEL,
        device=sizes.device,
        draft_tokens=sizes.draft_tokens,
        max_num_seqs=2 * sizes.draft_tokens if shares else sizes.largest_batch,
        extra_arguments=extra,
        **({"gpu_memory_fraction": SHARE} if shares else {}),
    )
    plan = plan_launch(
        settings,
        python=sys.executable,
        port=free_port(settings.host),
        device=choose_device(sizes.device, detect_hardware()),
        target=target,
        draft=draft,
        environment=offline_environment({**os.environ, **environment}, plugins=(PLUGIN,)),
        control_token_file=token_file,
    )
    return plan, token


def with_synthetic_acceptance(plan: LaunchPlan, length: float) -> LaunchPlan:
    """
    Accept drafts at random, with this mean length: random weights accept none.

    The launcher never allows it, because the answers are then not the target's.
    """
    argv = list(plan.argv)
    place = argv.index("--speculative-config") + 1
    synthetic = {"rejection_sample_method": "synthetic", "synthetic_acceptance_length": length}
    argv[place] = json.dumps({**json.loads(argv[place]), **synthetic})
    return replace(plan, argv=tuple(argv))


def serving(
    plan: LaunchPlan, token: str, logs: Path, tokens: int
) -> AbstractAsyncContextManager[EvaluationWorker]:
    logs.mkdir(parents=True, exist_ok=True)
    say = partial(print, flush=True)
    return run_worker(Arm.CANDIDATE, plan, token=token, max_tokens=tokens, logs=logs, say=say)


def write_random(shape: Shape, depth: int, directory: Path) -> tuple[Weights, Weights]:
    """Configs and a tokenizer of a pair; vLLM makes up the weights (`--load-format dummy`)."""
    target_at, draft_at = directory / "target", directory / "draft"
    draft_at.mkdir(parents=True, exist_ok=True)
    config = target_config(0, 1, replace(shape.size, layers=depth))
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(target_at)
    # Every id has a text, or it could not be answered.
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = [*letters, *(f"<{number}>" for number in range(len(letters), shape.size.vocabulary))]
    tokenizer = Tokenizer(models.BPE({word: at for at, word in enumerate(words)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(target_at / "tokenizer.json"))
    tokenizer_config = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": 2048}
    (target_at / "tokenizer_config.json").write_text(json.dumps(tokenizer_config), encoding="utf-8")
    written = json.loads((target_at / "config.json").read_text(encoding="utf-8"))
    draft = new_config(written)
    (draft_at / "config.json").write_text(json.dumps(draft), encoding="utf-8")
    return (
        Weights(path=target_at.absolute(), config=written, tensors={}),
        Weights(path=draft_at.absolute(), config=draft, tensors={}),
    )


def random_ids(seed: int) -> tuple[int, ...]:
    return tuple(random.Random(seed).choices(range(2, 256), k=PROMPT_TOKENS))


def prompts_of(texts: Iterator[tuple[int, ...]]) -> Iterator[Prompt]:
    """Endless; each text again and again."""
    numbers = count()
    return (
        Prompt(request_id=f"{next(numbers)}", template="", context="", token_ids=ids, seed=7, salt="")
        for ids in cycle(texts)
    )

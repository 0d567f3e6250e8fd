"""
What the plugin changes in a worker.

vLLM itself is never imported, which takes seconds; where it is installed, its source is read.
"""

import ast
import importlib.metadata
import importlib.util
import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from appliance.serving.vllm import plugin
from appliance.serving.vllm.deferred_prefill import ARGUMENTS
from appliance.serving.vllm.listener import ControlledEngine
from appliance.serving.vllm.plugin import (
    SEVERAL_ENGINES,
    install_control,
    install_deferred_prefill,
    install_listener,
    register,
)
from appliance.serving.vllm.redaction import dump_failed_step
from appliance.serving.vllm.repairs import (
    NAP_SECONDS,
    bypass_rejection_without_drafts,
    follow_table_in_suffix_decoding,
    repair_cpu_sampling,
    sleep_while_waiting,
)
from appliance.serving.vllm.scheduler_control import find_problems
from tests.fake_engine import LOOKUP, DraftStats, FakeScheduler, Outputs, Stats, Step, Tokens

ENGINE = "vllm 0.32.0"
Ask = Callable[..., dict[str, Any]]
torch = pytest.importorskip("torch")


class Engine:
    """vLLM's scheduler and engine core, as classes of their own that can be changed."""

    def __init__(self) -> None:
        class Scheduler(FakeScheduler):
            pass

        class EngineCore:
            def __init__(self, scheduler: Any) -> None:
                self.scheduler = scheduler
                self.fetched: list[bool] = []

            def preprocess_add_request(self, request: Any) -> Any:
                return request

            def post_step(self, model_executed: bool) -> None:
                self.fetched.append(model_executed)

        class EngineCoreProc(EngineCore):
            def run_busy_loop(self) -> str:
                return "ended"

        self.scheduler_class, self.core_class, self.process_class = Scheduler, EngineCore, EngineCoreProc

    def start(self, **how: Any) -> Any:
        return self.process_class(self.scheduler_class(**how))


@pytest.fixture
def engine() -> Engine:
    """An engine that has loaded the plugin."""
    made = Engine()
    install_control(made.scheduler_class, made.core_class)
    install_listener(made.process_class, engine=ENGINE)
    return made


@pytest.fixture(autouse=True)
def listening(monkeypatch: pytest.MonkeyPatch) -> list[ControlledEngine]:
    """The engines that would listen; none does."""
    started: list[ControlledEngine] = []
    monkeypatch.setattr(plugin, "start_listener", lambda engine, _environment: started.append(engine))
    return started


@pytest.fixture
def ask(listening: list[ControlledEngine]) -> Ask:
    """Send a command as the listener does; the first one starts the loop of the engine."""

    def send(core: Any, **request: Any) -> dict[str, Any]:
        if not hasattr(core, "listens"):
            assert core.run_busy_loop() == "ended"
            core.listens = listening[-1]
        return json.loads(core.listens.command(json.dumps(request)))

    return send


def test_every_new_scheduler_is_controlled(engine, ask):
    """Two engines of a process share no state."""
    first, second = engine.start(), engine.start()
    ask(first, table=[[1, 8, 0]], mode="target_only", reason="collapsed")
    assert first.scheduler.dynamic_sd_lookup == [0] * len(LOOKUP)
    assert second.scheduler.dynamic_sd_lookup == list(LOOKUP)
    assert (ask(first)["engine"], ask(first)["mode"], ask(second)["mode"]) == (ENGINE, "target_only", None)


def test_uncontrollable_scheduler_is_left_unchanged_and_reported(engine, ask):
    core = engine.start(num_spec_tokens=0)
    assert "schedule" not in vars(core.scheduler)
    answer = ask(core)
    assert (answer["controllable"], answer["epoch"], answer["engine"]) == (False, "", ENGINE)
    assert answer["problems"] == find_problems(core.scheduler) == ["the engine was started without a draft"]
    core.post_step(True)
    assert core.fetched == [True]


def test_loading_the_plugin_twice_is_idempotent(engine):
    """vLLM may load plugins more than once in a process."""
    classes = (engine.scheduler_class, engine.core_class, engine.process_class)
    before = [dict(vars(each)) for each in classes]
    install_control(engine.scheduler_class, engine.core_class)
    install_listener(engine.process_class, engine="another")
    assert [dict(vars(each)) for each in classes] == before


@pytest.mark.parametrize("sign", ["size", "coordinator"])
def test_one_of_several_engines_answers_that_none_is_controlled(engine, ask, listening, sign):
    """A table would reach one of them only.  A dense model's engine is told that it is alone."""
    first, second = engine.start(), engine.start()
    second.engine_index = 1
    for core in (first, second):
        core.has_coordinator = sign == "coordinator"
        parallel = SimpleNamespace(data_parallel_size=2 if sign == "size" else 1, world_size_across_dp=2)
        core.vllm_config = SimpleNamespace(parallel_config=parallel)
    answer = ask(first, table=[[1, 8, 0]])
    assert (answer["controllable"], answer["problems"]) == (False, [SEVERAL_ENGINES])
    assert first.scheduler.dynamic_sd_lookup == list(LOOKUP)
    assert second.run_busy_loop() == "ended"
    assert [started.gpus for started in listening] == [2]


def test_an_engine_without_its_loop_is_left_unchanged(listening):
    """Nothing listens then, which gateways report."""
    for process_class in (None, type("Renamed", (), {})):
        install_listener(process_class, engine=ENGINE)
    assert listening == []


def test_drafts_are_not_fetched_after_a_step_without_draft_tokens(engine, ask):
    """That saves a round trip each step; with drafts, or without a step, they are fetched."""
    core = engine.start()
    core.post_step(True)
    core.scheduler.add("a")
    core.scheduler.schedule()
    core.post_step(True)
    assert core.fetched == [True, True]
    ask(core, table=[[1, 8, 0]])
    core.post_step(True)
    core.scheduler.schedule()
    core.post_step(True)
    assert core.fetched == [True, True, True]
    core.scheduler.finish("a")
    core.scheduler.schedule()
    core.post_step(False)
    assert core.fetched == [True, True, True, False]


def test_drafts_are_fetched_after_the_hooks_are_removed(engine, ask):
    core = engine.start()
    ask(core, table=[[1, 8, 0]])
    core.scheduler.add("a")
    core.scheduler.disobeys = True
    core.scheduler.schedule()
    core.post_step(True)
    assert core.fetched == [True]


@pytest.fixture
def modules(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Fake modules of vLLM."""
    engine = Engine()

    class Runner:
        def propose_draft_token_ids(
            self,
            scheduler_output,
            sampled_token_ids,
            sampling_metadata,
            hidden_states,
            sample_hidden_states,
            aux_hidden_states,
            spec_decode_metadata,
            common_attn_metadata,
            slot_mappings,
        ):
            pass

    class Proposer:
        def propose(self, **named):
            pass

    class OtherRunner:
        def propose_draft_token_ids(self, scheduler_output, sampled_token_ids):
            pass

    class Renderer:
        def _process_tokens(self, prompt, *, skip_mm_cache=False):
            return prompt

        async def _process_tokens_async(self, prompt, *, skip_mm_cache=False):
            return prompt

    class Wrapper:
        def execute_model(self, scheduler_output):
            return scheduler_output

    made = SimpleNamespace(
        engine=engine,
        wrapper=Wrapper,
        renderer=Renderer,
        runner=Runner,
        other_runner=OtherRunner,
        proposer=Proposer,
        is_cpu=True,
        sampler=SimpleNamespace(expand_batch_to_tokens=len),
        filter=SimpleNamespace(apply_top_k_only=len),
        shared_memory=SimpleNamespace(sched_yield=len),
        suffixes=type("SuffixDecodingProposer", (Suffixes,), {}),
    )
    contents: dict[str, dict[str, Any]] = {
        "vllm": {"__version__": "0.32.0"},
        "vllm.platforms": {"current_platform": SimpleNamespace(is_cpu=lambda: made.is_cpu)},
        "vllm.distributed": {},
        "vllm.distributed.device_communicators": {"shm_broadcast": made.shared_memory},
        "vllm.renderers": {},
        "vllm.renderers.base": {"BaseRenderer": Renderer},
        "vllm.v1": {},
        "vllm.v1.core": {},
        "vllm.v1.core.sched": {},
        "vllm.v1.core.sched.scheduler": {"Scheduler": engine.scheduler_class},
        "vllm.v1.engine": {},
        "vllm.v1.engine.core": {
            "EngineCore": engine.core_class,
            "EngineCoreProc": engine.process_class,
            "dump_engine_exception": len,
        },
        "vllm.v1.engine.output_processor": {"OutputProcessor": type("OutputProcessor", (), {})},
        "vllm.v1.sample": {"rejection_sampler": made.sampler},
        "vllm.v1.sample.ops": {"topk_topp_sampler": made.filter},
        "vllm.v1.spec_decode": {},
        "vllm.v1.spec_decode.llm_base_proposer": {"SpecDecodeBaseProposer": Proposer},
        "vllm.v1.spec_decode.suffix_decoding": {"SuffixDecodingProposer": made.suffixes},
        "vllm.v1.worker": {},
        "vllm.v1.worker.gpu_model_runner": {"GPUModelRunner": Runner},
        "vllm.v1.worker.worker_base": {"WorkerWrapperBase": Wrapper},
    }
    for name, content in contents.items():
        module = ModuleType(name)
        vars(module).update(content)
        monkeypatch.setitem(sys.modules, name, module)
        parent, _, last = name.rpartition(".")
        if parent:
            vars(sys.modules[parent]).setdefault(last, module)
    return made


def test_cpu_worker_gets_control_repairs_and_deferred_prefill(modules, ask):
    propose = modules.runner.propose_draft_token_ids
    register()
    assert ask(modules.engine.start())["engine"] == ENGINE
    assert modules.sampler.expand_batch_to_tokens is not len
    assert modules.filter.apply_top_k_only is not len
    assert modules.shared_memory.sched_yield is not len
    assert modules.runner.propose_draft_token_ids is not propose


def test_a_runner_is_asked_through_the_workers_of_its_engine(modules, ask):
    """Its own problem is reported, and after that of the whole process no runner is asked."""
    register()
    core, wrapper = modules.engine.start(), modules.wrapper()
    wrapper.model_runner = SimpleNamespace()
    core.model_executor = SimpleNamespace(collective_rpc=lambda method: [getattr(wrapper, method)()])
    assert (
        ask(core)["missing_capabilities"]["deferred_prefill"]
        == "the runner has no draft model that the plugin knows"
    )


def test_gpu_worker_gets_control_and_the_repair_of_suffix_decoding(modules, ask):
    """The repairs are for defects of the CPU build, and deferred prefill was only verified there."""
    modules.is_cpu = False
    propose = modules.runner.propose_draft_token_ids
    register()
    answer = ask(modules.engine.start())
    assert answer["controllable"]
    assert answer["missing_capabilities"]["deferred_prefill"] == "it has been checked on a CPU only"
    assert (modules.sampler.expand_batch_to_tokens, modules.filter.apply_top_k_only) == (len, len)
    assert modules.suffixes().propose(1, "batch") == [[5], []]
    assert modules.shared_memory.sched_yield is len
    assert modules.runner.propose_draft_token_ids is propose


def test_engine_and_worker_processes_withhold_content_from_their_first_request_on(modules, redactions):
    register()
    core, wrapper = modules.engine.start(), modules.wrapper()
    assert sys.modules["vllm.v1.engine.core"].dump_engine_exception is dump_failed_step
    assert redactions == []
    assert (core.preprocess_add_request(1), len(redactions)) == (1, 1)
    assert (wrapper.execute_model(2), len(redactions)) == (2, 2)
    assert (core.preprocess_add_request(3), wrapper.execute_model(4), len(redactions)) == (3, 4, 2)


async def test_a_salt_is_hashed_with_the_media_of_its_prompt(modules):
    """It joins the options by which they are decoded; a prompt without media or salt stays as it is."""
    register()
    renderer, given = modules.renderer(), {"image": {"image_mode": "L"}}
    prompt = {"cache_salt": "s", "multi_modal_data": {"image": ["x"]}, "media_io_kwargs": given}
    for made in (renderer._process_tokens(prompt), await renderer._process_tokens_async(prompt)):
        options = {"image": {"image_mode": "L", "cache_salt": "s"}, "video": {"cache_salt": "s"}}
        assert made == {**prompt, "media_io_kwargs": {**options, "audio": {"cache_salt": "s"}}}
    assert given == {"image": {"image_mode": "L"}}
    for plain in ({"cache_salt": "s"}, {"multi_modal_data": {"image": ["x"]}}):
        assert renderer._process_tokens(plain) is plain


def test_the_installed_vllm_has_the_loop_before_which_we_listen():
    """Without it no worker could be controlled."""
    for name in ("EngineCoreProc", "DPEngineCoreProc"):
        assert "run_busy_loop" in methods("v1.engine.core", name)
    members = {node.attr for node in ast.walk(tree("v1.engine.core")) if isinstance(node, ast.Attribute)}
    assert {"engine_index", "has_coordinator"} <= members


def test_vllm_has_what_the_redaction_hooks_into():
    """If an upgrade moves one of them, the logs would be redacted from the start, or quote a failed step."""
    assert "preprocess_add_request" in methods("v1.engine.core", "EngineCore")
    assert "execute_model" in methods("v1.worker.worker_base", "WorkerWrapperBase")
    called = [
        node.func.id
        for node in ast.walk(tree("v1.engine.core"))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
    ]
    assert called.count("dump_engine_exception") == 1
    taken = {"num_scheduled_tokens", "scheduled_new_reqs", "scheduled_spec_decode_tokens"}
    assert taken <= fields("v1.core.sched.output", "SchedulerOutput")
    assert {"num_running_reqs", "num_waiting_reqs", "kv_cache_usage"} <= fields(
        "v1.metrics.stats", "SchedulerStats"
    )


def test_runner_of_another_structure_is_left_unchanged(modules):
    """With other arguments, or without the method, the draft runs at every step."""
    worker = sys.modules["vllm.v1.worker.gpu_model_runner"]
    propose = modules.proposer.propose
    for runner in (modules.other_runner, type("Renamed", (), {})):
        worker.GPUModelRunner = runner
        before = dict(vars(runner))
        install_deferred_prefill()
        assert dict(vars(runner)) == before
        assert modules.proposer.propose is propose


def test_vllm_finds_the_plugin_by_its_entry_point():
    """In the group and by the name that the launcher allows."""
    (entry,) = (
        entry
        for entry in importlib.metadata.entry_points(group="vllm.general_plugins")
        if entry.name == "appliance"
    )
    assert entry.load() is register


def tree(module: str) -> ast.Module:
    """The source of a module of the installed vLLM."""
    found = importlib.util.find_spec("vllm")
    if found is None or found.origin is None:
        pytest.skip("vllm is not installed here")
    path = Path(found.origin).parent.joinpath(*module.split(".")).with_suffix(".py")
    return ast.parse(path.read_text(encoding="utf-8"))


def fields(module: str, name: str) -> set[str]:
    """The annotated members of a class there."""
    (made,) = (
        node for node in ast.walk(tree(module)) if isinstance(node, ast.ClassDef) and node.name == name
    )
    return {
        node.target.id
        for node in made.body
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
    }


def methods(module: str, name: str) -> set[str]:
    """The functions and properties of a class there."""
    return {
        node.name
        for made in ast.walk(tree(module))
        if isinstance(made, ast.ClassDef) and made.name == name
        for node in made.body
        if isinstance(node, ast.FunctionDef)
    }


def test_vllm_reports_an_engines_gpus_with_data_parallel_copies():
    """Energy of some GPUs must not be reported as that of all (`serving.vllm.listener`)."""
    assert "world_size_across_dp" in methods("config.parallel", "ParallelConfig")


def test_the_installed_vllm_proposes_with_the_arguments_we_know():
    """With other arguments the draft would run at every step, without an error."""
    (method,) = (
        node
        for node in ast.walk(tree("v1.worker.gpu_model_runner"))
        if isinstance(node, ast.FunctionDef)
        and node.name == "propose_draft_token_ids"
        and [argument.arg for argument in node.args.args][:1] == ["self"]
    )
    assert tuple(argument.arg for argument in method.args.args)[1:] == ARGUMENTS


@pytest.mark.parametrize(
    ("module", "name", "stand_in", "our_own"),
    [
        ("v1.core.sched.output", "SchedulerOutput", Step, {"is_whole"}),
        ("v1.metrics.stats", "SchedulerStats", Stats, set()),
        ("v1.spec_decode.metrics", "SpecDecodingStats", DraftStats, set()),
        ("v1.engine", "EngineCoreOutputs", Outputs, set()),
        ("v1.engine", "EngineCoreOutput", Tokens, set()),
    ],
)
def test_fakes_have_only_members_of_the_installed_vllm(module, name, stand_in, our_own):
    if module == "v1.engine":
        module = "v1.engine.__init__"
    assert set(stand_in.__dataclass_fields__) - our_own <= fields(module, name)


def test_installed_scheduler_is_controllable():
    """As far as its source shows."""
    members = {
        node.attr for node in ast.walk(tree("v1.core.sched.scheduler")) if isinstance(node, ast.Attribute)
    }
    assert {"dynamic_sd_lookup", "num_spec_tokens", "log_stats"} <= members


def test_every_draft_token_is_sampled_with_the_parameters_of_its_request():
    """[batch] values and running counts to [tokens] values, of any type."""
    sampler = SimpleNamespace(expand_batch_to_tokens=None)
    repair_cpu_sampling(sampler, SimpleNamespace())
    temperature = torch.tensor([0.5, 0.0, 1.5])
    counts = torch.tensor([2, 2, 5], dtype=torch.int32)
    expanded = sampler.expand_batch_to_tokens(temperature, counts, 5)
    assert expanded.tolist() == [0.5, 0.5, 1.5, 1.5, 1.5]
    replaced = sampler.expand_batch_to_tokens(temperature, torch.tensor([1, 2, 3]), 3, 0, 1)
    assert replaced.tolist() == [0.5, 1.0, 1.5]
    top_k = torch.tensor([40, -1], dtype=torch.int32)
    assert sampler.expand_batch_to_tokens(top_k, torch.tensor([0, 3]), 3).tolist() == [-1, -1, -1]
    assert temperature.tolist() == [0.5, 0.0, 1.5]


def test_a_step_without_draft_tokens_passes_the_top_k_filter():
    """Everything else is filtered as before."""
    filtered = []
    sampler = SimpleNamespace(apply_top_k_only=lambda logits, k: filtered.append(k) or "filtered")
    repair_cpu_sampling(SimpleNamespace(), sampler)
    nothing = torch.empty((0, 8))
    assert sampler.apply_top_k_only(nothing, torch.empty(0, dtype=torch.int64)) is nothing
    assert sampler.apply_top_k_only(nothing, torch.tensor([3])) == "filtered"
    assert len(filtered) == 1


def test_a_step_in_which_nothing_was_drafted_is_sampled_as_without_a_draft():
    """Any other is left to the rejection sampler."""
    seen = []

    class Runner:
        def _sample(self, logits, spec_decode_metadata):
            seen.append(spec_decode_metadata)
            return logits

    bypass_rejection_without_drafts(Runner)
    nothing, something = SimpleNamespace(max_spec_len=0), SimpleNamespace(max_spec_len=3)
    for metadata in (None, nothing, something):
        assert Runner()._sample("logits", metadata) == "logits"
    assert seen == [None, None, something]


class Suffixes:
    """vLLM's proposer, with a cache that takes a maximum of 0 for none."""

    num_speculative_tokens = 3

    def propose(self, num_speculative_tokens, input_batch):
        assert num_speculative_tokens == self.num_speculative_tokens
        return [[5, 6, 7, 8][: num_speculative_tokens or None], []]


def test_suffix_decoding_drafts_as_many_tokens_as_the_step_has():
    """The first step with another number than the maximum ended the engine."""

    class Proposer(Suffixes):
        pass

    with pytest.raises(AssertionError):
        Proposer().propose(1, "batch")
    follow_table_in_suffix_decoding(Proposer)
    proposer = Proposer()
    drafts = [proposer.propose(number, input_batch="batch") for number in (3, 0, 1, 3)]
    assert drafts == [[[5, 6, 7], []], [[], []], [[5], []], [[5, 6, 7], []]]


def test_the_installed_vllms_suffix_decoding_follows_the_table(monkeypatch):
    """Its source, with the stand-in for the package it calls."""
    source = tree("v1.spec_decode.suffix_decoding")
    for name, content in {
        "vllm": {},
        "vllm.config": {"VllmConfig": object},
        "vllm.v1": {},
        "vllm.v1.worker": {},
        "vllm.v1.worker.gpu_input_batch": {"InputBatch": object},
    }.items():
        module = ModuleType(name)
        vars(module).update(content)
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "suffix_cache"))
    loaded: dict[str, Any] = {}
    exec(compile(source, "suffix_decoding.py", "exec"), loaded)
    proposer_class = loaded["SuffixDecodingProposer"]
    settings = SimpleNamespace(
        num_speculative_tokens=3,
        suffix_decoding_max_tree_depth=24,
        suffix_decoding_max_cached_requests=0,
        suffix_decoding_max_spec_factor=1.0,
        suffix_decoding_min_token_prob=0.1,
    )
    model = SimpleNamespace(max_model_len=64)
    follow_table_in_suffix_decoding(proposer_class)
    proposer = proposer_class(SimpleNamespace(speculative_config=settings, model_config=model))
    tokens = torch.tensor([[1, 2, 3, 4, 5, 6, 1, 2, 3]]).int().numpy()
    batch = SimpleNamespace(
        req_ids=["a"],
        req_id_to_index={"a": 0},
        num_tokens_no_spec=[9],
        num_prompt_tokens=[8],
        token_ids_cpu=tokens,
    )
    drafts = []
    for number in (3, 0, 1, 2, 0, 3):
        proposer.suffix_cache = type(proposer.suffix_cache)(24, 0)
        drafts.append(proposer.propose(number, batch, [[3]]))
    assert drafts == [[[4, 5, 6]], [[]], [[4]], [[4, 5]], [[]], [[4, 5, 6]]]


def test_suffix_decoding_of_another_vllm_is_left_unchanged():
    class Proposer:
        def propose(self, input_batch):
            return input_batch

    propose = Proposer.propose
    follow_table_in_suffix_decoding(Proposer)
    assert Proposer.propose is propose


def test_the_installed_vllm_asks_for_suffixes_as_we_know():
    (method,) = (
        node
        for node in ast.walk(tree("v1.spec_decode.suffix_decoding"))
        if isinstance(node, ast.FunctionDef) and node.name == "propose"
    )
    assert [argument.arg for argument in method.args.args][:2] == ["self", "num_speculative_tokens"]


def test_the_installed_vllm_samples_with_the_arguments_we_know():
    """Otherwise a step without drafts would cost as much as one with drafts, without an error."""
    (method,) = (
        node
        for node in ast.walk(tree("v1.worker.gpu_model_runner"))
        if isinstance(node, ast.FunctionDef) and node.name == "_sample"
    )
    assert [argument.arg for argument in method.args.args] == ["self", "logits", "spec_decode_metadata"]
    assigned = {
        node.attr
        for node in ast.walk(tree("v1.spec_decode.metadata"))
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)
    }
    assert "max_spec_len" in assigned


def test_waiting_process_sleeps(monkeypatch):
    """A loop around `sched_yield` alone can keep the gateway from running for seconds."""
    naps = []
    monkeypatch.setattr("appliance.serving.vllm.repairs.time.sleep", naps.append)
    shared_memory = SimpleNamespace(sched_yield=len)
    sleep_while_waiting(shared_memory)
    shared_memory.sched_yield()
    assert naps == [NAP_SECONDS]


def test_the_installed_vllm_waits_with_the_name_that_is_replaced():
    """Otherwise each of its processes would occupy a core, without an error."""
    waits = [
        node
        for node in ast.walk(tree("distributed.device_communicators.shm_broadcast"))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "sched_yield"
    ]
    assert len(waits) == 2


def test_module_without_these_functions_is_left_unchanged():
    rejection, top_k, shared_memory = SimpleNamespace(), SimpleNamespace(), SimpleNamespace()
    repair_cpu_sampling(rejection, top_k)
    sleep_while_waiting(shared_memory)
    assert (vars(rejection), vars(top_k), vars(shared_memory)) == ({}, {}, {})

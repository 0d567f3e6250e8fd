"""What a refresh takes: each formula against something known, and the table in the documentation."""

import json
import math
import struct
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from appliance.infra.settings import DEMO_DRAFT, DEMO_TARGET
from docs.sizing import (
    BEGIN,
    H100,
    HANDED_OVER,
    PAGE,
    PAIRS,
    Gpu,
    Head,
    Plan,
    Source,
    Target,
    plans,
    sizing_table,
    with_table,
)

(LLAMA_8B, HEAD_8B), (LLAMA_70B, HEAD_70B), (QWEN, HEAD_QWEN) = PAIRS


def numbers_in(directory) -> int:
    """Weights in a safetensors file, by its header."""
    with (directory / "model.safetensors").open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        header = json.loads(file.read(length))
    return sum(math.prod(entry["shape"]) for name, entry in header.items() if name != "__metadata__")


def sizes(directory) -> dict[str, int]:
    """What a config.json says of a model's shape, by the names used here."""
    config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    names = {
        "hidden": "hidden_size",
        "heads": "num_attention_heads",
        "kv_heads": "num_key_value_heads",
        "head_dim": "head_dim",
        "intermediate": "intermediate_size",
    }
    return {ours: config[theirs] for ours, theirs in names.items()} | {"config": config}


def test_head_parameters_match_the_demo_draft():
    """Counted in its file."""
    shape = sizes(DEMO_DRAFT)
    config = shape.pop("config")
    head = Head(
        **shape,
        draft_vocabulary=config["draft_vocab_size"],
        target_hidden=config["target_hidden_size"],
        aux_layers=config["num_aux_hidden_states"],
    )
    assert head.parameters == numbers_in(DEMO_DRAFT)


def test_target_parameters_match_the_demo_target():
    """Counted in its file, which has its embeddings untied."""
    shape = sizes(DEMO_TARGET)
    config = shape.pop("config")
    assert not config["tie_word_embeddings"]
    target = Target(name="demo", layers=config["num_hidden_layers"], vocabulary=config["vocab_size"], **shape)
    assert target.parameters == numbers_in(DEMO_TARGET)


def test_published_shapes_give_the_published_sizes():
    """Qwen3-30B-A3B's model card: 30.5B in total, 3.3B activated.  Llama 3.1's: 8B and 70B (8.03B, 70.6B)."""
    assert round(QWEN.parameters / 1e9, 1) == 30.5
    assert int(QWEN.active_parameters / 1e8) == 33
    assert round(LLAMA_8B.parameters / 1e9, 2) == 8.03
    assert round(LLAMA_70B.parameters / 1e9, 1) == 70.6
    assert LLAMA_70B.active_parameters == LLAMA_70B.parameters


@pytest.mark.parametrize(
    ("samples", "tokens", "published"),
    [(50_000, 1024, 1.6e12), (50_000, 8192, 13e12), (10_000, 8192, 2.6e12), (1, 8192, 268e6)],
)
def test_hidden_state_disk_matches_the_speculators_documentation(samples, tokens, published):
    """
    Of Llama-3.1-8B, with the last layer beside the three that the head reads.

    Source: vllm-project/speculators.  "Train Eagle-3 Model Offline" in its stable documentation has about
    1.6 TB for 50k samples of 1,024 tokens; docs/user_guide/tutorials/train.md at c05b95b has 268 MB for a
    sample of 8,192 tokens, 13 TB for 50k and 2.6 TB for 10k of them.
    """
    plan = Plan(target=LLAMA_8B, head=HEAD_8B, gpu=H100, samples=samples, sample_tokens=tokens)
    assert plan.hidden_disk(Source.OFFLINE) == pytest.approx(published, rel=0.06)
    without_the_last = replace(plan).hidden_bytes(HEAD_8B.aux_layers) * samples * tokens
    assert without_the_last != pytest.approx(published, rel=0.15)


def test_online_disk_does_not_grow_with_the_data_set():
    """What is there at once does not grow with the samples."""
    plan = Plan(target=LLAMA_70B, head=HEAD_70B, gpu=H100)
    more = replace(plan, samples=10 * plan.samples)
    assert more.hidden_disk(Source.ONLINE) == plan.hidden_disk(Source.ONLINE)
    assert more.hidden_disk(Source.OFFLINE) == 10 * plan.hidden_disk(Source.OFFLINE)
    assert plan.hidden_disk(Source.ONLINE) < plan.hidden_disk(Source.OFFLINE) / 1000


def test_target_gpus_hold_the_target():
    """A power of two that its attention heads divide among; half as many would not hold it."""
    for plan in plans():
        gpus = plan.target_gpus
        assert plan.target.heads % gpus == 0
        room = plan.gpu.memory * plan.usable * (1 - plan.cache)
        assert plan.target.parameters * 2 <= gpus * room
        assert gpus == 1 or plan.target.parameters * 2 > gpus / 2 * room
    small = Gpu(name="24 GB", memory=24 * 10**9, peak=1e14)
    assert Plan(target=LLAMA_8B, head=HEAD_8B, gpu=small).target_gpus == 1
    assert Plan(target=LLAMA_70B, head=HEAD_70B, gpu=small).target_gpus == 16


def test_work_follows_the_rules_of_thumb():
    """2 x active weights x tokens for the target; 6 x weights x tokens for each draft token in training."""
    plan = Plan(target=QWEN, head=HEAD_QWEN, gpu=H100, samples=1, sample_tokens=1, epochs=3, unroll=5)
    assert plan.target_work(Source.OFFLINE) == 2 * QWEN.active_parameters
    assert plan.target_work(Source.ONLINE) == 3 * 2 * QWEN.active_parameters
    one = replace(plan, unroll=4).training_work
    assert plan.training_work - one == 3 * 6 * HEAD_QWEN.parameters


def test_online_overlaps_and_offline_does_not():
    """Online takes as long as its slower half, offline as long as both together."""
    for plan in plans():
        rate = plan.gpu.peak * plan.utilisation
        halves = (
            plan.target_work(Source.OFFLINE) / rate / plan.target_gpus,
            plan.training_work / rate / plan.training_gpus,
        )
        assert plan.seconds(Source.OFFLINE) == pytest.approx(sum(halves))
        assert plan.seconds(Source.ONLINE) == pytest.approx(max(halves))


@given(
    samples=st.integers(1, 10**6),
    tokens=st.integers(1, 10**5),
    epochs=st.integers(1, 10),
    unroll=st.integers(1, 8),
    utilisation=st.floats(0.05, 0.9),
)
def test_cost_grows_with_every_input(samples, tokens, epochs, unroll, utilisation):
    """Disk, time and GPUs only grow with samples, epochs and draft tokens; time falls with utilisation."""
    plan = Plan(
        target=LLAMA_8B,
        head=HEAD_8B,
        gpu=H100,
        samples=samples,
        sample_tokens=tokens,
        epochs=epochs,
        unroll=unroll,
        utilisation=utilisation,
    )
    more = (
        replace(plan, samples=samples + 1),
        replace(plan, epochs=epochs + 1),
        replace(plan, unroll=unroll + 1),
    )
    for source in Source:
        for other in more:
            assert other.seconds(source) >= plan.seconds(source)
            assert other.hidden_disk(source) >= plan.hidden_disk(source)
            assert other.gpus(source) >= plan.gpus(source)
        assert replace(plan, utilisation=utilisation / 2).seconds(source) == pytest.approx(
            2 * plan.seconds(source)
        )


def test_aux_layers_and_the_last_hidden_state_are_read():
    """Those that the head fuses, and the one that the target's own answer is made from."""
    assert all(head.aux_layers + 1 == HANDED_OVER for _, head in PAIRS)


def test_documentation_has_the_computed_table():
    """Run `python -m docs.sizing` when this fails."""
    page = PAGE.read_text(encoding="utf-8")
    assert page.count(BEGIN) == 1
    assert f"\n{sizing_table()}\n" in page
    assert with_table(page) == page

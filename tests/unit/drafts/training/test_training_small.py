"""
It learns, and it can be stopped anywhere.
"""

import errno
import json
from dataclasses import replace
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
from safetensors.torch import load_file, save_file  # noqa: E402

from appliance.drafts.lint.lint import lint_pair  # noqa: E402
from appliance.drafts.training.progress import Point, read_points  # noqa: E402
from appliance.drafts.training.small import training  # noqa: E402
from appliance.drafts.training.small.files import new_head, save_head  # noqa: E402
from appliance.drafts.training.small.target import (  # noqa: E402
    Document,
    FrozenTarget,
    choose_device,
    load_target,
)
from appliance.drafts.training.small.trainer import Trainer, collate  # noqa: E402
from appliance.drafts.training.small.training import Training  # noqa: E402
from appliance.drafts.training.training_job import Job, TrainingSet  # noqa: E402
from appliance.drafts.training.windows import plan_epoch  # noqa: E402
from appliance.errors import ConfigurationError, DraftRefusedError, DraftStorageError  # noqa: E402
from appliance.serving.weights import inspect_weights  # noqa: E402
from tests.unit.drafts.training.tiny import (  # noqa: E402
    PARENT,
    TARGET,
    VOCABULARY,
    job,
    samples,
    write_target,
)


@pytest.fixture(scope="module")
def target(tmp_path_factory) -> Path:
    return write_target(tmp_path_factory.mktemp("tiny") / "target")


class BrokenError(Exception):
    """The process is gone."""


def train(
    asked: Job, given: TrainingSet | None = None, *, stop_at: int | None = None, break_at: int | None = None
) -> list[Point]:
    """Run a job here; stop it, or have it break down, after a step."""
    Path(asked.run).mkdir(parents=True, exist_ok=True)
    points: list[Point] = []

    def report(point: Point) -> None:
        points.append(point)
        if point.step == break_at:
            raise BrokenError

    def is_stopped() -> bool:
        return stop_at is not None and bool(points) and points[-1].step >= stop_at

    Training(asked, given or samples(), report=report, is_stopped=is_stopped).run()
    return points


def weights(run: Path) -> bytes:
    return (run / "draft" / "model.safetensors").read_bytes()


@pytest.fixture(scope="module")
def learnt(target, tmp_path_factory) -> tuple[Path, list[Point]]:
    """A run of 60 steps, and how it went."""
    run = tmp_path_factory.mktemp("learnt") / "run"
    return run, train(job(run, target, steps=60))


def test_training_lowers_loss_and_raises_agreement(learnt, target):
    run, points = learnt
    assert points[-1].step == 60
    assert points[-1].loss < 0.8 * points[0].loss
    assert points[-1].agreement[0] > points[0].agreement[0] + 0.1
    draft = inspect_weights(run / "draft")
    assert lint_pair(inspect_weights(target), draft) == ()
    record = draft.training
    assert (record["fc_norm"], record["norm_output"], record["norm_before_fc"]) == (True, True, False)
    assert record["aux_layers"] == [1, 2, 3]
    assert (record["target"], record["samples"], record["missing"]) == (TARGET, 10, 3)
    assert "parent" not in record
    assert record["trained_context"] == 24
    assert record["recipe"]["steps"] == 60
    assert 1 <= record["expected"]["all"]["acceptance_length"] <= 4
    used = (run / "draft" / "used.txt").read_text().splitlines()
    assert used == sorted(f"{each.request_id} {each.digest}" for each in samples().training)
    assert (run / "draft" / "report.html").read_text().count("<svg") == 3


def test_only_used_samples_are_listed(tmp_path, target):
    train(job(tmp_path / "run", target, steps=1, batch=2))
    draft = inspect_weights(tmp_path / "run" / "draft")
    assert draft.training["samples"] == 2
    assert len((tmp_path / "run" / "draft" / "used.txt").read_text().splitlines()) == 2


def test_held_out_samples_are_not_trained_on(tmp_path, target):
    given = samples()
    other = tuple(
        replace(each, token_ids=each.token_ids[::-1]) if each.held_out else each for each in given.samples
    )
    train(job(tmp_path / "one", target))
    train(job(tmp_path / "two", target), replace(given, samples=other))
    assert weights(tmp_path / "one") == weights(tmp_path / "two")


@pytest.mark.parametrize("stop_at", [1, 7])
def test_stopped_training_gives_the_same_draft(tmp_path, target, stop_at):
    train(job(tmp_path / "whole", target))
    asked = job(tmp_path / "parts", target)
    train(asked, stop_at=stop_at)
    assert not (tmp_path / "parts" / "draft").exists()
    train(asked)
    assert weights(tmp_path / "whole") == weights(tmp_path / "parts")
    whole, parts = (
        [(p.step, p.loss) for p in read_points(tmp_path / n / "progress.jsonl")] for n in ("whole", "parts")
    )
    assert whole == parts


@pytest.mark.parametrize("break_at", [2, 8])
def test_crashed_training_gives_the_same_draft(tmp_path, target, monkeypatch, break_at):
    monkeypatch.setattr(training, "CHECKPOINT_STEPS", 3)
    train(job(tmp_path / "whole", target))
    asked = job(tmp_path / "parts", target)
    with pytest.raises(BrokenError):
        train(asked, break_at=break_at)
    train(asked)
    assert weights(tmp_path / "whole") == weights(tmp_path / "parts")


def test_finished_training_changes_nothing(tmp_path, target):
    asked = job(tmp_path / "run", target)
    train(asked)
    before = weights(tmp_path / "run")
    assert train(asked) == []
    assert weights(tmp_path / "run") == before


def test_half_written_draft_is_replaced(tmp_path, target):
    """A crash during assembly leaves no draft."""
    partial = tmp_path / "run" / "draft.partial"
    partial.mkdir(parents=True)
    (partial / "model.safetensors").write_bytes(b"half")
    train(job(tmp_path / "run", target))
    assert lint_pair(inspect_weights(target), inspect_weights(tmp_path / "run" / "draft")) == ()
    assert not partial.exists()


def test_no_content_is_left_in_the_run(tmp_path, target):
    """Checkpoint, progress, record and report name samples, but hold no token of them."""
    given = samples()
    marked = tuple(
        replace(each, token_ids=tuple([37, 41] * len(each.token_ids))[: len(each.token_ids)])
        for each in given.samples
    )
    train(job(tmp_path / "run", target), replace(given, samples=marked))
    needles = [
        json.dumps([37, 41, 37]),
        "37, 41, 37",
        torch.tensor([37, 41, 37]).numpy().tobytes().decode("latin-1"),
    ]
    for file in (tmp_path / "run").rglob("*"):
        if file.is_file():
            content = file.read_bytes().decode("latin-1")
            assert not any(needle in content for needle in needles), file


def parent_of(target: Path, directory: Path, **changes) -> Path:
    """A head that has learnt nothing yet."""
    stored = new_head(inspect_weights(target).config, load_target(target, "cpu").output)
    directory.mkdir()
    save_head(stored, directory)
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, **changes}))
    return directory


def test_refresh_starts_where_its_parent_ended(tmp_path, target, learnt):
    run, before = learnt
    points = train(job(tmp_path / "run", target, parent=run / "draft", steps=3, rate=1e-4))
    assert points[0].loss < 0.9 * before[0].loss
    draft = inspect_weights(tmp_path / "run" / "draft")
    assert draft.training["parent"] == PARENT
    assert draft.config == inspect_weights(run / "draft").config


def test_plain_parent_stays_plain(tmp_path, target):
    """A refresh keeps the kind of its parent and records it."""
    flags = {"fc_norm": False, "norm_output": False}
    parent = parent_of(target, tmp_path / "plain", **flags)
    tensors = load_file(parent / "model.safetensors")
    kept = {name: tensor for name, tensor in tensors.items() if not name.startswith("fc_norm")}
    save_file(kept, parent / "model.safetensors")
    train(job(tmp_path / "run", target, parent=parent))
    draft = inspect_weights(tmp_path / "run" / "draft")
    assert (draft.training["fc_norm"], draft.training["norm_output"]) == (False, False)
    assert not any(name.startswith("fc_norm") for name in draft.tensors)


def test_sliding_window_shorter_than_the_windows_is_refused(tmp_path, target):
    parent = parent_of(target, tmp_path / "parent", layer_types=["sliding_attention"], sliding_window=8)
    with pytest.raises(DraftRefusedError, match="--window 24"):
        train(job(tmp_path / "run", target, parent=parent))


def test_training_limited_by_time_ends_in_time(tmp_path, target):
    """Time before an interruption counts; time between does not."""
    asked = job(tmp_path / "run", target, steps=None, minutes=1.0)
    Path(asked.run).mkdir()
    now = 0.0

    def tick() -> float:
        nonlocal now
        now += 1.0
        return now

    def run(stop_after: int | None) -> list[Point]:
        points: list[Point] = []
        Training(
            asked,
            samples(),
            report=points.append,
            is_stopped=lambda: stop_after is not None and len(points) >= stop_after,
            now=tick,
        ).run()
        return points

    first = run(stop_after=4)
    now += 1000.0
    second = run(stop_after=None)
    assert second[0].step == first[-1].step + 1
    assert second[0].elapsed < first[-1].elapsed + 10
    assert 50.0 < second[-1].elapsed < 70.0
    assert second[-1].done > 0.9
    assert second[-1].rate < second[0].rate
    assert (tmp_path / "run" / "draft" / "training.json").exists()


def test_changed_job_does_not_resume(tmp_path, target):
    train(job(tmp_path / "run", target), stop_at=2)
    with pytest.raises(DraftRefusedError, match="recipe"):
        train(job(tmp_path / "run", target, rate=1e-3))
    with pytest.raises(DraftRefusedError, match="erased"):
        train(job(tmp_path / "run", target), samples(11))


def test_divergence_ends_the_training(tmp_path, target):
    with pytest.raises(DraftRefusedError, match="diverged"):
        train(job(tmp_path / "run", target, rate=1e30, steps=40))
    assert not (tmp_path / "run" / "draft").exists()


def test_tokens_the_target_does_not_know_are_refused(tmp_path, target):
    given = samples()
    odd = replace(given.samples[0], token_ids=(VOCABULARY, *given.samples[0].token_ids[1:]))
    with pytest.raises(DraftRefusedError, match="vocabulary"):
        train(job(tmp_path / "run", target), replace(given, samples=(odd, *given.samples[1:])))


def test_damaged_checkpoint_is_reported(tmp_path, target):
    asked = job(tmp_path / "run", target)
    train(asked, stop_at=3)
    file = tmp_path / "run" / "checkpoint.pt"
    file.write_bytes(file.read_bytes()[:200])
    with pytest.raises(DraftStorageError, match="cannot be read"):
        train(asked)
    torch.save({"format": 0}, file)
    with pytest.raises(DraftStorageError, match="another version"):
        train(asked)


def test_general_text_takes_its_share(tmp_path, target, monkeypatch):
    """Half of each step; the samples' windows keep their order."""
    monkeypatch.setattr(training, "read_corpus", lambda *_: [Document(list(range(2, 50)))] * 4)
    sizes = []
    monkeypatch.setattr(
        Trainer,
        "step",
        lambda self, batch, rate, step=Trainer.step: sizes.append(len(batch.ids)) or step(self, batch, rate),
    )
    asked = replace(
        job(tmp_path / "run", target, corpus_share=0.5), corpus="/a/file", corpus_digest="sha256:" + "9" * 64
    )
    train(asked)
    assert set(sizes) <= {3, 4}
    assert inspect_weights(tmp_path / "run" / "draft").training["recipe"]["corpus"] == asked.corpus_digest


def test_measuring_learns_nothing(target):
    loaded = load_target(target, "cpu")
    stored = new_head(inspect_weights(target).config, loaded.output)
    trainer = Trainer(stored.head, loaded, job(Path("x"), target).recipe, "cpu")
    texts = samples().held_out
    batches = [collate(texts, step, 3) for step in plan_epoch(texts, batch=2, window=24, seed=1, epoch=0)]
    before = [parameter.clone() for parameter in stored.head.parameters()]
    first, second = trainer.measure(batches), trainer.measure(batches)
    assert first == second
    assert all(torch.equal(*pair) for pair in zip(before, stored.head.parameters(), strict=True))
    assert 1.0 <= first.acceptance_length <= 4.0


def test_draft_that_is_the_target_is_accepted_whole(target):
    """The upper bound: 1 + unroll tokens per draft, within the answer."""
    loaded = load_target(target, "cpu")
    stored = new_head(inspect_weights(target).config, loaded.output)
    recipe = job(Path("x"), target).recipe

    class Agreeing(FrozenTarget):
        def observe(self, batch, layers, embedding=None):
            seen = super().observe(batch, layers, embedding)
            return replace(seen, logits=torch.zeros_like(seen.logits).index_fill_(-1, torch.tensor([5]), 9.0))

    with torch.no_grad():
        for name, parameter in stored.head.named_parameters():
            if name == "lm_head.weight":
                parameter.zero_()
                parameter[5] = stored.head.norm.weight
    stored.head.norm.weight.data.fill_(1.0)
    stored.head.norm.forward = torch.ones_like
    trainer = Trainer(stored.head, Agreeing(loaded._model, "cpu"), recipe, "cpu")
    texts = samples().held_out
    batches = [collate(texts, step, 3) for step in plan_epoch(texts, batch=2, window=40, seed=1, epoch=0)]
    measured = trainer.measure(batches)
    assert measured.agreement == (1.0, 1.0, 1.0)
    answers = [sum(each.loss_mask) for each in texts]
    expected = 1 + sum(sum(min(3, left) for left in range(1, n + 1)) for n in answers) / sum(answers)
    assert measured.acceptance_length == pytest.approx(expected)


def test_missing_gpu_is_reported():
    if torch.cuda.is_available():
        assert choose_device("auto") == "cuda"
    else:
        assert choose_device("auto") == "cpu"
        with pytest.raises(ConfigurationError, match="--device cpu"):
            choose_device("cuda")


def test_full_disk_ends_the_training_with_advice(tmp_path, target, monkeypatch):
    full = OSError(errno.ENOSPC, "No space left on device")

    def refuse(*_: object) -> None:
        raise full

    for place, name in enumerate(("append_point", "drop_after", "save_head")):
        with monkeypatch.context() as patch:
            patch.setattr(training, name, refuse)
            with pytest.raises(DraftStorageError, match="disk is full"):
                train(job(tmp_path / f"run-{place}", target, steps=2))
        train(job(tmp_path / f"run-{place}", target, steps=2))
        assert (tmp_path / f"run-{place}" / "draft" / "training.json").exists()

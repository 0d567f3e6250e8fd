"""
A run's directory, progress, report and sample lines.
"""

import hashlib
import io
import json
from dataclasses import replace

import pytest

from appliance.drafts.training.outcome import TrainingOutcome, training_record, write_outcome
from appliance.drafts.training.progress import (
    Point,
    ProgressLine,
    append_point,
    describe,
    drop_after,
    read_points,
)
from appliance.drafts.training.run_directory import run_directory
from appliance.drafts.training.training_job import (
    Job,
    JobSample,
    TrainingSet,
    end_line,
    job_line,
    read_samples,
    sample_line,
    sample_lines,
)
from appliance.drafts.training.training_recipe import TrainingRecipe
from appliance.drafts.training.training_report import render_page
from appliance.errors import ConfigurationError, DraftRefusedError, DraftStorageError

JOB = Job(
    run="/runs/one",
    target="/models/target",
    target_digest="sha256:" + "a" * 64,
    parent="/models/draft",
    parent_digest="sha256:" + "b" * 64,
    dataset="sha256:" + "c" * 64,
    recipe=TrainingRecipe(steps=50),
)
SAMPLES = tuple(
    JobSample(
        request_id=f"req-{number}",
        digest=f"{number:064x}",
        held_out=number == 3,
        token_ids=(1, 2, 3, number),
        loss_mask=(False, False, True, True),
    )
    for number in range(4)
)
GIVEN = TrainingSet(samples=SAMPLES, missing=1)


def point(step: int, **more) -> Point:
    numbers = {"elapsed": step * 2.0, "done": step / 50, "loss": 3.0 - step / 50, "agreement": (0.5, 0.25)}
    return Point(step=step, rate=1e-3, **numbers, **more)


class Dataset:
    """Three samples, of which one turns out erased."""

    manifest = GIVEN

    def __init__(self) -> None:
        self.missing = 0

    def read(self, held_out: bool):
        for sample in SAMPLES:
            if sample.held_out is held_out and sample.request_id == "req-1":
                self.missing += 1
            elif sample.held_out is held_out:
                yield sample


def test_samples_round_trip():
    given = read_samples(sample_lines(Dataset()))
    assert [sample.request_id for sample in given.training] == ["req-0", "req-2"]
    assert given.held_out == (SAMPLES[3],)
    assert given.samples[0] == SAMPLES[0]
    assert given.missing == 1


@pytest.mark.parametrize("kept", [0, 1, 2, 3])
def test_truncated_stream_is_refused(kept):
    lines = list(sample_lines(Dataset()))[:kept]
    with pytest.raises(DraftRefusedError, match="are incomplete"):
        read_samples(lines)


def test_truncated_line_is_refused():
    lines = [sample_line(SAMPLES[0], digest="0" * 64, held_out=False)[:-5], end_line(samples=1, missing=0)]
    with pytest.raises(DraftRefusedError, match="are incomplete"):
        read_samples(lines)


def test_job_round_trips():
    assert Job.from_json(json.loads(job_line(JOB))) == JOB


def test_unnamed_run_is_named_after_its_identity(tmp_path):
    first = run_directory(tmp_path, JOB.identity, None)
    assert first == run_directory(tmp_path, replace(JOB, device="cpu", run="x").identity, None)
    assert first != run_directory(tmp_path, replace(JOB, recipe=TrainingRecipe(steps=51)).identity, None)
    assert run_directory(tmp_path, JOB.identity, "refresh-7").path == tmp_path / "runs" / "refresh-7"


@pytest.mark.parametrize("name", ["", "..", "a/b", "A", "-x", "x" * 65, "ü"])
def test_invalid_run_name_is_refused(tmp_path, name):
    with pytest.raises(ConfigurationError, match="--run"):
        run_directory(tmp_path, JOB.identity, name)


CHANGES = {
    "target": (replace(JOB, target_digest="sha256:" + "d" * 64), GIVEN),
    "draft it starts from": (replace(JOB, parent_digest=None), GIVEN),
    "data set": (replace(JOB, dataset="sha256:" + "e" * 64), GIVEN),
    "erased": (JOB, TrainingSet(samples=SAMPLES[1:], missing=2)),
    "general text": (replace(JOB, corpus_digest="sha256:" + "f" * 64), GIVEN),
    "recipe": (replace(JOB, recipe=TrainingRecipe(steps=51)), GIVEN),
}


@pytest.mark.parametrize("what", CHANGES)
def test_run_refuses_changed_inputs(tmp_path, what):
    run = run_directory(tmp_path, JOB.identity, "one")
    with run.locked():
        run.claim(JOB, GIVEN)
        run.claim(replace(JOB, device="cuda", target="/elsewhere"), GIVEN)
        with pytest.raises(DraftRefusedError, match=what):
            run.claim(*CHANGES[what])
        if what != "erased":
            with pytest.raises(DraftRefusedError, match=what):
                run.refuse_changed(CHANGES[what][0].identity)


def test_one_process_at_a_time_trains_a_run(tmp_path):
    run = run_directory(tmp_path, JOB.identity, "one")
    with run.locked(), pytest.raises(DraftRefusedError, match="in use"), run.locked():
        pass
    with run.locked():
        pass


def test_run_directory_that_cannot_be_made_is_reported(tmp_path):
    (tmp_path / "runs").write_text("no directory")
    with (
        pytest.raises(DraftStorageError, match="cannot write"),
        run_directory(tmp_path, JOB.identity, "one").locked(),
    ):
        pass


def test_published_run_keeps_its_digest_and_drops_checkpoints(tmp_path):
    run = run_directory(tmp_path, JOB.identity, "one")
    with run.locked():
        assert run.published is None
        (run.path / "checkpoint.pt").touch()
        (run.path / "checkpoints" / "3").mkdir(parents=True)
        (run.path / "draft").mkdir()
        run.publish("sha256:" + "1" * 64)
        assert run.published == "sha256:" + "1" * 64
        assert sorted(path.name for path in run.path.iterdir()) == ["draft", "lock", "published.json"]


def test_progress_round_trips_without_torn_lines(tmp_path):
    file = tmp_path / "progress.jsonl"
    points = [point(1), point(2, held_out=(0.5, 0.25), acceptance_length=1.625)]
    for each in points:
        append_point(file, each)
    with file.open("a") as torn:
        torn.write('{"step":3,"ela')
    assert read_points(file) == points
    drop_after(file, 1)
    append_point(file, point(2))
    assert read_points(file) == [points[0], point(2)]
    append_point(file, point(2, held_out=(0.5, 0.5)))
    assert read_points(file) == [points[0], point(2, held_out=(0.5, 0.5))]
    assert read_points(tmp_path / "none") == []


def test_terminal_gets_one_line_and_a_pipe_a_few():
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    terminal, pipe = Terminal(), io.StringIO()
    for stream in (terminal, pipe):
        line = ProgressLine(stream)
        for step in range(1, 51):
            line.show(point(step), steps=50)
        line.close()
        line.close()
    assert terminal.getvalue().count("\n") == 1
    assert terminal.getvalue().count("\r") == 50
    assert 5 <= pipe.getvalue().count("\n") <= 22
    assert describe(point(25), steps=50) == "step 25/50, loss 2.500, agreement 0.50 0.25, 50 s left"


def test_report_stands_alone_and_shows_both_curves():
    points = [point(step) for step in range(1, 51)]
    points[-1] = point(50, held_out=(0.5, 0.25), acceptance_length=1.625)
    page = render_page("Training <of> a draft", {"Tool": "a & b"}, points)
    assert "http" not in page
    assert "<script" not in page
    assert "Training &lt;of&gt; a draft" in page
    assert "a &amp; b" in page
    assert page.count("<svg") == 3
    assert page.count("<polyline") == 1 + 2 + 2
    assert "No step was recorded" in render_page("x", {}, [])
    assert render_page("x", {}, points[:1]).count("<svg") == 2


OUTCOME = TrainingOutcome(
    fc_norm=True,
    norm_output=True,
    norm_before_fc=False,
    aux_layers=(2, 4, 5),
    tool="a tool",
    longest=192,
    steps=50,
    used=(SAMPLES[2], SAMPLES[0]),
    details={"device": "cpu"},
    acceptance_length=2.34567,
)


def test_training_record_names_all_inputs(tmp_path):
    write_outcome(tmp_path, JOB, GIVEN, OUTCOME, [point(1)])
    record = json.loads((tmp_path / "training.json").read_text())
    assert record == training_record(JOB, GIVEN, OUTCOME)
    assert (record["target"], record["parent"], record["dataset"]) == (
        JOB.target_digest, JOB.parent_digest, JOB.dataset,
    )  # fmt: skip
    assert (record["samples"], record["missing"], record["trained_context"]) == (2, 1, 192)
    assert record["expected"] == {"all": {"acceptance_length": 2.346, "draft_tokens": 3}}
    used = (tmp_path / "used.txt").read_bytes()
    assert used.decode() == f"req-0 {SAMPLES[0].digest}\nreq-2 {SAMPLES[2].digest}\n"
    assert record["used"] == hashlib.sha256(used).hexdigest()


def test_what_was_not_measured_is_not_expected():
    record = training_record(JOB, GIVEN, replace(OUTCOME, acceptance_length=None))
    assert "expected" not in record

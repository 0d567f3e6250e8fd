"""`appliance draft evaluate`: verdict, exit code, report, audit log."""

import json
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from appliance.audit.entry import decode
from appliance.audit.store import SqlAuditStore
from appliance.cli.draft import evaluate as command
from appliance.drafts.evaluation import runner
from appliance.drafts.evaluation.evaluation_results import Evaluation
from appliance.drafts.evaluation.evaluation_worker import run_worker
from appliance.drafts.evaluation.store import load_evaluation
from appliance.drafts.harvest.tokenizer import digest_tokenizer
from appliance.drafts.registry.active_draft import ActiveDraft, write_active_draft
from appliance.drafts.registry.draft_source import read_source
from appliance.drafts.registry.site_registry import open_registry, site_signer
from appliance.errors import (
    AuditUnavailableError,
    ConfigurationError,
    DraftNotFoundError,
    DraftRefusedError,
    WorkerFailedError,
)
from appliance.infra.settings import Settings, load_settings
from appliance.serving.weights import load_weights
from tests.unit.drafts.evaluation.evaluation_parts import DATASET, Programs, in_thread, sample
from tests.unit.drafts.lint.builder import RECORD, eagle31, write

PROMPTS = 16


@dataclass
class EvaluationBench:
    """A site of tiny weights, with small programs as workers."""

    settings: Settings
    config: Path
    target: Path
    target_digest: str
    old: str
    new: str
    programs: Programs

    @property
    def drafts(self) -> Path:
        return self.settings.data.directory / "drafts"

    def invoke(self, *words: str, max_tokens: int = 24) -> Any:
        app = typer.Typer()
        app.command()(command.COMMANDS["evaluate"])
        options = ["--dataset", "dddd", "--max-tokens", str(max_tokens), "--config", str(self.config)]
        return CliRunner().invoke(app, [*words, *options])

    def entries(self) -> list[dict[str, Any]]:
        with closing(SqlAuditStore(f"sqlite:///{self.settings.data.directory / 'audit.db'}")) as store:
            return [dict(decode(leaf.leaf).fields) for leaf in store.leaves(0, 100)]


class SmallDataset:
    """Samples of a data set, all of them held out."""

    missing, withheld = 2, 1

    def __init__(self, tokenizer: str) -> None:
        self.manifest = SimpleNamespace(digest=DATASET, tokenizer=tokenizer)

    def read(self, held_out: bool):
        assert held_out
        return map(sample, range(PROMPTS))


def draft(directory: Path, trained_context: int, **training: Any) -> tuple[Path, Path]:
    made = eagle31()
    made.training = {**RECORD, "trained_context": trained_context, **training}
    target, weights = write(made, directory)
    return target.path, weights.path


@pytest.fixture
def bench(tmp_path, monkeypatch) -> EvaluationBench:
    target, first = draft(tmp_path / "first", 512)
    _, second = draft(tmp_path / "second", 768)
    config = tmp_path / "settings.yaml"
    config.write_text(
        json.dumps(
            {
                "data": {"directory": str(tmp_path / "data")},
                "worker": {"model": str(target), "draft": str(first), "device": "cpu"},
            }
        )
    )
    settings = load_settings(config, environment={})
    registry, signer = open_registry(settings, lambda: 1_800_000_000.0), site_signer(settings)
    digest = load_weights(target).digest
    old, new = (
        registry.register(read_source(path), target=digest, how="imported", signer=signer).digest
        for path in (first, second)
    )
    programs = Programs({old: {"rate": 0.4}, new: {"rate": 0.75}})
    monkeypatch.setattr(command, "WorkerTemplate", programs)
    monkeypatch.setattr(runner, "run_worker", in_thread)
    dataset = SmallDataset(digest_tokenizer(target))
    monkeypatch.setattr(command, "open_dataset", lambda _settings, _name: dataset)
    return EvaluationBench(settings, config, target, digest, old, new, programs)


def test_passed_draft_exits_0_with_report_page_and_audit_entry(bench):
    """Finished steps are deleted."""
    result = bench.invoke(bench.new.removeprefix("sha256:")[:10])
    assert result.exit_code == 0, (result.output, result.exception)
    found = load_evaluation(bench.drafts, bench.new)
    assert (found.verdict, found.incumbent, found.target) == ("passed", bench.old, bench.target_digest)
    assert (found.missing, found.withheld) == (2, 1)
    assert result.stdout.splitlines()[-2:] == [
        "verdict    passed",
        f"report     {bench.drafts}/evaluations/{bench.new.removeprefix('sha256:')}/report.json",
    ]
    assert f"acceptance {found.acceptance_ratio.value:.3f} times" in result.stdout
    (entry,) = bench.entries()
    assert entry.pop("actor").startswith("cli:")
    assert entry == {
        "draft": bench.new,
        "previous_draft": bench.old,
        "verdict": "passed",
        "evaluation": found.digest.removeprefix("sha256:"),
        "acceptance_length": f"{found.lines[1].acceptance_length.value:.3f}",
        "previous_acceptance_length": f"{found.lines[0].acceptance_length.value:.3f}",
        "speed_ratio": f"{found.speed_ratio.value:.3f}",
        "mismatches": 0,
    }
    place = bench.drafts / "evaluations" / bench.new.removeprefix("sha256:")
    assert sorted(path.name for path in place.iterdir()) == [".lock", "report.html", "report.json"]


def test_refused_draft_exits_1_with_its_reasons(bench):
    """The newer draft is active, the older one is the candidate."""
    standing = ActiveDraft(target=bench.target_digest, draft=bench.new)
    write_active_draft(bench.drafts, standing)
    result = bench.invoke(bench.old)
    assert result.exit_code == 1, result.exception
    assert "reason     its acceptance length is " in result.stdout
    assert "verdict    refused" in result.stdout
    (entry,) = bench.entries()
    assert (entry["verdict"], entry["previous_draft"]) == ("refused", bench.new)
    assert entry["reason"].startswith("its acceptance length is ")


def test_json_prints_only_the_report(bench):
    """Progress goes to standard error."""
    result = bench.invoke(bench.new, "--json")
    assert result.exit_code == 0, result.exception
    printed = result.stdout.encode()
    assert Evaluation.decode(printed.rstrip(b"\n"), "stdout") == load_evaluation(bench.drafts, bench.new)
    assert "took" in result.stderr


def test_incumbent_none_compares_with_the_target_alone(bench):
    result = bench.invoke(bench.new, "--incumbent", "none", "--json")
    assert result.exit_code == 0, result.exception
    assert "incumbent" not in json.loads(result.stdout)
    assert bench.old not in bench.programs.started
    assert bench.entries()[0]["previous_draft"] == "none"


@pytest.mark.parametrize("words", [(), ("--incumbent", "the same")])
def test_draft_is_not_compared_with_itself(bench, words):
    words = [bench.old if word == "the same" else word for word in words]
    result = bench.invoke(bench.old, *words)
    assert isinstance(result.exception, DraftRefusedError)
    assert "there is nothing to evaluate" in str(result.exception)
    assert not (bench.drafts / "evaluations").exists()


def test_unregistered_draft_is_not_found(bench):
    assert isinstance(bench.invoke("ffff").exception, DraftNotFoundError)
    assert isinstance(bench.invoke(bench.new, "--incumbent", "ffff").exception, DraftNotFoundError)


def test_another_target_is_refused_without_a_worker(bench, tmp_path):
    """And without reading content."""
    other, _ = draft(tmp_path / "other", 512)
    (other / "generation_config.json").write_text("{}")
    result = bench.invoke(bench.new, "--target", str(other))
    assert result.exit_code == 1, result.exception
    found = load_evaluation(bench.drafts, bench.new)
    assert found.reasons[0].startswith("it is registered for the target sha256:")
    assert (found.lines, found.missing, bench.programs.started) == ((), 0, [])
    assert "mismatches" not in bench.entries()[0]


def test_data_set_of_another_tokenizer_is_refused(bench, monkeypatch):
    """Its token ids mean other text."""
    monkeypatch.setattr(command, "open_dataset", lambda *_: SmallDataset("sha256:another"))
    result = bench.invoke(bench.new)
    assert isinstance(result.exception, DraftRefusedError)
    assert "another tokenizer" in str(result.exception)


def test_max_tokens_as_long_as_the_context_is_refused(bench):
    """Before anything is started."""
    result = bench.invoke(bench.new, max_tokens=1024)
    assert isinstance(result.exception, ConfigurationError)
    assert "leaves no room for a prompt" in str(result.exception)
    assert bench.programs.started == []


def test_no_report_without_its_audit_entry(bench, monkeypatch):
    """Promotion reads the report, so an unrecorded one must not exist."""

    def refuse(_settings):
        def record(*_given):
            raise AuditUnavailableError("the database is away")

        return record

    monkeypatch.setattr(command, "open_journal", refuse)
    result = bench.invoke(bench.new)
    assert isinstance(result.exception, AuditUnavailableError)
    assert load_evaluation(bench.drafts, bench.new) is None


def test_worker_failure_leaves_no_report_and_the_next_run_resumes(bench, monkeypatch):
    monkeypatch.setattr(runner, "run_worker", run_worker)
    bench.programs.scripts[bench.new]["dies_at"] = 30
    assert isinstance(bench.invoke(bench.new).exception, WorkerFailedError)
    assert load_evaluation(bench.drafts, bench.new) is None
    del bench.programs.scripts[bench.new]["dies_at"]
    bench.programs.started.clear()
    result = bench.invoke(bench.new)
    assert result.exit_code == 0, result.exception
    assert bench.target_digest not in bench.programs.started
    assert "were finished before, and are kept" in result.stderr

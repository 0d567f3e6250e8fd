"""
A draft that does not fit is never served; output and audit log say so.
"""

import io

import pytest

from appliance.app.announcer import Announcer
from appliance.app.worker_process import Listeners, LoadedPair, WorkerRole, load_pair
from appliance.drafts.lint.rules import Rule
from appliance.errors import ConfigurationError
from appliance.infra.data_directory import locate
from appliance.infra.logs import configure_logs
from appliance.infra.settings import DataSettings, LogSettings, Settings, WorkerSettings
from appliance.serving.pool import WorkerPool
from appliance.serving.supervise import WorkerEvent, WorkerEventKind
from appliance.speculation.values import Reason, SpeculationMode
from tests.fakes import audit_fields
from tests.unit.drafts.lint.builder import Draft, eagle31, write


@pytest.fixture
def load(tmp_path):
    """The loaded pair, and the output."""

    def run(draft: Draft, **fields) -> tuple[LoadedPair, str]:
        target, weights = write(draft, tmp_path)
        settings = WorkerSettings(model=target.path, draft=weights.path, **fields)
        said = io.StringIO()
        try:
            return load_pair(settings, Announcer(said)), said.getvalue()
        except ConfigurationError as error:
            error.add_note(said.getvalue())
            raise

    return run


def without_fc() -> Draft:
    draft = eagle31()
    draft.drop("fc.weight")
    return draft


def test_draft_that_fits_is_loaded_and_digested(load):
    pair, said = load(eagle31())
    assert pair.draft is not None
    assert pair.draft.digest.startswith("sha256:")
    assert pair.target.digest.startswith("sha256:")
    assert (pair.lint, pair.draft_refused, said) == ((), False, "")


def test_warnings_are_printed_and_kept_for_the_audit_log(load):
    pair, said = load(eagle31(), max_model_len=2048)
    assert pair.draft is not None
    assert not pair.draft_refused
    assert [finding.rule for finding in pair.lint] == [Rule.MAX_POSITION_EMBEDDINGS]
    assert said.startswith("warning: max-position-embeddings: its max_position_embeddings is 1024")


def test_error_refuses_to_start(load):
    with pytest.raises(ConfigurationError, match=r"does not fit: it has no fc\.weight") as refusal:
        load(without_fc())
    assert refusal.value.__notes__[0].startswith("error: fc-missing: it has no fc.weight")


def test_error_serves_the_target_alone_if_configured(load):
    pair, said = load(without_fc(), bad_draft="target_only")
    assert (pair.draft, pair.draft_refused) == (None, True)
    assert pair.target.digest.startswith("sha256:")
    assert [finding.rule for finding in pair.lint] == [Rule.FC_MISSING]
    assert said.endswith("does not fit: the target is served alone\n")


@pytest.mark.parametrize("fields", [{"method": "ngram"}, {"draft": None}])
def test_without_a_draft_nothing_is_linted(load, tmp_path, fields):
    if "draft" in fields:
        target, _ = write(without_fc(), tmp_path)
        pair = load_pair(WorkerSettings(model=target.path, draft=None), Announcer(io.StringIO()))
    else:
        pair, _ = load(without_fc(), **fields)
    assert (pair.draft, pair.lint, pair.draft_refused) == (None, (), False)


@pytest.mark.parametrize(
    ("method", "why"),
    [("draft_model", "it is a head"), ("mtp", "the target's config has no prediction layers")],
)
def test_another_method_is_refused_by_its_own_rules(load, method, why):
    """Instead of a traceback of vLLM, minutes later."""
    with pytest.raises(ConfigurationError, match=f"does not fit: {why}"):
        load(eagle31(), method=method)


@pytest.mark.parametrize("method", ["draft_model", "mtp"])
def test_the_target_alone_is_served_if_another_method_does_not_fit(load, method):
    pair, said = load(eagle31(), method=method, bad_draft="target_only")
    assert (pair.draft, pair.draft_refused) == (None, True)
    assert said.endswith("does not fit: the target is served alone\n")


class Recorder:
    """Takes audit entries and keeps them."""

    def __init__(self) -> None:
        self.entries = []

    def submit(self, entry_type, /, **fields):
        self.entries.append((entry_type, audit_fields(entry_type, fields)))


@pytest.fixture
def plan(tmp_path):
    """A worker that is planned, and never started."""

    def run(draft: Draft, **fields) -> tuple[WorkerRole, Recorder]:
        target, weights = write(draft, tmp_path)
        worker = WorkerSettings(model=target.path, draft=weights.path, device="cpu", **fields)
        settings = Settings(worker=worker, data=DataSettings(directory=tmp_path / "data"))
        logger = configure_logs(LogSettings(), terminal=False)
        role = WorkerRole.plan(settings, locate(settings), logger, Announcer(io.StringIO()))
        recorder = Recorder()
        role._listeners = Listeners(pool=WorkerPool(), audit=recorder, metrics=None)
        return role, recorder

    return run


def test_worker_without_its_draft_says_why(plan):
    role, recorder = plan(without_fc(), bad_draft="target_only")
    assert (role.worker.mode, role.worker.reason) == (SpeculationMode.TARGET_ONLY, Reason.DRAFT_LINT_FAILED)
    assert role.worker.draft == ""
    role.on_event(WorkerEvent(kind=WorkerEventKind.HEALTHY, worker="worker-1", detail="up"))
    ((_, fields),) = recorder.entries
    assert fields["speculation_method"] == "none"
    assert "draft" not in fields
    assert fields["draft_lint"] == ["fc-missing"]


def test_audit_log_has_the_lint_warnings(plan):
    role, recorder = plan(eagle31(), max_model_len=2048)
    assert (role.worker.mode, role.worker.reason) == (SpeculationMode.SPECULATIVE, None)
    role.on_event(WorkerEvent(kind=WorkerEventKind.HEALTHY, worker="worker-1", detail="up"))
    assert recorder.entries[0][1]["draft_lint"] == ["max-position-embeddings"]


def test_clean_draft_has_no_lint_member(plan):
    role, recorder = plan(eagle31())
    role.on_event(WorkerEvent(kind=WorkerEventKind.HEALTHY, worker="worker-1", detail="up"))
    assert "draft_lint" not in recorder.entries[0][1]

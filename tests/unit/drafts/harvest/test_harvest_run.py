"""A harvest is logged first, stays within the policy, and takes nothing twice."""

from collections import Counter

import pytest

from appliance.audit.entry_types import EntryType
from appliance.drafts.harvest.candidate import POLICY, HarvestFilter, allows
from appliance.drafts.harvest.conversation import Skipped
from appliance.drafts.harvest.dataset import DATASETS, open_dataset
from appliance.drafts.harvest.dataset_manifest import is_held_out
from appliance.drafts.harvest.harvest import (
    TENANTS_PER_ENTRY,
    HarvestPurpose,
    HarvestTools,
    harvest,
    preview,
    survey,
)
from appliance.drafts.harvest.selection import SampleSelection, SelectionLimits
from appliance.errors import AuditUnavailableError, DraftRefusedError
from tests.unit.drafts.harvest.harvest_site import MODEL, TOKENIZER, WEIGHTS, LetterChild, allowing

PURPOSE = HarvestPurpose(target=WEIGHTS, tokenizer=TOKENIZER, text="spring refresh")
WANTED = HarvestFilter(models={MODEL}, weights=WEIGHTS, longest=2048)


class Run:
    """Everything a harvest works with; parts can be made to fail."""

    def __init__(self, site):
        self.site = site
        self.tokenizer = LetterChild()
        self.opened = []
        self.refuse = 0
        """Number of the entry that cannot be written."""
        self.recorded = []
        self.allowed = {"acme", "clinic"}

    def open_content(self, request_id, tenant):
        self.opened.append(request_id)
        return self.site.vault.open_content(request_id, tenant)

    def keep(self, sample):
        return self.site.vault.keep(sample)

    def journal(self, entry_type, fields):
        self.recorded.append((dict(fields), len(self.opened)))
        if self.refuse and len(self.recorded) >= self.refuse:
            message = "the disk is full"
            raise AuditUnavailableError(message)
        return self.site.record(entry_type, **fields, actor="cli:test")

    def parts(self):
        return HarvestTools(
            samples=self,
            tokenizer=self.tokenizer,
            journal=self.journal,
            permitted=lambda: self.allowed,
            clock=self.site.clock,
            drafts=self.site.directory / "drafts",
        )

    def survey(self, tenants=("acme", "clinic")):
        return survey(self.site.store.answered(tenants), WANTED)

    def __call__(self, *, seed="1", tenants=("acme", "clinic"), **bounds):
        surveyed = self.survey(tenants)
        selection = SampleSelection(
            surveyed.candidates, SelectionLimits(**{"samples": 1000, **bounds}), seed=seed
        )
        return harvest(surveyed, selection, PURPOSE, self.parts())

    @property
    def manifests(self):
        return list((self.site.directory / "drafts" / DATASETS).glob("*"))


@pytest.fixture
def run(site):
    site.tenants(allowing("acme"), allowing("clinic"))
    return Run(site)


def test_requests_and_answers_become_readable_samples(run):
    requests = [run.site.talk(tenant, f"hello {tenant}", "good day") for tenant in ("acme", "clinic")]
    manifest, skipped = run()
    assert skipped == Counter()
    assert [entry.request_id for entry in manifest.samples] == requests
    assert [entry.held_out for entry in manifest.samples] == [is_held_out(each) for each in requests]
    dataset = open_dataset(run.site.settings, manifest.digest)
    samples = {each.request_id: each for held in (False, True) for each in dataset.read(held)}
    tokenizer = run.tokenizer.tokenizer
    for request, tenant in zip(requests, ("acme", "clinic"), strict=True):
        sample = samples[request]
        answer = sample.token_ids[len(sample.prompt) :]
        assert sample.loss_mask == (False,) * len(sample.prompt) + (True,) * len(answer)
        said = [
            tokenizer.decode(list(each), skip_special_tokens=False, clean_up_tokenization_spaces=False)
            for each in (sample.prompt, answer)
        ]
        assert said == [f"<|begin|><|user|>hello {tenant}<|end|><|assistant|>", "good day<|end|>"]
        assert (sample.tenant, sample.tokenizer) == (tenant, TOKENIZER)


def test_harvest_is_logged_before_reading_and_after(run):
    """With actor, purpose, policy, and the resulting data set."""
    for tenant in ("acme", "clinic"):
        run.site.talk(tenant, f"hello {tenant}", "good day")
    manifest, _ = run()
    begun, done = run.site.entries(EntryType.DRAFT_HARVESTED)
    assert run.recorded[0][1] == 0
    common = {"tenants": ["acme", "clinic"], "policy": POLICY, "purpose": "spring refresh"}
    assert begun.items() >= {**common, "stage": "begun"}.items()
    assert not {"samples", "tokens", "dataset"} & begun.keys()
    tokens = sum(entry.tokens for entry in manifest.samples)
    counts = {"samples": 2, "tokens": tokens, "dataset": manifest.digest}
    assert done.items() >= {**common, **counts, "stage": "done"}.items()


def test_nothing_is_read_if_it_cannot_be_recorded(run):
    request = run.site.talk("acme", "hello", "good day")
    run.refuse = 1
    with pytest.raises(AuditUnavailableError):
        run()
    assert (run.opened, run.tokenizer.asked, run.manifests) == ([], 0, [])
    assert len(run.site.parts(request)) == 2


def test_unrecorded_data_set_is_removed_and_its_samples_reused(run):
    request = run.site.talk("acme", "hello", "good day")
    run.refuse = 2
    with pytest.raises(AuditUnavailableError):
        run()
    assert run.manifests == []
    first = run.site.vault.read(request)
    run.refuse = 0
    manifest, _ = run()
    assert [entry.digest for entry in manifest.samples] == [first.digest]


def test_same_harvest_again_takes_the_same_samples(run):
    for number in range(20):
        run.site.talk("acme", f"question {number}", "answer", template=f"chat-{number % 3}")
    first, second = (run(samples=7)[0] for _ in range(2))
    assert first.samples == second.samples
    assert len(first.samples) == 7


def test_same_prompt_is_taken_once(run):
    for tenant, answer in (("acme", "one"), ("acme", "two"), ("clinic", "one"), ("clinic", "three")):
        run.site.talk(tenant, "the same", answer)
    run.site.talk("clinic", "another", "one")
    manifest, skipped = run()
    assert len(manifest.samples) == 2
    assert skipped == {Skipped.DUPLICATE: 3}


def test_limits_count_taken_samples_only(run):
    for number in range(10):
        run.site.talk("acme", f"good {number}", "yes")
        run.site.talk("acme", f"bad {number}", "no", completion_tokens=77)
    manifest, skipped = run(samples=6)
    assert len(manifest.samples) == 6
    assert skipped[Skipped.NO_ROOM] + skipped[Skipped.ANSWER_DIFFERS] == 14
    tokens = sum(entry.tokens for entry in manifest.samples)
    smaller, _ = run(tokens=tokens - 1)
    assert sum(entry.tokens for entry in smaller.samples) <= tokens - 1


def test_every_reason_is_counted(run):
    run.site.talk("acme", "hello", "good day")
    run.site.talk("acme", "failed", "x", outcome="worker_failed")
    run.site.talk("acme", "foreign", "x", weights=f"sha256:{'8' * 64}")
    run.site.talk("acme", "counted otherwise", "x", prompt_tokens=5)
    run.site.keep("acme", b"no json", b"{}")
    gone = run.site.talk("acme", "erased while it ran", "x")
    surveyed = run.survey()
    run.site.erase("acme", gone)
    selection = SampleSelection(surveyed.candidates, SelectionLimits(samples=10), seed="1")
    manifest, skipped = harvest(surveyed, selection, PURPOSE, run.parts())
    assert len(manifest.samples) == 1
    assert skipped == {
        Skipped.NOT_COMPLETED: 1,
        Skipped.OTHER_WEIGHTS: 1,
        Skipped.PROMPT_DIFFERS: 1,
        Skipped.UNREADABLE: 1,
        Skipped.ERASED: 1,
    }


def test_tenant_that_withdraws_during_the_harvest_is_excluded(run, monkeypatch):
    monkeypatch.setattr("appliance.drafts.harvest.harvest.RECHECK_AFTER", 10)
    for number in range(20):
        for tenant in ("acme", "clinic"):
            run.site.talk(tenant, f"question {number} of {tenant}", "answer")
    ask = run.tokenizer.tokenize

    def change_mind(*arguments, **more):
        if run.tokenizer.asked == 12:
            run.allowed = {"acme"}
        return ask(*arguments, **more)

    run.tokenizer.tokenize = change_mind
    manifest, skipped = run()
    assert {entry.tenant for entry in manifest.samples} == {"acme"}
    assert skipped == {Skipped.WITHDRAWN: 20}
    # It was noticed on the way: the rest of it was not even read.
    assert len(run.opened) < 40


def test_harvest_without_candidates_is_refused_and_not_logged(run):
    run.site.talk("acme", "failed", "x", outcome="worker_failed")
    with pytest.raises(DraftRefusedError, match="1 not_completed"):
        run()
    assert run.recorded == []


def test_harvest_without_a_result_is_logged(run):
    run.site.talk("acme", "counted otherwise", "x", prompt_tokens=5)
    with pytest.raises(DraftRefusedError, match="1 prompt_differs"):
        run()
    begun, done = run.site.entries(EntryType.DRAFT_HARVESTED)
    assert (begun["stage"], done["stage"], done["samples"]) == ("begun", "done", 0)
    assert "dataset" not in done
    assert run.manifests == []


def test_tenants_that_do_not_fit_into_one_entry_are_named_in_several(run):
    """With the longest names; only the first entry has the counts."""
    names = sorted(f"{number:02d}" + "t" * 61 for number in range(TENANTS_PER_ENTRY + 1))
    run.allowed = set(names)
    for name in names:
        run.site.talk(name, f"hello {name}", "x")
    surveyed = survey(run.site.store.answered(names), WANTED)
    selection = SampleSelection(surveyed.candidates, SelectionLimits(samples=100), seed="1")
    wordy = HarvestPurpose(target=WEIGHTS, tokenizer=TOKENIZER, text="\U0001f600" * 200)
    manifest, _ = harvest(surveyed, selection, wordy, run.parts())
    entries = run.site.entries(EntryType.DRAFT_HARVESTED)
    assert [entry["stage"] for entry in entries] == ["begun", "begun", "done", "done"]
    assert sorted(name for entry in entries[2:] for name in entry["tenants"]) == names
    assert [entry.get("samples") for entry in entries[2:]] == [len(names), None]
    assert {entry["dataset"] for entry in entries[2:]} == {manifest.digest}


def test_only_named_tenants_are_surveyed(run):
    for tenant in ("acme", "clinic", "court"):
        run.site.talk(tenant, f"hello {tenant}", "good day")
    assert {each.tenant for each in run.survey(("acme", "court")).candidates} == {"acme", "court"}
    surveyed = run.survey()
    chosen = preview(SampleSelection(surveyed.candidates, SelectionLimits(samples=1), seed="1"))
    assert len(chosen) == 1
    assert (run.opened, run.recorded) == ([], [])


def test_tenant_under_a_legal_hold_can_be_harvested(run):
    """A hold forbids erasure, not reading."""
    run.site.talk("acme", "hello", "good day")
    run.site.record(EntryType.HOLD_PLACED, tenant="acme", reason="case 7", actor="admin")
    manifest, _ = run()
    assert len(manifest.samples) == 1


def test_survey_is_newest_first_and_starts_at_the_given_time(run):
    requests = [run.site.talk("acme", f"question {number}", "x") for number in range(5)]
    seen = [each.request_id for each in run.site.store.answered(("acme",))]
    assert seen == requests[::-1]
    since = requests[3]
    assert [each.request_id for each in run.site.store.answered(("acme",), since=since)] == requests[:2:-1]


def test_policy_is_what_the_permission_says(run):
    assert allows(allowing("acme"))
    assert POLICY == "may train_drafts, content encrypted"

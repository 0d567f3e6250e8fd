"""
Commands of harvest and provenance: arguments, output, refusals.
"""

import hashlib
import json
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml
from click.testing import Result
from typer.testing import CliRunner

from appliance.audit.entry_types import EntryType
from appliance.cli.draft import harvest as command
from appliance.cli.draft.harvest import COMMANDS as HARVEST
from appliance.cli.draft.provenance import COMMANDS as PROVENANCE
from appliance.cli.erase import COMMANDS as CONTENT
from appliance.drafts.harvest.dataset import find_manifest, open_dataset
from appliance.drafts.harvest.dataset_manifest import DatasetManifest
from appliance.drafts.harvest.tokenizer import digest_tokenizer
from appliance.drafts.registry.draft_source import read_source
from appliance.drafts.registry.revision import Revision
from appliance.drafts.registry.site_registry import open_registry, site_signer
from appliance.errors import ConfigurationError, DraftNotFoundError, DraftRefusedError
from appliance.infra.settings import Settings, load_settings
from appliance.serving.weights import digest_weights
from appliance.tenancy import Tenant
from tests.unit.drafts.harvest.harvest_site import MODEL, ORIGIN, HarvestSite, LetterChild, allowing
from tests.unit.drafts.lint.builder import RECORD, eagle31, write

app = typer.Typer()
for _name, _command in {**HARVEST, **PROVENANCE, "open": CONTENT["open"]}.items():
    app.command(name=_name)(_command)


class Office:
    """A site with settings, a target, and the commands on it."""

    def __init__(self, site: HarvestSite) -> None:
        self.site = site
        draft = eagle31()
        draft.training = {**RECORD, "recipe": {"name": "parent"}}
        target, parent = write(draft, site.directory.parent / "made")
        self.target, self.parent = target.path, parent.path
        self.config = site.directory.parent / "appliance.yaml"
        sections = {
            "data": {"directory": str(site.directory)},
            "audit": {"origin": ORIGIN},
            "worker": {"model": str(self.target), "served_name": MODEL},
        }
        self.config.write_text(yaml.safe_dump(sections))
        site.tenants(allowing("acme"), allowing("clinic"), Tenant(name="silent"))

    @property
    def settings(self) -> Settings:
        return load_settings(self.config, environment={})

    def run(self, *words: object) -> Result:
        return CliRunner().invoke(app, [*map(str, words), "--config", str(self.config)])

    def done(self, *words: object) -> str:
        result = self.run(*words)
        assert result.exit_code == 0, result.exception or result.output
        return result.output

    def refused(self, *words: object, kind: type[Exception]) -> str:
        result = self.run(*words)
        assert isinstance(result.exception, kind), result.exception or result.output
        assert "\n" not in str(result.exception)
        return str(result.exception)

    def talk(self, tenant: str, number: int, **outcome: Any) -> str:
        outcome = {"weights": digest_weights(self.target), **outcome}
        return self.site.talk(tenant, f"question {number} of {tenant}", "an answer", **outcome)

    def harvest(self, *words: object) -> DatasetManifest:
        self.done("harvest", *words)
        entries = self.site.entries(EntryType.DRAFT_HARVESTED)
        return find_manifest(self.site.directory / "drafts", entries[-1]["dataset"])

    def train(
        self, manifest: DatasetManifest, *, used: dict[str, str] | None = None, **record: Any
    ) -> Revision:
        """Register a draft as if it had been trained here on all that is still there."""
        if used is None:
            dataset = open_dataset(self.settings, manifest.digest)
            used = {each.request_id: each.digest for each in dataset.read(False)}
        listed = "".join(f"{request} {digest}\n" for request, digest in sorted(used.items()))
        place = self.site.directory.parent / f"trained-{len(self.site.entries())}"
        draft = eagle31()
        draft.training = {
            **RECORD,
            "dataset": manifest.digest,
            "used": hashlib.sha256(listed.encode()).hexdigest(),
            "samples": len(used),
            "recipe": {"tool": "test 1"},
            **record,
        }
        _, weights = write(draft, place)
        (weights.path / "used.txt").write_text(listed)
        source = read_source(weights.path)
        self.site.record(
            EntryType.DRAFT_TRAINED,
            draft=source.digest,
            target=digest_weights(self.target),
            record=source.record_hash,
            recipe="test 1",
            dataset=manifest.digest,
            actor="cli:test",
        )
        return open_registry(self.settings, self.site.clock).register(
            source,
            target=digest_weights(self.target),
            how="trained",
            signer=site_signer(self.settings),
        )


@pytest.fixture
def office(site, monkeypatch):
    @contextmanager
    def open_tokenizer(target: Path, _environment: Any):
        assert target == office.target
        yield LetterChild()

    monkeypatch.setattr(command, "open_tokenizer", open_tokenizer)
    office = Office(site)
    return office


# harvest


def test_harvest_reports_samples_per_tenant_and_skip_reasons(office):
    for number in range(6):
        office.talk("acme", number, template=f"chat-{number % 2}")
    office.talk("clinic", 1)
    office.talk("clinic", 2, outcome="worker_failed")
    said = office.done("harvest", "--purpose", "spring refresh")
    manifest = office.harvest()
    assert manifest.target == digest_weights(office.target)
    assert manifest.tokenizer == digest_tokenizer(office.target)
    begun, done, *_ = office.site.entries(EntryType.DRAFT_HARVESTED)
    assert (begun["purpose"], done["samples"]) == ("spring refresh", 7)
    assert begun["actor"].startswith("cli:")
    lines = [line.split() for line in said.splitlines()]
    assert ["tenant", "6", "acme"] in lines
    assert ["tenant", "1", "clinic"] in lines
    assert ["like", "3", "chat-0", "0-1k"] in lines
    assert ["skipped", "1", "not_completed"] in lines
    assert done["dataset"] in said


def test_dry_run_reads_nothing_and_records_nothing(office):
    requests = [office.talk(tenant, number) for tenant in ("acme", "clinic") for number in range(3)]
    before = len(office.site.entries())
    said = office.done("harvest", "--dry-run", "--max-samples", 4)
    assert "4 of 6 requests" in said
    assert [line.split() for line in said.splitlines() if line.startswith("skipped")] == [
        ["skipped", "2", "no_room"]
    ]
    assert len(office.site.entries()) == before
    assert all(len(office.site.parts(request)) == 2 for request in requests)
    assert not (office.site.directory / "drafts").exists()


def test_limits_names_and_times_are_respected(office):
    for tenant in ("acme", "clinic"):
        for number in range(4):
            office.talk(tenant, number, template=f"chat-{number}")
    assert {entry.tenant for entry in office.harvest("--tenant", "clinic").samples} == {"clinic"}
    assert len(office.harvest("--max-samples", 3).samples) == 3
    assert len(office.harvest("--per-stratum", 1).samples) == 4
    tokens = office.harvest().samples[0].tokens
    assert len(office.harvest("--max-tokens", 2 * tokens + 1).samples) <= 2
    office.refused("harvest", "--longest", tokens - 5, kind=DraftRefusedError)
    office.refused("harvest", "--since", "2090-01-01", kind=DraftRefusedError)
    assert len(office.harvest("--since", "2020-01-01").samples) == 8
    assert office.harvest("--max-samples", 3, "--seed", 5) != office.harvest("--max-samples", 3, "--seed", 9)


def test_other_weights_or_names_are_harvested_only_on_request(office):
    office.talk("acme", 1, weights=f"sha256:{'8' * 64}")
    assert "other_weights" in office.refused("harvest", kind=DraftRefusedError)
    assert len(office.harvest("--other-weights").samples) == 1
    assert "other_model" in office.refused("harvest", "--model", "another", kind=DraftRefusedError)
    assert len(office.harvest("--other-weights", "--model", "another", "--model", MODEL).samples) == 1


def test_tenant_without_permission_is_not_harvested(office):
    """Neither by name, nor while it is disabled."""
    office.talk("silent", 1)
    assert "acme" not in office.refused("harvest", "--tenant", "silent", kind=DraftRefusedError)
    office.site.tenants(allowing("acme", disabled=True), Tenant(name="silent"))
    office.talk("acme", 1)
    assert "no tenant allows training" in office.refused("harvest", kind=DraftRefusedError)
    assert office.site.entries(EntryType.DRAFT_HARVESTED) == []


def test_purpose_is_one_line(office):
    office.talk("acme", 1)
    for purpose in ("two\nlines", "x" * 201):
        office.refused("harvest", "--purpose", purpose, kind=ConfigurationError)
    assert office.site.entries(EntryType.DRAFT_HARVESTED) == []


def test_opening_a_request_never_shows_its_sample(office):
    request = office.talk("acme", 1)
    office.harvest()
    assert len(office.site.parts(request)) == 3
    shown = office.run("open", request)
    assert shown.exit_code == 0, shown.exception
    assert "token_ids" not in shown.output
    assert "sample" not in shown.output
    assert office.run("open", request, "--part", "sample").exit_code == 2


# provenance


@pytest.fixture
def trained(office):
    """A draft that learnt from two tenants' requests."""
    for tenant in ("acme", "clinic"):
        for number in range(5):
            office.talk(tenant, number)
    manifest = office.harvest()
    return manifest, office.train(manifest)


def provenance(office, revision):
    result = office.run("provenance", revision.digest, "--json")
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, json.loads(result.stdout)


def test_provenance_counts_used_requests_per_tenant(office, trained):
    manifest, revision = trained
    code, found = provenance(office, revision)
    used = [entry for entry in manifest.samples if not entry.held_out]
    assert (code, found["sound"], found["used"]) == (0, True, len(used))
    assert sum(found["tenants"].values()) == len(used)
    assert found["dataset"] == manifest.digest
    assert office.site.entries()[found["trained"]]["type"] == "draft.trained"
    said = office.done("provenance", revision.hex[:12])
    assert "sound: no request it was trained on was erased" in said
    assert manifest.digest in said


def test_later_erasure_is_reported_with_advice(office, trained):
    manifest, revision = trained
    office.site.erase("clinic")
    code, found = provenance(office, revision)
    gone = [each.request_id for each in manifest.samples if each.tenant == "clinic" and not each.held_out]
    assert (code, found["sound"]) == (0, True)
    assert [each["request_id"] for each in found["erased_since"]] == gone
    said = office.done("provenance", revision.digest)
    assert f"{len(gone)} of clinic" in said
    assert "appliance draft rollback" in said


def test_draft_trained_on_erased_requests_is_not_sound(office):
    for number in range(10):
        office.talk("acme", number)
    manifest = office.harvest()
    used = {entry.request_id: entry.digest for entry in manifest.samples}
    office.site.erase("acme", next(iter(used)))
    revision = office.train(manifest, used=used)
    code, found = provenance(office, revision)
    assert (code, found["sound"]) == (1, False)
    assert [each["request_id"] for each in found["erased_before"]] == [next(iter(used))]
    result = office.run("provenance", revision.digest)
    assert result.exit_code == 1
    assert "take it out of service" in result.output


def test_used_request_outside_the_data_set_is_not_sound(office):
    office.talk("acme", 1)
    manifest = office.harvest()
    code, found = provenance(office, office.train(manifest, used={"0" * 26: "f" * 64}))
    assert (code, found["unknown"]) == (1, ["0" * 26])


def test_training_record_must_match_the_log(office, trained):
    _, revision = trained
    real = office.site.record
    office.site.record = lambda kind, **fields: real(kind, **{**fields, "record": "0" * 64})
    other = office.train(trained[0], recipe={"tool": "test 2"})
    assert other.digest != revision.digest
    assert "altered" in office.refused("provenance", other.digest, kind=DraftRefusedError)


def test_imported_draft_has_no_provenance(office):
    registry = open_registry(office.settings, office.site.clock)
    revision = registry.register(
        read_source(office.parent),
        target=digest_weights(office.target),
        how="imported",
        signer=site_signer(office.settings),
    )
    assert "no training data" in office.refused("provenance", revision.digest, kind=DraftNotFoundError)
    assert "registered" in office.refused("provenance", "ffff", kind=DraftNotFoundError)

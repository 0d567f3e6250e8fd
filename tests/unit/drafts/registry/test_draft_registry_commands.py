"""
The commands list, show, import and key.
"""

import hashlib
import json
import os
import pwd
import shutil
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml
from click.testing import Result
from typer.testing import CliRunner

from appliance.audit.entry import decode
from appliance.audit.store import SqlAuditStore
from appliance.cli.draft.registry import COMMANDS
from appliance.drafts.evaluation.evaluation_results import Evaluation, EvaluationVerdict
from appliance.drafts.evaluation.store import save_evaluation
from appliance.drafts.registry.active_draft import ActiveDraft, write_active_draft
from appliance.drafts.registry.registry import DraftRegistry
from appliance.drafts.registry.revision import SIGNED, Revision
from appliance.drafts.registry.site_registry import open_registry, site_signer
from appliance.errors import (
    AuditKeyError,
    AuditUnavailableError,
    ConfigurationError,
    DraftNotFoundError,
    DraftRefusedError,
)
from appliance.infra.settings import Settings, load_settings
from appliance.speculation.values import Expectation
from tests.unit.drafts.evaluation.bare_report import bare_report
from tests.unit.drafts.lint.builder import eagle31
from tests.unit.drafts.registry.site import MAKER_KEY, NOW, Site, digest, new_key, rewrite, sign, snapshot

ME = f"cli:{pwd.getpwuid(os.getuid()).pw_name}"
EXPECTED = {"all": {"acceptance_length": 2.5, "draft_tokens": 3}}

app = typer.Typer()
for _name, _command in COMMANDS.items():
    app.command(name=_name)(_command)


class Office:
    """Where an operator works: a site with settings, and a maker of drafts whose key it trusts."""

    def __init__(self, place: Path) -> None:
        self.maker = Site(place=place / "maker", signer=new_key(place / "maker" / "maker.key", MAKER_KEY))
        self.place = place
        self.maker.draft("unused")
        self.keys = place / "keys.txt"
        self.keys.write_text(self.maker.signer.verifier_key.encode() + "\n")
        self.config = place / "appliance.yaml"
        self.configure()

    def configure(self, **worker: Any) -> None:
        worker = {"model": str(self.model), **worker}
        sections = {
            "data": {"directory": str(self.place / "data")},
            "worker": worker,
            "drafts": {"trusted_keys_file": str(self.keys)},
        }
        self.config.write_text(yaml.safe_dump(sections))

    @property
    def model(self) -> Path:
        return self.maker.made["unused"]

    @property
    def settings(self) -> Settings:
        return load_settings(self.config, environment={})

    @property
    def registry(self) -> DraftRegistry:
        return open_registry(self.settings, lambda: NOW)

    def run(self, *words: object) -> Result:
        return CliRunner().invoke(app, [*map(str, words), "--config", str(self.config)])

    def said(self, *words: object) -> str:
        result = self.run(*words)
        assert result.exception is None, result.exception
        return result.stdout

    def refused(self, kind: type[Exception], *words: object) -> str:
        """The one line with which a command is refused; nothing is registered and nothing recorded."""
        before = snapshot(self.place / "data" / "drafts")
        entries = len(self.entries)
        result = self.run(*words)
        assert type(result.exception) is kind, result.exception
        assert snapshot(self.place / "data" / "drafts") == before
        assert len(self.entries) == entries
        (line,) = str(result.exception).splitlines()
        return line

    @property
    def entries(self) -> list[dict[str, Any]]:
        """What the audit log says was imported."""
        if not (self.place / "data" / "audit.db").exists():
            return []
        with closing(SqlAuditStore(f"sqlite:///{self.place / 'data' / 'audit.db'}")) as store:
            leaves = store.leaves(0, 1000)
            return [dict(decode(leaf.leaf).fields) for leaf in leaves if leaf.type == "draft.imported"]

    def signed(self, name: str = "first", **record: Any) -> Path:
        """A draft as its maker hands it over."""
        source = self.maker.draft(name, **record)
        sign(source, self.maker.signer, self.maker.target)
        return source


@pytest.fixture
def office(tmp_path: Path) -> Office:
    return Office(tmp_path)


class TestImport:
    """Every draft is signed or vouched for, and the audit log says by whom."""

    def test_signed_draft_is_registered_and_recorded(self, office: Office):
        source = office.signed(parent=digest(8), dataset=digest(9))
        page, note = (source / "revision.json").read_bytes(), (source / "revision.sig").read_bytes()
        assert f"signed by {MAKER_KEY}" in office.said("import", source)
        (revision,) = office.registry.revisions()
        assert (revision.source, revision.origin) == ("imported", MAKER_KEY)
        assert (revision.target, revision.parent, revision.dataset) == (
            office.maker.target,
            digest(8),
            digest(9),
        )
        home = office.place / "data" / "drafts" / "revisions" / revision.hex
        assert (home / "origin.json").read_bytes() == page
        assert (home / "origin.sig").read_bytes() == note
        assert office.entries == [
            {
                "draft": revision.digest,
                "target": revision.target,
                "signer": MAKER_KEY,
                "actor": ME,
                "parent": digest(8),
                "dataset": digest(9),
                "record": _sha256(source / "training.json"),
            }
        ]
        assert "revision.json" not in {path.name for path in office.registry.weights(revision).iterdir()}

    def test_unsigned_draft_needs_vouch(self, office: Office):
        source = office.maker.draft("first")
        line = office.refused(DraftRefusedError, "import", source)
        assert line.endswith("or --vouch")
        assert "vouched for by you" in office.said("import", source, "--vouch")
        (revision,) = office.registry.revisions()
        assert revision.origin is None
        own = site_signer(office.settings).verifier_key.name
        assert [entry["signer"] for entry in office.entries] == [own]

    def test_signature_may_be_a_separate_file(self, office: Office):
        source = office.signed()
        note = (source / "revision.sig").rename(office.place / "by-courier.sig")
        office.refused(DraftRefusedError, "import", source)
        assert MAKER_KEY in office.said("import", source, "--signature", note)
        assert len(office.entries) == 1

    def test_registered_directory_can_be_imported(self, office: Office):
        revision = office.maker.add(office.maker.draft("first"))
        home = office.maker.home(revision)
        assert MAKER_KEY in office.said("import", home)
        assert office.registry.find(revision.digest).source == "imported"

    def test_importing_again_changes_and_records_nothing(self, office: Office):
        source = office.signed()
        office.said("import", source)
        before = snapshot(office.place / "data" / "drafts")
        assert "is already registered" in office.said("import", source)
        (source / "revision.sig").unlink()
        assert "is already registered" in office.said("import", source, "--vouch")
        assert snapshot(office.place / "data" / "drafts") == before
        assert len(office.entries) == 1

    def test_repair_of_a_damaged_draft_is_recorded(self, office: Office):
        source = office.signed()
        office.said("import", source)
        (revision,) = office.registry.revisions()
        rewrite(office.registry.weights(revision) / "config.json", b"{}")
        office.said("import", source)
        assert office.registry.weights(revision)
        assert len(office.entries) == 2

    def test_vouch_does_not_bypass_a_signature(self, office: Office):
        source = office.signed()
        rewrite(source / "revision.sig", (source / "revision.sig").read_bytes()[:-9] + b"AAAAAAAA\n")
        assert "is signed" in office.refused(DraftRefusedError, "import", source, "--vouch")
        note = (source / "revision.sig").rename(office.place / "apart.sig")
        line = office.refused(DraftRefusedError, "import", source, "--vouch", "--signature", note)
        assert "is signed" in line

    def test_no_byte_of_what_was_signed_can_be_changed(self, office: Office):
        source = office.signed()
        for name in ("revision.json", "revision.sig", "config.json", "model.safetensors", "training.json"):
            content = (source / name).read_bytes()
            for at in {len(content) // 7, len(content) // 2, len(content) - 2}:
                changed = bytearray(content)
                changed[at] ^= 1
                (source / name).write_bytes(bytes(changed))
                office.refused(DraftRefusedError, "import", source)
            (source / name).write_bytes(content)
        office.said("import", source)

    def test_signature_of_an_unknown_key_is_refused(self, office: Office):
        source = office.maker.draft("first")
        sign(source, new_key(office.place / "other.key", MAKER_KEY), office.maker.target)
        assert "no trusted key signed the draft" in office.refused(DraftRefusedError, "import", source)

    def test_draft_that_was_signed_for_another_target_is_refused(self, office: Office):
        source = office.maker.draft("first")
        sign(source, office.maker.signer, digest(5))
        assert digest(5) in office.refused(DraftRefusedError, "import", source)

    def test_signature_of_another_draft_is_refused(self, office: Office):
        source, other = office.signed("first"), office.signed("second")
        for name in ("revision.json", "revision.sig"):
            shutil.copy(other / name, source / name)
        assert "is not the one that" in office.refused(DraftRefusedError, "import", source)

    def test_signed_malformed_revision_is_refused(self, office: Office):
        source = office.maker.draft("first")
        (source / "revision.json").write_bytes(b"{}")
        (source / "revision.sig").write_bytes(SIGNED.sign(b"{}", office.maker.signer))
        assert "another format" in office.refused(DraftRefusedError, "import", source)

    def test_signed_draft_with_lint_errors_is_refused(self, office: Office):
        draft = eagle31()
        draft.drop("fc.weight")
        source = office.maker.draft("broken", draft)
        sign(source, office.maker.signer, office.maker.target)
        assert "does not fit the target" in office.refused(DraftRefusedError, "import", source)
        assert "error: fc-missing: " in office.run("import", source).stderr

    def test_warning_is_shown_and_does_not_stop_it(self, office: Office):
        office.configure(max_model_len=4096)
        result = office.run("import", office.signed())
        assert result.exception is None
        assert "warning: max-position-embeddings: " in result.stderr

    def test_target_may_be_named_by_directory_or_digest(self, office: Office):
        office.said("import", office.signed("first"), "--target", office.maker.made["unused"])
        office.said("import", office.signed("second"), "--target", office.maker.target)
        third = office.signed("third")
        line = office.refused(ConfigurationError, "import", third, "--target", digest(5))
        assert "give its directory with --target" in line
        office.refused(ConfigurationError, "import", third, "--target", "nowhere")
        assert len(office.registry.revisions()) == 2

    def test_what_cannot_be_recorded_is_not_registered(self, office: Office, monkeypatch):
        def unavailable(*_: object, **__: object) -> int:
            raise AuditUnavailableError("the database is away")

        source = office.signed()
        with monkeypatch.context() as patch:
            patch.setattr("appliance.cli.draft.audit_steps.append_entry", unavailable)
            office.refused(AuditUnavailableError, "import", source)
        assert office.registry.revisions() == ()

    def test_draft_without_disk_space_is_not_recorded(self, office: Office, monkeypatch):
        source = office.signed()
        with monkeypatch.context() as patch:
            patch.setattr("appliance.sovereignty.bundle.placing.room", lambda _: [(office.place, 2, 1)])
            result = office.run("import", source)
        assert "free 1 more" in str(result.exception)
        assert office.entries == []


class TestList:
    """Which drafts there are, and which of them serve."""

    def test_empty_registry_says_so(self, office: Office):
        assert office.said("list") == "no draft is registered\n"
        assert json.loads(office.said("list", "--json")) == {"drafts": [], "warnings": []}
        assert not (office.place / "data").exists()

    def test_list_prints_a_line_per_draft_with_its_status(self, office: Office):
        for name in ("one", "two", "three"):
            office.said("import", office.signed(name, parent=digest(8), expected=EXPECTED))
        office.said("import", office.maker.draft("four"), "--vouch")
        revisions = {each.record.recipe["name"]: each for each in office.registry.revisions()}
        directory = office.registry.directory
        write_active_draft(
            directory,
            ActiveDraft(
                target=office.maker.target,
                draft=revisions["one"].digest,
                previous=(None, revisions["two"].digest),
                promotion="p",
                candidate=revisions["three"].digest,
            ),
        )
        save_evaluation(directory, measured_report(revisions["two"]), "<html></html>")
        heading, *lines = office.said("list").splitlines()
        assert heading.split() == [
            *("draft", "target", "source", "made", "parent", "status", "expected", "measured")
        ]
        by_draft = {line.split()[0]: line.split()[1:] for line in lines}
        marks = {"one": "serving", "two": "previous", "three": "candidate", "four": "-"}
        for name, mark in marks.items():
            revision = revisions[name]
            target, source, made, parent, status, *accepts = by_draft[revision.hex[:12]]
            assert (target, source) == (revision.target[7:19], "imported")
            assert made == revision.made[:10]
            assert status == mark
            assert parent == ("-" if name == "four" else "0" * 12)
            expected = ["-"] if name == "four" else ["2.50", "at", "K=3"]
            measured = ["2.25", "at", "K=2"] if name == "two" else ["-"]
            assert accepts == [*expected, *measured]
        told = json.loads(office.said("list", "--json"))
        assert {each["digest"]: each["status"] for each in told["drafts"]} == {
            revisions[name].digest: [] if mark == "-" else [mark] for name, mark in marks.items()
        }
        assert {each["digest"]: each["expected"] for each in told["drafts"]}[revisions["one"].digest] == (
            EXPECTED["all"]
        )
        assert {each["digest"]: each["measured"] for each in told["drafts"]} == {
            revision.digest: {"acceptance_length": 2.25, "draft_tokens": 2} if name == "two" else None
            for name, revision in revisions.items()
        }

    def test_incomplete_or_foreign_measurements_are_not_shown(self, office: Office):
        office.said("import", office.signed())
        (revision,) = office.registry.revisions()
        directory = office.registry.directory
        for more in ({"complete": False}, {"target": digest(7)}):
            report = save_evaluation(directory, measured_report(revision, **more), "<html></html>")
            (told,) = json.loads(office.said("list", "--json"))["drafts"]
            assert told["measured"] is None
        rewrite(report, b"{")
        told = json.loads(office.said("list", "--json"))
        assert [each["measured"] for each in told["drafts"]] == [None]
        assert len(told["warnings"]) == 1
        assert str(report) in told["warnings"][0]

    def test_draft_that_cannot_be_used_is_a_warning(self, office: Office):
        office.said("import", office.signed("one"))
        office.said("import", office.signed("two"))
        one, two = office.registry.revisions()
        home = office.registry.directory / "revisions"
        rewrite(home / one.hex / "revision.sig", b"x")
        result = office.run("list")
        assert [line.split()[0] for line in result.stdout.splitlines()] == ["draft", two.hex[:12]]
        assert result.stderr.startswith(f"warning: the draft {one.hex[:12]} cannot be used: ")
        assert len(json.loads(office.said("list", "--json"))["warnings"]) == 1

    def test_damaged_active_draft_file_is_a_warning(self, office: Office):
        office.said("import", office.signed())
        (office.registry.directory / "standing").mkdir()
        (office.registry.directory / "standing" / f"{office.maker.target[7:]}.json").write_text("{")
        assert "is damaged" in office.run("list").stderr
        (warning,) = json.loads(office.said("list", "--json"))["warnings"]
        assert "is damaged" in warning


class TestShow:
    """All that is known of one draft."""

    def test_show_prints_one_json_object(self, office: Office):
        office.said("import", office.signed(expected=EXPECTED, dataset=digest(9)))
        (revision,) = office.registry.revisions()
        told = json.loads(office.said("show", revision.hex[:9], "--json"))
        assert list(told) == [
            *("digest", "target", "source", "origin", "made", "parent", "status", "expected"),
            *("measured", "dataset", "record", "weights", "lint", "evaluation"),
        ]
        assert (told["digest"], told["origin"], told["dataset"]) == (revision.digest, MAKER_KEY, digest(9))
        assert told["record"]["recipe"] == {"name": "first"}
        assert told["lint"] == {"target": str(office.model), "findings": []}
        assert told["evaluation"] is None

    def test_show_prints_lines(self, office: Office):
        office.configure(max_model_len=4096)
        office.said("import", office.signed())
        (revision,) = office.registry.revisions()
        lines = office.said("show", revision.digest).splitlines()
        assert f"digest     {revision.digest}" in lines
        assert "parent     -" in lines
        assert "           aux_layers: 1, 4, 7" in lines
        assert "evaluation -" in lines
        assert any("warning: max-position-embeddings" in line for line in lines)

    def test_verdict_of_its_evaluation_is_shown(self, office: Office):
        office.said("import", office.signed())
        (revision,) = office.registry.revisions()
        save_evaluation(office.registry.directory, refused_report(revision), "<html></html>")
        told = json.loads(office.said("show", revision.hex, "--json"))
        assert told["evaluation"] == {"verdict": "refused", "reasons": ["it accepts less"]}
        assert "it accepts less" in office.said("show", revision.hex)

    def test_altered_report_is_reported(self, office: Office):
        office.said("import", office.signed())
        (revision,) = office.registry.revisions()
        report = save_evaluation(office.registry.directory, refused_report(revision), "<html></html>")
        rewrite(report, report.read_bytes()[:-1])
        told = json.loads(office.said("show", revision.hex, "--json"))
        assert told["evaluation"]["verdict"] == "unreadable"

    def test_draft_of_another_target_is_not_linted(self, office: Office):
        office.said("import", office.signed())
        (revision,) = office.registry.revisions()
        other = office.place / "other"
        shutil.copytree(office.model, other)
        (other / "config.json").write_text((other / "config.json").read_text() + " ")
        for model in (other, office.place / "nowhere"):
            office.configure(model=str(model))
            assert json.loads(office.said("show", revision.hex, "--json"))["lint"] is None

    def test_missing_or_altered_draft_is_refused(self, office: Office):
        office.said("import", office.signed())
        (revision,) = office.registry.revisions()
        assert "draft list" in office.refused(DraftNotFoundError, "show", "ff" * 32)
        rewrite(office.registry.weights(revision) / "config.json", b"{}")
        assert "import it again" in office.refused(DraftRefusedError, "show", revision.hex)


def refused_report(revision: Revision) -> Evaluation:
    reasons = ("it accepts less",)
    return bare_report(revision.digest, revision.target, verdict=EvaluationVerdict.REFUSED, reasons=reasons)


def measured_report(revision: Revision, **more: Any) -> Evaluation:
    expected = {"all": Expectation(acceptance_length=2.25, draft_tokens=2)}
    return bare_report(revision.digest, more.pop("target", revision.target), expected=expected, **more)


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


class TestKey:
    """The line that other sites trust."""

    def test_printed_key_is_accepted_by_another_site(self, office: Office, tmp_path: Path):
        line = office.said("key")
        assert line == office.said("key")
        office.said("import", office.maker.draft("first"), "--vouch")
        keys = tmp_path / "drafts.pub"
        keys.write_text(line)
        worker = {"directory": str(office.place / "data" / "drafts"), "trusted_keys_file": str(keys)}
        settings = load_settings(
            overrides={"data": {"directory": str(tmp_path / "worker")}, "drafts": worker}, environment={}
        )
        (revision,) = open_registry(settings, lambda: NOW).revisions()
        assert revision == office.registry.revisions()[0]

    def test_key_that_the_settings_place_elsewhere_is_not_made(self, office: Office, tmp_path: Path):
        """A forgotten mount must not create a second key."""
        office.config.write_text(yaml.safe_dump({"drafts": {"signing_key_file": str(tmp_path / "none.key")}}))
        result = office.run("key", "--data", tmp_path / "data")
        assert type(result.exception) is AuditKeyError
        assert not (tmp_path / "none.key").exists()

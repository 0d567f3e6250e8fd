"""A draft is found as it was registered, or refused."""

import os
from datetime import date
from pathlib import Path

import pytest

from appliance.drafts.registry.draft_source import read_source
from appliance.drafts.registry.registry import DraftRegistry
from appliance.errors import DraftNotFoundError, DraftRefusedError, DraftStorageError
from appliance.serving.weights import digest_weights
from appliance.sovereignty.bundle.signature import TrustedKey
from tests.unit.drafts.registry.site import Site, digest, new_key, rewrite, snapshot, trust

EXPECTED = {"all": {"acceptance_length": 2.5, "draft_tokens": 3}}


def test_registered_draft_is_found_with_its_revision(site: Site):
    source = site.draft(parent=digest(8), dataset=digest(9), expected=EXPECTED)
    added = site.add(source)
    found = site.registry.find(added.digest)
    assert found == added
    assert (found.digest, found.target) == (digest_weights(source), site.target)
    assert (found.parent, found.dataset, found.source) == (digest(8), digest(9), "trained")
    assert (found.made, found.origin) == ("2026-11-18T11:06:40.000Z", None)
    assert found.record.recipe == {"name": "first"}
    assert found.record.expected["all"].acceptance_length == 2.5
    assert site.registry.revisions() == (added,)


def test_what_is_registered_is_a_copy_that_can_be_read_and_not_written(site: Site):
    source = site.draft()
    before = os.umask(0o077)
    try:
        revision = site.add(source)
    finally:
        os.umask(before)
    weights = site.registry.weights(revision)
    assert {path.name: path.read_bytes() for path in weights.iterdir()} == {
        path.name: path.read_bytes() for path in source.iterdir()
    }
    for path in (site.directory / "revisions").rglob("*"):
        assert path.stat().st_mode & 0o777 == (0o755 if path.is_dir() else 0o444), path


def test_only_digested_files_are_registered(site: Site):
    source = site.draft()
    for name in ("modeling.py", "pytorch_model.bin", "report.html"):
        (source / name).write_text("anything")
    (source / "more").mkdir()
    (source / "more" / "config.json").write_text("{}")
    weights = site.registry.weights(site.add(source))
    assert sorted(path.name for path in weights.iterdir()) == [
        "config.json",
        "model.safetensors",
        "training.json",
    ]


def test_links_are_followed_into_what_they_point_to(site: Site, tmp_path: Path):
    source = site.draft()
    kept = tmp_path / "blob"
    (source / "model.safetensors").rename(kept)
    (source / "model.safetensors").symlink_to(kept)
    revision = site.add(source)
    kept.unlink()
    weights = site.registry.weights(revision)
    assert not any(path.is_symlink() for path in weights.iterdir())


def test_adding_again_changes_nothing(site: Site):
    """Not even an inode, nor the registration time."""
    source = site.draft()
    first = site.add(source)
    before = snapshot(site.directory)
    site.now += 1000
    assert site.add(source, how="imported") == first
    assert snapshot(site.directory) == before


def test_lost_files_are_repaired_by_registering_again(site: Site):
    """File by file; the revision stays."""
    source = site.draft()
    revision = site.add(source)
    weights = site.registry.weights(revision)
    rewrite(weights / "config.json", b"{}")
    (weights / "training.json").unlink()
    (weights / "model.safetensors.partial").write_bytes(b"half")
    untouched = (weights / "model.safetensors").stat().st_ino
    with pytest.raises(DraftRefusedError, match="differs from what was registered"):
        site.registry.weights(revision)
    site.now += 1000
    assert site.add(source) == revision
    assert site.registry.weights(revision) == weights
    assert (weights / "model.safetensors").stat().st_ino == untouched
    assert sorted(path.name for path in weights.iterdir()) == sorted(path.name for path in source.iterdir())


def test_revision_without_a_trusted_signature_is_replaced(site: Site):
    source = site.draft()
    revision = site.add(source)
    (site.home(revision) / "revision.sig").unlink()
    assert site.registry.revisions() == ()
    site.now += 1000
    again = site.add(source)
    assert again.made > revision.made
    assert site.registry.revisions() == (again,)


def test_strange_file_among_the_weights_is_not_served(site: Site):
    source = site.draft()
    revision = site.add(source)
    stranger = site.registry.weights(revision) / "tokenizer.json"
    stranger.write_text("{}")
    with pytest.raises(DraftRefusedError, match="differs from what was registered"):
        site.registry.weights(revision)
    with pytest.raises(DraftStorageError, match="move it away"):
        site.add(source)
    assert stranger.read_text() == "{}"


def test_draft_has_one_target(site: Site):
    """The one it was registered for, and the one in its training record."""
    source = site.draft()
    site.add(source)
    before = snapshot(site.directory)
    with pytest.raises(DraftRefusedError, match="is registered for the target"):
        site.add(source, target=digest(5))
    elsewhere = site.draft("second", target=digest(6))
    with pytest.raises(DraftRefusedError, match="was trained for the target"):
        site.add(elsewhere)
    assert snapshot(site.directory) == before
    assert site.add(elsewhere, target=digest(6)).target == digest(6)


@pytest.mark.parametrize(
    ("member", "value"), [("target", "llama"), ("parent", "sha256:ab"), ("dataset", digest(1).upper())]
)
def test_training_record_with_an_invalid_digest_is_refused(site: Site, member: str, value: str):
    source = site.draft(**{member: value})
    with pytest.raises(DraftRefusedError, match=f"{member} is not a digest"):
        site.add(source)
    assert not site.directory.exists()


def test_draft_without_a_record_can_be_registered(site: Site):
    source = site.draft()
    (source / "training.json").unlink()
    revision = site.add(source)
    assert (revision.record.recipe, revision.record.expected, revision.parent) == ({}, {}, None)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("config.json", None),
        ("model.safetensors", None),
        ("config.json", b"[]"),
        ("config.json", b"[" * 100_000),
        ("model.safetensors", b"\x08\0\0\0\0\0\0\0{}"),
        ("model.safetensors.index.json", b'{"weight_map":{"a":"missing.safetensors"}}'),
        ("training.json", b"{"),
        ("training.json", b'{"recipe":{"rate":NaN}}'),
        ("odd\nname.json", b"{}"),
    ],
)
def test_incomplete_draft_is_refused_in_one_line(site: Site, name: str, content: bytes | None):
    source = site.draft()
    if content is None:
        (source / name).unlink()
    else:
        (source / name).write_bytes(content)
    with pytest.raises(DraftRefusedError) as caught:
        site.add(source)
    assert "\n" not in str(caught.value)
    assert not site.directory.exists()


def test_missing_directory_is_reported(site: Site):
    site.draft()
    with pytest.raises(DraftNotFoundError, match="is not a directory"):
        site.add(site.place / "nowhere")


def test_source_that_changes_while_it_is_copied_is_refused(site: Site, monkeypatch):
    source = site.draft()

    def change(_placements: object) -> None:
        (source / "config.json").write_bytes(b'{"other":1}')

    with monkeypatch.context() as patch:
        patch.setattr("appliance.drafts.registry.store.check_room", change)
        with pytest.raises(DraftRefusedError, match="changed during the copy"):
            site.add(source)
    assert site.registry.revisions() == ()


class TestFind:
    """By digest, or by as much of it as is needed."""

    def test_draft_is_found_by_digest_digits_or_unique_prefix(self, site: Site):
        first, second = site.add(site.draft("first")), site.add(site.draft("second"))
        names = (first.digest, first.hex, first.hex.upper(), first.hex[:20], first.digest[:30])
        for name in names:
            assert site.registry.find(name) == first
        assert site.registry.find(second.hex[:20]) == second

    @pytest.mark.parametrize("name", ["", " ", "sha256:", "x", "0" * 65, "../revisions"])
    def test_unknown_name_is_not_found(self, site: Site, name: str):
        site.add(site.draft())
        with pytest.raises(DraftNotFoundError, match="is registered"):
            site.registry.find(name)

    def test_ambiguous_prefix_is_refused(self, site: Site):
        for number in range(17):  # two of them begin with the same digit
            site.add(site.draft(f"draft-{number}"))
        firsts = [revision.hex[0] for revision in site.registry.revisions()]
        several = next(each for each in firsts if firsts.count(each) > 1)
        with pytest.raises(DraftNotFoundError, match=f"^{firsts.count(several)} drafts begin with"):
            site.registry.find(several)

    def test_empty_registry_has_nothing(self, site: Site):
        assert site.registry.revisions() == ()
        with pytest.raises(DraftNotFoundError):
            site.registry.find("ab")
        assert not site.directory.exists()


class TestTampering:
    """An altered draft is refused; the others stay usable."""

    def test_no_byte_of_the_revision_can_be_changed(self, site: Site):
        """Each byte of revision.json and of its signature in turn."""
        bystander, victim = site.add(site.draft("first")), site.add(site.draft("second"))
        registry = site.registry
        for name in ("revision.json", "revision.sig"):
            path = site.home(victim) / name
            content = path.read_bytes()
            for at in range(len(content)):
                changed = bytearray(content)
                changed[at] ^= 1
                rewrite(path, bytes(changed))
                found, complaints = registry.survey()
                assert found == (bystander,), (name, at)
                assert len(complaints) == 1
                assert victim.hex[:12] in complaints[0]
            with pytest.raises(DraftRefusedError, match="cannot be used"):
                registry.find(victim.digest)
            rewrite(path, content)
        assert registry.find(victim.digest) == victim

    def test_no_byte_of_the_weights_can_be_changed(self, site: Site):
        """The first, the last and some between, of every file; nor a file added or removed."""
        revision = site.add(site.draft())
        weights = site.registry.weights(revision)
        for path in sorted(weights.iterdir()):
            content = path.read_bytes()
            for at in {0, len(content) // 2, len(content) - 1, *range(0, len(content), 97)}:
                changed = bytearray(content)
                changed[at] ^= 1
                rewrite(path, bytes(changed))
                with pytest.raises(DraftRefusedError, match="import it again"):
                    site.registry.weights(revision)
            path.unlink()
            with pytest.raises(DraftRefusedError, match="import it again"):
                site.registry.weights(revision)
            rewrite_new(path, content)
        assert site.registry.weights(revision) == weights

    def test_cut_or_huge_file_is_refused(self, site: Site):
        revision = site.add(site.draft())
        for name in ("revision.json", "revision.sig"):
            path = site.home(revision) / name
            content = path.read_bytes()
            for wrong in (b"", content[:-1], content + b"x", content * 10_000, b"\xff\xfe"):
                rewrite(path, wrong)
                assert site.registry.revisions() == (), (name, wrong[:20])
            rewrite(path, content)
        assert site.registry.revisions() == (revision,)

    def test_revision_of_another_draft_is_refused(self, site: Site):
        first, second = site.add(site.draft("first")), site.add(site.draft("second"))
        for name in ("revision.json", "revision.sig"):
            rewrite(site.home(second) / name, (site.home(first) / name).read_bytes())
        with pytest.raises(DraftRefusedError, match="belongs to sha256:"):
            site.registry.find(second.hex)

    def test_missing_directory_of_weights_is_one_line(self, site: Site):
        revision = site.add(site.draft())
        (site.home(revision) / "weights").rename(site.place / "away")
        with pytest.raises(DraftRefusedError, match="import it again"):
            site.registry.weights(revision)


class TestTrust:
    """Whose word counts, and when."""

    def test_untrusted_signature_is_refused(self, site: Site, tmp_path: Path):
        revision = site.add(site.draft())
        other = new_key(tmp_path / "other.key", site.signer.name)
        registry = DraftRegistry(site.directory, trusted=trust(other), clock=lambda: site.now)
        assert registry.revisions() == ()
        with pytest.raises(DraftRefusedError, match="no trusted key signed the draft"):
            registry.find(revision.hex)

    def test_signature_is_valid_only_in_the_keys_period(self, site: Site):
        revision = site.add(site.draft())
        key = TrustedKey(verifier_key=site.signer.verifier_key, not_after=date(2026, 11, 20))
        registry = DraftRegistry(site.directory, trusted=(key,), clock=lambda: site.now)
        assert registry.find(revision.hex) == revision
        site.now += 10 * 86_400
        with pytest.raises(DraftRefusedError, match="was valid until 2026-11-20"):
            registry.find(revision.hex)

    def test_signer_is_trusted_by_the_registry_it_writes(self, site: Site):
        registry = DraftRegistry(site.directory, trusted=(), clock=lambda: site.now)
        source = site.draft()
        revision = registry.register(
            read_source(source), target=site.target, how="trained", signer=site.signer
        )
        assert registry.find(revision.hex) == revision


def test_drafts_are_listed_by_registration_time(site: Site):
    later = site.draft("later")
    site.now += 5
    second = site.add(later)
    site.now -= 5
    first = site.add(site.draft("first"))
    (site.directory / "revisions" / "notes").mkdir()
    (site.directory / "revisions" / "README").write_text("mine")
    assert site.registry.revisions() == (first, second)


def rewrite_new(path: Path, content: bytes) -> None:
    """Put back a file that was removed."""
    path.write_bytes(content)
    path.chmod(0o444)

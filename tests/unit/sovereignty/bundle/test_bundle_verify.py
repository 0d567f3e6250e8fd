"""A bundle is what a trusted key signed, or it is refused."""

import hashlib
import json
import os
import shutil
from dataclasses import dataclass
from datetime import date
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from appliance.audit.signing_keys import create_signing_key, load_keys, mldsa_path
from appliance.errors import (
    AuditKeyError,
    BundleError,
    BundleIncompleteError,
    BundleRefusedError,
    ConfigurationError,
)
from appliance.sovereignty.bundle.build import make_difference
from appliance.sovereignty.bundle.manifest import BundleManifest
from appliance.sovereignty.bundle.parts import split
from appliance.sovereignty.bundle.signature import (
    BUNDLE,
    TrustedKey,
    end_of,
    load_trusted_keys,
    parse_trusted_keys,
)
from appliance.sovereignty.bundle.source import DirectorySource
from tests.bundles import DATABASE, GATEWAY, LAST_DAY, NOW, Workshop


def blobs(bundle: Path) -> list[Path]:
    return sorted((bundle / "blobs" / "sha256").iterdir())


def refused(workshop: Workshop, bundle: Path, **how: object) -> str:
    with pytest.raises(BundleRefusedError) as caught:
        workshop.verify(bundle, **how)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_unchanged_bundle_verifies_and_names_its_signer(workshop, bundle):
    """The signer is the name of the trusted key."""
    verified = workshop.verify(bundle)
    assert verified.signer == "example.com/releases"
    assert len(verified.manifest.items) == 7


@dataclass(frozen=True)
class Media:
    """One bundle on every medium, and the base of the difference."""

    workshop: Workshop
    forms: dict[str, Path]
    base: Path

    def verify(self, form: str) -> None:
        self.workshop.verify(self.forms[form], base=self.base if form.startswith("difference") else None)

    def files(self, form: str) -> list[Path]:
        path = self.forms[form]
        return [path] if path.is_file() else sorted(file for file in path.rglob("*") if file.is_file())


@pytest.fixture(scope="module")
def media(tmp_path_factory) -> Media:
    workshop = Workshop.open(tmp_path_factory.mktemp("media") / "workshop")
    older, newer = workshop.build("1.0.0"), workshop.build("1.1.0", weights=b"weights, second edition" * 100)
    place = workshop.place
    difference = make_difference(
        workshop.open_bundle(older), workshop.open_bundle(newer), place / "difference"
    )
    for name, each in (("parts", workshop.open_bundle(newer)), ("difference-parts", difference)):
        split(each.head, each.contents, place / name, 7000)
    (place / "bundle.tar").write_bytes(
        b"".join(part.read_bytes() for part in sorted((place / "parts").glob("bundle.tar.*")))
    )
    names = {
        "tar": "bundle.tar",
        "parts": "parts",
        "difference": "difference",
        "difference-parts": "difference-parts",
    }
    forms = {"directory": newer} | {form: place / name for form, name in names.items()}
    return Media(workshop=workshop, forms=forms, base=older)


FORMS = ["directory", "tar", "parts", "difference", "difference-parts"]


@pytest.mark.parametrize("form", FORMS)
def test_every_medium_is_verified_in_place(media, form):
    """A directory, a tar file, parts, a difference and its parts: no copy is made of any of them."""
    before = sorted(media.workshop.place.rglob("*"))
    media.verify(form)
    assert sorted(media.workshop.place.rglob("*")) == before


@pytest.mark.parametrize("form", FORMS)
@given(data=st.data())
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_one_changed_byte_anywhere_is_noticed(media, form, data):
    """In the manifest, the signature, the base, the index of parts, a blob, a header or padding alike."""
    file = data.draw(st.sampled_from(media.files(form)))
    content = file.read_bytes()
    position = data.draw(st.integers(0, len(content) - 1))
    change = data.draw(st.integers(1, 255))
    changed = bytearray(content)
    changed[position] ^= change
    file.write_bytes(changed)
    try:
        with pytest.raises(BundleError):
            media.verify(form)
    finally:
        file.write_bytes(content)


def test_every_single_byte_of_a_small_difference_counts(workshop):
    """All positions of all files, not a sample of them; the five kinds of file are in it."""
    less = {name: [] for name in ("images", "charts", "files", "wheels", "rendered")}
    older = workshop.build("1.0.0", weights=b"first", **less)
    newer = workshop.build("1.1.0", weights=b"second", **less)
    place = workshop.place / "difference"
    make_difference(workshop.open_bundle(older), workshop.open_bundle(newer), place)
    files = [path for path in place.rglob("*") if path.is_file()]
    assert {path.name for path in files} > {
        "MANIFEST.json",
        "MANIFEST.sig",
        "BASE.json",
        "index.json",
        "oci-layout",
    }
    for file in files:
        content = file.read_bytes()
        for position in range(len(content)):
            file.write_bytes(content[:position] + bytes([content[position] ^ 1]) + content[position + 1 :])
            with pytest.raises(BundleError):
                workshop.verify(place, base=older)
        file.write_bytes(content)
    workshop.verify(place, base=older)


@pytest.mark.parametrize("form", FORMS)
def test_a_file_that_is_cut_off_or_longer_is_noticed(media, form):
    """By one byte, at the end of any file."""
    for file in media.files(form):
        content = file.read_bytes()
        for other in (content[:-1], content + b"\n"):
            file.write_bytes(other)
            with pytest.raises(BundleError):
                media.verify(form)
        file.write_bytes(content)


@pytest.mark.parametrize("form", FORMS)
def test_a_file_that_is_missing_is_noticed(media, form):
    """Each one, the head included."""
    for file in media.files(form):
        content = file.read_bytes()
        file.unlink()
        with pytest.raises((BundleError, ConfigurationError)):
            media.verify(form)
        file.write_bytes(content)


def test_a_damaged_part_is_named_so_that_it_alone_is_copied_again(media):
    """The message names one part of many."""
    part = media.forms["parts"] / "bundle.tar.0002"
    content = part.read_bytes()
    part.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(BundleRefusedError, match=r"bundle\.tar\.0002.*copy it again"):
        media.verify("parts")
    part.write_bytes(content)


@pytest.mark.parametrize("name", ["notes.txt", "blobs/sha512", "blobs/sha256/" + "0" * 64, ".hidden"])
def test_additional_file_is_refused(workshop, bundle, name):
    """No signature covers it."""
    (bundle / name).write_bytes(b"x")
    assert "not in MANIFEST.json" in refused(workshop, bundle)


def test_a_swapped_tag_is_refused_even_when_the_manifest_is_signed_again(workshop, bundle):
    """Two images whose names change places in index.json: items and index must agree."""
    index = json.loads((bundle / "index.json").read_bytes())
    first, second = (
        entry
        for entry in index["manifests"]
        if entry["annotations"]["org.opencontainers.image.ref.name"] in {GATEWAY, DATABASE}
    )
    first["annotations"], second["annotations"] = second["annotations"], first["annotations"]
    replace_index(workshop, bundle, index)
    assert "a name was moved" in refused(workshop, bundle)


def replace_index(workshop: Workshop, bundle: Path, index: dict) -> None:
    content = json.dumps(index, sort_keys=True, separators=(",", ":")).encode()
    (bundle / "index.json").write_bytes(content)
    change_file(workshop, bundle, "index.json", content)


def change_file(workshop: Workshop, bundle: Path, path: str, content: bytes) -> None:
    manifest = json.loads((bundle / "MANIFEST.json").read_bytes())
    for file in manifest["files"]:
        if file["path"] == path:
            file |= {"size": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    workshop.resign(bundle, BundleManifest.model_validate_json(json.dumps(manifest)))


class TestKeys:
    """Which signatures count, and when."""

    def test_another_key_with_the_same_name_is_refused(self, workshop, bundle, tmp_path):
        """The key counts, not its name."""
        create_signing_key(tmp_path / "other.key")
        other = load_keys(tmp_path / "other.key", mldsa_path(tmp_path / "other.key"), workshop.signer.name)
        content = (bundle / "MANIFEST.json").read_bytes()
        (bundle / "MANIFEST.sig").write_bytes(BUNDLE.sign(content, other))
        assert "no trusted key signed" in refused(workshop, bundle)

    def test_a_signature_of_another_bundle_does_not_count(self, workshop, bundle):
        """The signature names the manifest's hash."""
        other = workshop.build("1.1.0")
        shutil.copy(other / "MANIFEST.sig", bundle / "MANIFEST.sig")
        assert "to another MANIFEST.json" in refused(workshop, bundle)

    @pytest.mark.parametrize(
        ("days", "problem"),
        [
            ({"not_before": date(2030, 1, 1)}, "is valid from 2030-01-01"),
            ({"not_after": date(2026, 5, 1)}, "was valid until 2026-05-01"),
        ],
    )
    def test_key_is_valid_only_on_its_days(self, workshop, bundle, days, problem):
        """Too early and too late; both errors say what to do."""
        head = DirectorySource(bundle).head()
        key = TrustedKey(verifier_key=workshop.signer.verifier_key, **days)
        with pytest.raises(BundleRefusedError, match=problem):
            BUNDLE.verify(head.manifest, head.signature, [key], NOW)

    def test_key_is_valid_until_the_last_second_of_its_last_day(self, workshop, bundle):
        """Days are included, in UTC; the signer's own last day as well."""
        workshop.verify(bundle, now=end_of(LAST_DAY) - 1)
        assert "vouches for its key until" in refused(workshop, bundle, now=end_of(LAST_DAY))
        key = TrustedKey(verifier_key=workshop.signer.verifier_key, not_after=LAST_DAY)
        assert key.in_force(end_of(LAST_DAY) - 1)
        assert not key.in_force(end_of(LAST_DAY))

    def test_additional_unknown_signatures_are_ignored(self, workshop, bundle, tmp_path):
        """A bundle may be signed by more than one, for sites that trust one or the other."""
        create_signing_key(tmp_path / "other.key")
        other = load_keys(tmp_path / "other.key", mldsa_path(tmp_path / "other.key"), "elsewhere.example")
        note = BUNDLE.sign((bundle / "MANIFEST.json").read_bytes(), other)
        mine = (bundle / "MANIFEST.sig").read_bytes()
        (bundle / "MANIFEST.sig").write_bytes(note + mine.rpartition(b"\n\n")[2])
        assert workshop.verify(bundle).signer == "example.com/releases"

    def test_a_file_of_keys_is_read_with_names_and_days(self, workshop, tmp_path):
        """Comments are skipped; a mistyped line is an error, not a missing key."""
        vkey = workshop.signer.verifier_key.encode()
        text = f"# release\n\n{vkey} not-before=2026-01-01 not-after=2027-06-30\n"
        assert parse_trusted_keys(text) == (
            TrustedKey(
                verifier_key=workshop.signer.verifier_key,
                not_before=date(2026, 1, 1),
                not_after=date(2027, 6, 30),
            ),
        )
        for wrong in (f"{vkey} until=2027-01-01", f"{vkey} not-after=soon", vkey[:-3], f"{vkey} not-after"):
            with pytest.raises(AuditKeyError):
                parse_trusted_keys(wrong)
        with pytest.raises(ConfigurationError, match="has no key"):
            load_trusted_keys(written(tmp_path / "none", "# nothing\n"))
        with pytest.raises(ConfigurationError, match="cannot read the trusted keys"):
            load_trusted_keys(tmp_path / "missing")


def written(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


class TestHostile:
    """Bundles made by an attacker."""

    @pytest.mark.parametrize("path", ["../../etc/passwd", "/etc/passwd", "blobs/sha256/../../x", "blobs/x"])
    def test_manifest_path_cannot_leave_the_bundle(self, bundle, path):
        """Even signed: only three shapes of path exist."""
        manifest = json.loads((bundle / "MANIFEST.json").read_bytes())
        manifest["files"][0]["path"] = path
        with pytest.raises(BundleRefusedError, match=r"files\.0\.path"):
            BundleManifest.decode(json.dumps(manifest).encode(), "MANIFEST.json")

    @pytest.mark.parametrize("title", ["../escape", "/absolute", "a//b", "a/./b", "", "a\\b", "bell\x07"])
    def test_model_file_cannot_leave_its_directory(self, workshop, bundle, title):
        """Properly signed, and refused before anything is written."""
        self.rename_first_layer(workshop, bundle, title)
        assert "is unsafe or occurs twice" in refused(workshop, bundle)

    def rename_first_layer(self, workshop: Workshop, bundle: Path, title: str) -> None:
        """Give a model's first file another name, and make everything else agree with it."""
        manifest = json.loads((bundle / "MANIFEST.json").read_bytes())
        item = next(each for each in manifest["items"] if each["kind"] == "model")
        old = item["digest"].removeprefix("sha256:")
        document = json.loads((bundle / "blobs" / "sha256" / old).read_bytes())
        document["layers"][0]["annotations"]["org.opencontainers.image.title"] = title
        content = json.dumps(document).encode()
        new = hashlib.sha256(content).hexdigest()
        (bundle / "blobs" / "sha256" / old).unlink()
        (bundle / "blobs" / "sha256" / new).write_bytes(content)
        item["digest"] = f"sha256:{new}"
        index = json.loads((bundle / "index.json").read_bytes())
        for entry in index["manifests"]:
            if entry["digest"] == f"sha256:{old}":
                entry |= {"digest": f"sha256:{new}", "size": len(content)}
        index_content = json.dumps(index).encode()
        (bundle / "index.json").write_bytes(index_content)
        for file in manifest["files"]:
            if file["sha256"] == old:
                file |= {"path": f"blobs/sha256/{new}", "sha256": new, "size": len(content)}
            if file["path"] == "index.json":
                file |= {"sha256": hashlib.sha256(index_content).hexdigest(), "size": len(index_content)}
        manifest["files"].sort(key=lambda file: file["path"])
        workshop.resign(bundle, BundleManifest.model_validate_json(json.dumps(manifest)))

    def test_a_link_in_place_of_a_file_is_not_followed(self, workshop, bundle, tmp_path):
        """Though what it points to has the right bytes."""
        blob = blobs(bundle)[0]
        shutil.move(blob, tmp_path / "elsewhere")
        blob.symlink_to(tmp_path / "elsewhere")
        assert "through a link" in refused(workshop, bundle)

    @pytest.mark.parametrize("name", ["blobs", "blobs/sha256"])
    def test_a_link_in_place_of_a_directory_is_not_followed(self, workshop, bundle, tmp_path, name):
        """Neither when listing nor when reading."""
        shutil.move(bundle / name, tmp_path / "elsewhere")
        (bundle / name).symlink_to(tmp_path / "elsewhere")
        assert "not in MANIFEST.json" in refused(workshop, bundle)

    @pytest.mark.parametrize("name", ["MANIFEST.json", "MANIFEST.sig", "index.json"])
    def test_a_pipe_in_place_of_a_file_does_not_hang_the_reader(self, workshop, bundle, name):
        """It is refused at once."""
        (bundle / name).unlink()
        os.mkfifo(bundle / name)
        assert "not a regular file" in refused(workshop, bundle)

    def test_a_manifest_that_is_not_canonical_is_refused(self, bundle):
        """A member twice, white space, an unknown member, a number in another spelling."""
        content = (bundle / "MANIFEST.json").read_bytes()
        for other in (
            content + b"\n",
            content.replace(b'"format":1', b'"format":1,"format":1'),
            content.replace(b'"format":1', b'"format":1.0'),
            content.replace(b'"format":1', b'"format":1,"note":"x"'),
            content.replace(b'"format":1', b'"format":2'),
            b"[" * 100_000,
            b"\xff",
        ):
            assert other != content
            with pytest.raises(BundleRefusedError):
                BundleManifest.decode(other, "MANIFEST.json")

    def test_blob_without_an_item_is_refused(self, workshop, bundle):
        """Even if it is signed: every blob belongs to an item."""
        manifest = BundleManifest.decode((bundle / "MANIFEST.json").read_bytes(), "MANIFEST.json")
        kept = [item for item in manifest.items if item.kind != "wheels"]
        index = json.loads((bundle / "index.json").read_bytes())
        index["manifests"] = [
            entry for entry in index["manifests"] if entry["digest"] in {item.digest for item in kept}
        ]
        workshop.resign(bundle, manifest.model_copy(update={"items": tuple(kept)}))
        replace_index(workshop, bundle, index)
        assert "belongs to no item" in refused(workshop, bundle)

    def test_a_huge_manifest_is_not_read_into_memory(self, workshop, bundle):
        """A sparse file of many gigabytes is refused by its size."""
        os.truncate(bundle / "MANIFEST.json", 2**36)
        message = refused(workshop, bundle)
        # The search for leaks reads all files that a run leaves.
        (bundle / "MANIFEST.json").unlink()
        assert "larger than" in message


def test_difference_without_its_base_names_the_base(media):
    """With none, and with another one."""
    with pytest.raises(BundleIncompleteError, match=r"sovereign-appliance 1\.0\.0 .*--base"):
        media.workshop.verify(media.forms["difference"])
    with pytest.raises(BundleIncompleteError, match=r"the base is sovereign-appliance 1\.1\.0"):
        media.workshop.verify(media.forms["difference"], base=media.forms["directory"])


def test_base_that_lacks_a_blob_is_refused(media):
    """What is taken from it is verified like everything else."""
    omitted = json.loads((media.forms["difference"] / "BASE.json").read_bytes())["omitted"]
    blob = media.base / "blobs" / "sha256" / omitted[0].removeprefix("sha256:")
    content = blob.read_bytes()
    blob.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(BundleIncompleteError, match="the base lacks a blob"):
        media.verify("difference")
    blob.write_bytes(content)

"""The documented examples are real, and a verifier can be written from the page."""

import base64
import hashlib
import json
import re
import tarfile
from pathlib import Path

import pytest
import yaml
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from appliance.audit.signing_keys import Signer
from appliance.sovereignty.bundle.archive import END, padding, tar_header
from appliance.sovereignty.bundle.build import build_bundle
from appliance.sovereignty.bundle.manifest import Base, BundleFile, BundleManifest, Item, ItemKind
from appliance.sovereignty.bundle.parts import PartsIndex, split
from appliance.sovereignty.bundle.recipe import BundleRecipe, load_recipe
from tests.bundles import Workshop, all_files

ROOT = Path(__file__).parents[4]
PAGE = (ROOT / "docs" / "reference" / "bundle-format.md").read_text(encoding="utf-8")
HOW_TO = (ROOT / "docs" / "how-to" / "build-and-load-a-bundle.md").read_text(encoding="utf-8")


def block(begins: str) -> str:
    """The text of the code block that begins so."""
    blocks = re.findall(r"```(?:json)?\n(.*?)```", PAGE, re.DOTALL)
    (found,) = [text for text in blocks if text.startswith(begins)]
    return found


@pytest.fixture
def example(tmp_path) -> Path:
    """The bundle of the page, built again."""
    signer = Signer("example.com/releases", Ed25519PrivateKey.from_private_bytes(bytes(range(32))))
    workshop = Workshop(tmp_path, signer)
    said = {"licence": "Apache-2.0", "origin": "https://example.com/hello"}
    files = [{"name": "hello", "version": "1", "files": ["hello.txt"], **said}]
    empty = {name: [] for name in ("images", "charts", "models", "wheels", "rendered")}
    recipe = workshop.recipe(name="example", files=files, upgrade_from="1.0.0", **empty)
    (recipe.parent / "hello.txt").write_text("hello\n")
    build_bundle(load_recipe(recipe), recipe.parent, tmp_path / "example", workshop.stamp, None)
    return tmp_path / "example"


def test_documented_example_is_reproducible(example):
    """To the byte, signature included."""
    files = all_files(example)
    assert files["MANIFEST.json"].decode() == block('{"created"').removesuffix("\n")
    assert files["MANIFEST.sig"].decode() == block("sovereign-appliance bundle v1")
    assert files["oci-layout"] == b'{"imageLayoutVersion":"1.0.0"}'


def second_verifier(directory: Path, key_line: str, now: int) -> dict:
    """What the page says under "To verify", steps 1 to 5, for a whole directory, with nothing of ours."""
    manifest_bytes = (directory / "MANIFEST.json").read_bytes()
    text, _, lines = (directory / "MANIFEST.sig").read_text().rpartition("\n\n")
    text += "\n"
    digest = hashlib.sha256(manifest_bytes).hexdigest()
    assert text == f"sovereign-appliance bundle v1\nsha256:{digest}\n{len(manifest_bytes)}\n"
    name, key_id, encoded = key_line.split("+", 2)
    key = base64.b64decode(encoded)
    assert key[0] == 1
    assert hashlib.sha256(name.encode() + b"\n" + key).digest()[:4].hex() == key_id
    signatures = [
        base64.b64decode(line.split(" ")[2]) for line in lines.splitlines() if line.split(" ")[1] == name
    ]
    (signature,) = [each[4:] for each in signatures if each[:4].hex() == key_id]
    Ed25519PublicKey.from_public_bytes(key[1:]).verify(signature, text.encode())
    manifest = json.loads(manifest_bytes)
    assert (
        json.dumps(manifest, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()
        == manifest_bytes
    )
    assert now < manifest["key_not_after"]
    found = {path.relative_to(directory).as_posix() for path in directory.rglob("*") if not path.is_dir()}
    assert found == {file["path"] for file in manifest["files"]} | {"MANIFEST.json", "MANIFEST.sig"}
    for file in manifest["files"]:
        content = (directory / file["path"]).read_bytes()
        assert (len(content), hashlib.sha256(content).hexdigest()) == (file["size"], file["sha256"])
    assert (directory / "oci-layout").read_bytes() == b'{"imageLayoutVersion":"1.0.0"}'
    index = json.loads((directory / "index.json").read_bytes())["manifests"]
    labels = [
        item.get("reference", f"{item['kind']}/{item['name']}:{item['version']}")
        for item in manifest["items"]
    ]
    named = [(entry["annotations"]["org.opencontainers.image.ref.name"], entry["digest"]) for entry in index]
    assert named == list(zip(labels, (item["digest"] for item in manifest["items"]), strict=True))
    return manifest


def test_verifier_written_from_the_documentation_agrees(workshop, bundle):
    """On a bundle of one of everything, and on a damaged one."""
    key = workshop.signer.vkey
    manifest = second_verifier(bundle, key, 1_790_000_000)
    assert BundleManifest.model_validate_json(json.dumps(manifest)) == workshop.verify(bundle).manifest
    note = (bundle / "MANIFEST.sig").read_text()
    (bundle / "MANIFEST.sig").write_text(note[:-10] + ("A" if note[-10] != "A" else "B") + note[-9:])
    with pytest.raises(InvalidSignature):
        second_verifier(bundle, key, 1_790_000_000)


def test_documented_bundle_and_key_verify(example):
    """By the line on the page."""
    line = block("example.com/releases+").strip()
    second_verifier(example, line, 1_790_000_000)


def test_the_tables_of_the_page_name_every_member():
    """Of the manifest, its items and files, the base and the index of parts."""
    for record in (BundleManifest, Item, BundleFile, Base, PartsIndex):
        for member in record.model_fields:
            assert f"`{member}`" in PAGE, (record, member)
    for kind in ItemKind:
        assert f"`{kind}`" in PAGE


def test_stream_matches_the_documentation(workshop, bundle):
    """Names and order, and headers that say nothing but path and size."""
    opened = workshop.open_bundle(bundle)
    split(opened.head, opened.contents, workshop.place / "parts", 10**9)
    with tarfile.open(workshop.place / "parts" / "bundle.tar.0001") as tar:
        members = tar.getmembers()
    paths = [file.path for file in opened.manifest.files]
    assert [member.name for member in members] == ["MANIFEST.json", "MANIFEST.sig", *paths]
    said = {(each.mode, each.uid, each.gid, each.uname, each.gname, each.mtime) for each in members}
    assert said == {(0o644, 0, 0, "", "", 0)}


def test_a_file_of_any_size_has_a_header_that_tar_reads(tmp_path):
    """From 8 GiB on in the pax form; a sparse file stands for the weights."""
    for size in (0, 1, 511, 512, 8 * 2**30 - 1, 8 * 2**30, 2**40):
        path = tmp_path / "stream.tar"
        header = tar_header("blobs/sha256/" + "0" * 64, size)
        with path.open("wb") as file:
            file.write(header)
            file.truncate(len(header) + size + len(padding(size)))
            file.seek(0, 2)
            file.write(END)
        with tarfile.open(path) as tar:
            (member,) = tar.getmembers()
        # The search for leaks reads all files that a run leaves.
        path.unlink()
        assert (member.name, member.size) == ("blobs/sha256/" + "0" * 64, size)


def test_recipe_in_the_how_to_is_valid():
    """It has only known members, and all required ones."""
    (text,) = re.findall(r"```yaml\n(name: .*?)```", HOW_TO, re.DOTALL)
    recipe = BundleRecipe.model_validate(yaml.safe_load(text))
    assert {name for name in BundleRecipe.model_fields if getattr(recipe, name)} == set(
        BundleRecipe.model_fields
    )

"""The checks of weights and their digests."""

import hashlib
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from appliance.cli.preflight.check import CheckResult
from appliance.cli.preflight.digests import check_weights, compare, expected_files, judge_digests, parse_sums
from appliance.errors import BundleRefusedError
from appliance.infra.settings import DEMO_DRAFT, DEMO_TARGET
from tests.bundles import NOW, Workshop
from tests.unit.cli.preflight.test_preflight_files import inquiry_in


def digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


@pytest.fixture
def model(tmp_path):
    """A copy of the demo pair that a test may damage."""
    for source in (DEMO_TARGET, DEMO_DRAFT):
        shutil.copytree(source, tmp_path / source.name)
    return tmp_path / DEMO_TARGET.name


@pytest.fixture
def sums(model, tmp_path):
    """What `sha256sum */*` prints above both directories."""
    files = [file for name in (DEMO_TARGET.name, DEMO_DRAFT.name) for file in (tmp_path / name).iterdir()]
    lines = [f"{digest(file.read_bytes())}  {file.relative_to(tmp_path)}\n" for file in files]
    (tmp_path / "SHA256SUMS").write_text("".join(lines))
    return tmp_path / "SHA256SUMS"


def asked(model, manifest=None):
    draft = model.parent / DEMO_DRAFT.name
    inquiry = inquiry_in(model.parent / "data", worker={"model": str(model), "draft": str(draft)})
    return tuple(check_weights(replace(inquiry, manifest=manifest)))


def test_matching_weights_pass(model, sums):
    files, digests = asked(model, sums)
    assert files.result is digests.result is CheckResult.OK
    assert digests.seen == "9 files match"


def test_one_flipped_bit_is_found(model, sums):
    """In the middle of the weights, which no header covers."""
    weights = model / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[len(content) // 2] ^= 1
    weights.write_bytes(content)
    files, digests = asked(model, sums)
    assert files.result is CheckResult.OK
    assert digests.result is CheckResult.FAIL
    assert digests.seen == f"{weights} does not match"


def test_a_file_that_was_lost_is_found(model, sums):
    """Also one that no header names."""
    (model / "chat_template.jinja").unlink()
    assert asked(model, sums)[1].seen == f"{model / 'chat_template.jinja'} is missing"


def test_unexpected_file_is_a_warning(model, sums):
    """The engine may read it."""
    (model / "generation.json").write_text("{}")
    assert asked(model, sums)[1].result is CheckResult.WARN


def test_truncated_weights_fail_without_a_list(model):
    """The header has the length."""
    weights = model / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    files, digests = asked(model)
    assert files.result is CheckResult.FAIL
    assert digests.result is CheckResult.SKIPPED


def test_without_a_list_digests_are_skipped(model):
    """The line names the option."""
    assert "--against" in asked(model)[1].seen


@pytest.mark.parametrize(
    "text", ["", "no sum\n", f"{'0' * 64}  other-model/config.json\n", f"{'0' * 63}  config.json\n"]
)
def test_list_without_the_model_is_a_failure(model, tmp_path, text):
    """A comparison with an empty list would look like success."""
    (tmp_path / "sums").write_text(text)
    assert asked(model, tmp_path / "sums")[1].result is CheckResult.FAIL
    assert asked(model, tmp_path / "none")[1].result is CheckResult.FAIL


def test_lines_of_sha256sum():
    """Text or binary mode, below the model's directory or in it, with directories inside."""
    a, b, c = "a" * 64, "B" * 64, "c" * 64
    text = f"{a}  config.json\n{b} *some/where/demo/sub/x.json\n{c}  elsewhere/config.json\n\n"
    assert parse_sums(text, "demo") == {"config.json": a, "sub/x.json": "b" * 64}


def test_a_model_of_a_loaded_bundle_is_known_by_the_directory_above(tmp_path):
    """`models/demo/current` is the model `demo`."""
    (tmp_path / "sums").write_text(f"{'a' * 64}  demo/config.json\n")
    assert expected_files(tmp_path / "sums", Path("/models/demo/current")) == {"config.json": "a" * 64}


def test_files_in_subdirectories_count(tmp_path):
    """Names are relative to the model's directory."""
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "x").write_bytes(b"1")
    found = compare(tmp_path, {"sub/x": digest(b"1"), "y": digest(b"")})
    assert (found.same, found.missing) == (1, ("y",))
    assert judge_digests([found]).result is CheckResult.FAIL


def test_a_bundle_names_the_files_of_its_models(tmp_path):
    """The model is found by the directory's name, or the name above it as in a loaded bundle."""
    workshop = Workshop.open(tmp_path / "workshop")
    bundle = workshop.build()
    sent = expected_files(bundle, Path("/models/demo/target/current"), trusted=workshop.trusted, now=NOW)
    assert sent["config.json"] == digest(b'{"hidden_size":8}')
    assert sent == expected_files(bundle, Path("/srv/demo/target"))
    with pytest.raises(ValueError, match="lists no file of /models/target"):
        expected_files(bundle, Path("/models/target"))
    with pytest.raises(BundleRefusedError):
        expected_files(bundle, Path("/models/demo/target"), trusted=[], now=NOW)


def test_a_bundle_whose_list_was_altered_is_refused(tmp_path):
    """The manifest has the digest of every file."""
    bundle = Workshop.open(tmp_path / "workshop").build()
    for blob in (bundle / "blobs" / "sha256").iterdir():
        content = blob.read_bytes()
        if b"config.json" in content:
            blob.chmod(0o600)
            blob.write_bytes(content.replace(b"config.json", b"c0nfig.json"))
    with pytest.raises(BundleRefusedError):
        expected_files(bundle, Path("/models/demo/target"))


def test_bundle_without_trusted_keys_is_a_warning(tmp_path):
    """Its files match, but its origin is not verified."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    same = compare(tmp_path / "model", {"config.json": hashlib.sha256(b"{}").hexdigest()})
    assert judge_digests([same]).result is CheckResult.OK
    assert judge_digests([same], unsigned=True).result is CheckResult.WARN

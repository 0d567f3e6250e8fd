"""Facts about weights, from directories written here byte by byte."""

import hashlib
import json
from pathlib import Path

import pytest

from appliance.errors import ConfigurationError
from appliance.serving.weights import TensorInfo, inspect_weights, load_weights, parse_header

TARGET = {"hidden_size": 8, "vocab_size": 32, "num_hidden_layers": 6}


def write_tensors(file: Path, shapes: dict[str, tuple[int, ...]], dtype: str = "BF16") -> None:
    header, end = {"__metadata__": {"format": "pt"}}, 0
    for name, shape in shapes.items():
        size = 2
        for length in shape:
            size *= length
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [end, end + size]}
        end += size
    text = json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + bytes(end))


@pytest.fixture
def model(tmp_path):
    def write(name, config, shapes, dtype="BF16"):
        directory = tmp_path / name
        directory.mkdir()
        (directory / "config.json").write_text(json.dumps(config))
        write_tensors(directory / "model.safetensors", shapes, dtype)
        return inspect_weights(directory)

    return write


def test_reads_names_shapes_and_types(model):
    """The header says everything; no tensor is read."""
    weights = model("one", TARGET, {"a": (2, 3), "b": ()})
    assert weights.tensors == {
        "a": TensorInfo(shape=(2, 3), dtype="BF16"),
        "b": TensorInfo(shape=(), dtype="BF16"),
    }
    assert weights.config == TARGET
    assert weights.path.is_absolute()
    assert weights.digest == ""


def test_reads_the_training_record(model):
    """The record is part of the weights, and of their digest."""
    path = model("one", TARGET, {"a": (1,)}).path
    before = load_weights(path)
    (path / "training.json").write_text('{"norm_output": true}')
    after = load_weights(path)
    assert (before.training, after.training) == ({}, {"norm_output": True})
    assert before.digest != after.digest


def test_reads_a_quantization_that_is_kept_apart(model):
    """vLLM reads this file too, if the config has no quantization."""
    path = model("one", TARGET, {"a": (1,)}).path
    (path / "hf_quant_config.json").write_text('{"quantization": {"quant_algo": "FP8"}}')
    assert inspect_weights(path).config["quantization_config"] == {"quantization": {"quant_algo": "FP8"}}
    (path / "config.json").write_text('{"quantization_config": {"quant_method": "awq"}}')
    assert inspect_weights(path).config["quantization_config"] == {"quant_method": "awq"}


def test_joins_the_parts_of_divided_weights(tmp_path):
    """Large weights come in many files; all of them count."""
    (tmp_path / "config.json").write_text("{}")
    write_tensors(tmp_path / "model-00001-of-00002.safetensors", {"a": (1,)})
    write_tensors(tmp_path / "model-00002-of-00002.safetensors", {"b": (1,)})
    assert set(inspect_weights(tmp_path).tensors) == {"a", "b"}


def test_digest_equals_sha256sum(model):
    """An auditor needs no program of ours to check a digest."""
    path = model("one", TARGET, {"a": (2, 3)}).path
    (path / "tokenizer.json").write_text("{}")
    (path / "README.md").write_text("not part of how it answers")
    listing = "".join(
        f"{hashlib.sha256((path / name).read_bytes()).hexdigest()}  {name}\n"
        for name in ("config.json", "model.safetensors", "tokenizer.json")
    )
    assert load_weights(path).digest == f"sha256:{hashlib.sha256(listing.encode()).hexdigest()}"


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "tokenizer.json"])
def test_digest_changes_with_any_byte_that_matters(model, name):
    """Config, tokenizer and tensors are all bound."""
    path = model("one", TARGET, {"a": (2, 3)}).path
    (path / "tokenizer.json").write_text("{} ")
    before, content = load_weights(path).digest, bytearray((path / name).read_bytes())
    content[-1] ^= 1 if name == "model.safetensors" else 0
    (path / name).write_bytes(bytes(content) if name == "model.safetensors" else bytes(content) + b" ")
    assert load_weights(path).digest != before


def test_digest_reports_its_progress(model):
    """Hundreds of gigabytes take minutes, and an operator is waiting."""
    path, seen = model("one", TARGET, {"a": (2, 3)}).path, []
    load_weights(path, report=lambda done, total: seen.append((done, total)))
    assert seen[-1][0] == seen[-1][1] == sum(file.stat().st_size for file in path.iterdir())


def damage_nothing(path: Path) -> None:
    for file in path.iterdir():
        file.unlink()
    path.rmdir()


@pytest.mark.parametrize(
    ("damage", "complaint"),
    [
        (damage_nothing, "does not exist"),
        (lambda path: (path / "config.json").unlink(), "is .* a model's directory"),
        (lambda path: (path / "config.json").write_text("{"), "is not JSON"),
        (lambda path: (path / "config.json").write_text("[]"), "not contain a JSON object"),
        (lambda path: (path / "model.safetensors").unlink(), "no .*safetensors file"),
        (lambda path: (path / "model.safetensors").write_bytes(b""), "longer than the file"),
        (lambda path: (path / "model.safetensors").write_bytes(b"\xff" * 64), "longer than the file"),
        (
            lambda path: (path / "model.safetensors").write_bytes(b"\x02" + bytes(7) + b"[]"),
            "complete safetensors",
        ),
        (
            lambda path: (path / "model.safetensors").write_bytes(
                (path / "model.safetensors").read_bytes()[:-1]
            ),
            "and its header describes",
        ),
        (
            lambda path: (path / "model.safetensors.index.json").write_text(
                '{"weight_map": {"a": "x.safetensors"}}'
            ),
            "x.safetensors is missing",
        ),
    ],
)
def test_names_the_file_that_is_missing_or_broken(model, damage, complaint):
    """A copy that went wrong on the way in is found before a worker is started, in one line."""
    path = model("one", TARGET, {"a": (2, 3)}).path
    damage(path)
    with pytest.raises(ConfigurationError, match=complaint) as refusal:
        inspect_weights(path)
    assert "\n" not in str(refusal.value)


def test_refuses_a_file_in_place_of_a_directory(tmp_path):
    """The settings name directories."""
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(ConfigurationError, match="is not a directory"):
        inspect_weights(tmp_path / "model.safetensors")


@pytest.mark.parametrize(
    "header", [b"[]", b"{", b'{"a": 1}', b'{"a": {"dtype": "F32"}}', b'{"a": {"shape": 3}}']
)
def test_parses_headers_or_raises_value_error(header):
    with pytest.raises(ValueError, match=r"\w"):
        parse_header(header)

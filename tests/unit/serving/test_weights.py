"""Facts about weights, from directories written here byte by byte."""

import hashlib
import json
from pathlib import Path

import pytest

from appliance.errors import ConfigurationError
from appliance.serving.weights import (
    Severity,
    TensorInfo,
    check_pair,
    find_problems,
    inspect_weights,
    load_weights,
    parse_header,
)

TARGET = {"hidden_size": 8, "vocab_size": 32, "num_hidden_layers": 6}
EAGLE3 = {
    "hidden_size": 8,
    "vocab_size": 32,
    "draft_vocab_size": 32,
    "eagle_aux_hidden_state_layer_ids": [2, 3, 4],
}
EAGLE31 = EAGLE3 | {"fc_norm": True, "norm_output": True, "num_aux_hidden_states": 3, "target_hidden_size": 8}
FUSION = {"fc.weight": (8, 24), "lm_head.weight": (32, 8), "norm.weight": (8,)}
FC_NORMS = {f"fc_norm.{index}.weight": (8,) for index in range(3)}


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


@pytest.fixture
def problems(model):
    """What is wrong with a draft for the target above."""

    def find(config, shapes, target=TARGET, dtype="BF16"):
        found = find_problems(model("target", target, {}), model("draft", config, shapes, dtype))
        return [(finding.severity, finding.message) for finding in found]

    return find


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


def test_joins_the_parts_of_divided_weights(tmp_path):
    """Large weights come in many files; all of them count."""
    (tmp_path / "config.json").write_text("{}")
    write_tensors(tmp_path / "model-00001-of-00002.safetensors", {"a": (1,)})
    write_tensors(tmp_path / "model-00002-of-00002.safetensors", {"b": (1,)})
    assert set(inspect_weights(tmp_path).tensors) == {"a", "b"}


def test_digest_is_what_sha256sum_would_say(model):
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
    """Hundreds of gigabytes take minutes; somebody is waiting."""
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
        (lambda path: (path / "config.json").write_text("[]"), "no JSON object"),
        (lambda path: (path / "model.safetensors").unlink(), "no .*safetensors file"),
        (lambda path: (path / "model.safetensors").write_bytes(b""), "longer than the file"),
        (lambda path: (path / "model.safetensors").write_bytes(b"\xff" * 64), "longer than the file"),
        (
            lambda path: (path / "model.safetensors").write_bytes(b"\x02" + bytes(7) + b"[]"),
            "whole safetensors",
        ),
        (
            lambda path: (path / "model.safetensors").write_bytes(
                (path / "model.safetensors").read_bytes()[:-1]
            ),
            "where its header tells",
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
    """A parser of foreign bytes has one way to fail."""
    with pytest.raises(ValueError, match=r"\w"):
        parse_header(header)


@pytest.mark.parametrize(
    ("config", "shapes"),
    [
        (EAGLE3, FUSION),
        (EAGLE31, FUSION | FC_NORMS),
        (EAGLE3 | {"draft_vocab_size": 16}, FUSION | {"d2t": (16,), "lm_head.weight": (16, 8)}),
        (EAGLE3 | {"norm_before_fc": True}, FUSION | {"input_norm.weight": (24,)}),
        (EAGLE3 | {"eagle_config": {"use_aux_hidden_state": False}}, {"norm.weight": (8,)}),
        ({"transformer_layer_config": {"hidden_size": 8, "vocab_size": 32}, **EAGLE31}, FUSION | FC_NORMS),
    ],
    ids=["eagle3", "eagle3.1", "small vocabulary", "norm before fc", "no aux layers", "speculators"],
)
def test_accepts_a_draft_that_fits(problems, config, shapes):
    """Every format that vLLM loads passes without a word."""
    assert problems(config, shapes) == []


@pytest.mark.parametrize(
    ("config", "shapes", "complaint"),
    [
        (EAGLE31 | {"target_hidden_size": 16}, FUSION | FC_NORMS | {"fc.weight": (8, 48)}, "hidden size 16"),
        (EAGLE31 | {"vocab_size": 64}, FUSION | FC_NORMS, "vocab_size is 64"),
        (EAGLE31 | {"draft_vocab_size": 16}, FUSION | FC_NORMS | {"lm_head.weight": (16, 8)}, "no d2t"),
        (EAGLE31, FUSION | FC_NORMS | {"lm_head.weight": (16, 8)}, "lm_head.weight has the shape"),
        (EAGLE31, FUSION | FC_NORMS | {"fc.weight": (8, 16)}, "fc.weight takes 16"),
        (EAGLE31, {name: FUSION[name] for name in ("lm_head.weight",)} | FC_NORMS, "no fc.weight"),
        (EAGLE31, FUSION, "fc_norm.0.weight is missing"),
        (
            EAGLE31,
            FUSION | {name: FC_NORMS[name] for name in list(FC_NORMS)[:2]},
            "fc_norm.2.weight is missing",
        ),
        (EAGLE3, FUSION | FC_NORMS, "does not say fc_norm"),
        (EAGLE3 | {"norm_before_fc": True}, FUSION, "input_norm.weight is missing"),
        (EAGLE3, FUSION | {"input_norm.weight": (24,)}, "does not say norm_before_fc"),
        (
            EAGLE31 | {"eagle_aux_hidden_state_layer_ids": [2, 3, 7]},
            FUSION | FC_NORMS,
            "the target has 6 layers",
        ),
        (
            EAGLE31 | {"eagle_aux_hidden_state_layer_ids": [2, 2, 3]},
            FUSION | FC_NORMS,
            "not 3 different ones",
        ),
        (
            EAGLE31,
            {f"model.{name}": shape for name, shape in (FUSION | FC_NORMS).items()},
            "strip the prefix",
        ),
    ],
)
def test_refuses_a_draft_that_does_not_fit(problems, config, shapes, complaint):
    """Each of these is an error of its own, and the only one."""
    found = problems(config, shapes)
    assert len(found) == 1
    assert found[0][0] is Severity.ERROR
    assert complaint in found[0][1]


@pytest.mark.parametrize(
    ("config", "complaint"),
    [
        (
            {name: value for name, value in EAGLE31.items() if "layer_ids" not in name},
            "picks layers by itself",
        ),
        (
            {name: value for name, value in EAGLE31.items() if "layer_ids" not in name}
            | {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [2, 3, 4]}},
            "not every vLLM runner reads",
        ),
    ],
)
def test_warns_of_what_works_but_may_be_wrong(problems, config, complaint):
    """A silent default once cost two thirds of the acceptance; it is said, not refused."""
    found = problems(config, FUSION | FC_NORMS)
    assert [severity for severity, _ in found] == [Severity.WARNING]
    assert complaint in found[0][1]


def test_reads_a_multimodal_target(problems):
    """The language model's fields are nested there."""
    target = {"text_config": TARGET, "hidden_size": 999}
    assert problems(EAGLE31, FUSION | FC_NORMS, target) == []


def test_leaves_quantized_weights_to_vllm(problems):
    """Packed weights have other shapes; refusing them would refuse drafts that load."""
    assert problems(EAGLE3, {"fc.weight": (8, 3), "norm.weight": (8,)}, dtype="I32") == []


def test_raises_the_first_error_and_counts_the_others(model):
    """One line for a terminal; the list is there for who wants it."""
    target, draft = model("target", TARGET, {}), model("draft", EAGLE31 | {"vocab_size": 64}, FUSION)
    with pytest.raises(ConfigurationError, match=r"does not fit: .*vocab_size.* \(and 1 more\)"):
        check_pair(target, draft)


def test_returns_warnings(model):
    """What does not keep a worker from starting is for the log."""
    draft = {name: value for name, value in EAGLE3.items() if "layer_ids" not in name}
    findings = check_pair(model("target", TARGET, {}), model("draft", draft, FUSION))
    assert [finding.severity for finding in findings] == [Severity.WARNING]

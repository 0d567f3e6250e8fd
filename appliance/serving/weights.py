"""
Read-only facts about weights on this machine's disk, and whether a draft fits a target.

Only `config.json` and the headers of the safetensors files are read, so this needs no torch and costs
milliseconds; the content digest reads every byte.  Format of a safetensors file: 8 bytes length
(little endian), that many bytes of JSON, then the tensors (https://github.com/huggingface/safetensors).
"""

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Any, BinaryIO

from appliance.errors import ConfigurationError

LENGTH_BYTES = 8
LARGEST_HEADER = 100 * 2**20
"""Longest header, in bytes, that the format's own reader accepts."""
CHUNK = 2**20
DIGESTED_SUFFIXES = frozenset({".json", ".safetensors", ".jinja", ".txt", ".model", ".tiktoken"})
"""What decides how a model answers: config, tokenizer, chat template and weights."""
DEFAULT_AUX_LAYERS = 3
UNQUANTIZED = frozenset({"BF16", "F16", "F32"})

Progress = Callable[[int, int], None]
"""Called with the bytes read so far and the bytes there are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorInfo:
    """One tensor as a safetensors header describes it."""

    shape: tuple[int, ...]
    dtype: str
    """Such as `BF16`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """One model's directory."""

    path: Path
    """Absolute."""
    config: Mapping[str, Any]
    tensors: Mapping[str, TensorInfo]
    digest: str = ""
    """`sha256:` and 64 hex digits; empty where nobody asked for it."""


class Severity(StrEnum):
    """Whether a finding keeps a worker from starting."""

    ERROR = "error"
    WARNING = "warning"


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing that is wrong, or suspicious, about a pair of weights."""

    severity: Severity
    message: str


def inspect_weights(path: Path) -> Weights:
    """
    Read config and headers of the weights in a directory.

    Raises:
        ConfigurationError: one line that says which file is missing or broken.
    """
    path = path.absolute()
    if not path.is_dir():
        what = "is not a directory" if path.exists() else "does not exist"
        raise ConfigurationError(f"{path} {what}; weights are always local, never a hub name")
    config = _read_json(path / "config.json")
    files = sorted(path.glob("*.safetensors"))
    if not files:
        message = f"{path} holds no *.safetensors file; other formats are not served"
        raise ConfigurationError(message)
    index = path / "model.safetensors.index.json"
    if index.exists():
        for name in sorted(set(_read_json(index).get("weight_map", {}).values())):
            if not (path / name).exists():
                message = f"{path / name} is missing, but {index.name} names it; the copy is incomplete"
                raise ConfigurationError(message)
    tensors: dict[str, TensorInfo] = {}
    for file in files:
        tensors |= _read_tensors(file)
    return Weights(path=path, config=config, tensors=tensors)


def load_weights(path: Path, *, report: Progress | None = None) -> Weights:
    """
    Read config and headers, and digest the content; takes as long as reading all of it does.

    Raises:
        ConfigurationError: as `inspect_weights`, or a file could not be read to its end.
    """
    weights = inspect_weights(path)
    return replace(weights, digest=digest_weights(weights.path, report=report))


def digest_weights(path: Path, *, report: Progress | None = None) -> str:
    """
    Digest what decides how a model answers.

    It is the SHA-256 of what `sha256sum` prints for the files in byte order of their names, so
    that anybody can check it with a shell.
    """
    files = sorted(
        (file for file in path.iterdir() if file.suffix in DIGESTED_SUFFIXES and file.is_file()),
        key=lambda file: file.name.encode(),
    )
    total, done = sum(file.stat().st_size for file in files), 0
    listing = hashlib.sha256()
    for file in files:
        digest = hashlib.sha256()
        try:
            with file.open("rb") as stream:
                for chunk in iter(lambda: stream.read(CHUNK), b""):
                    digest.update(chunk)
                    done += len(chunk)
                    if report is not None:
                        report(done, total)
        except OSError as error:
            raise ConfigurationError(f"cannot read {file}: {error.strerror}") from error
        listing.update(f"{digest.hexdigest()}  {file.name}\n".encode())
    return f"sha256:{listing.hexdigest()}"


def parse_header(header: bytes) -> dict[str, TensorInfo]:
    """
    Parse the JSON of a safetensors header.

    Raises:
        ValueError: it describes no tensors.
    """
    entries = json.loads(header)
    if not isinstance(entries, dict):
        message = "the header is no JSON object"
        raise ValueError(message)  # noqa: TRY004 - like any other malformed header
    try:
        return {
            name: TensorInfo(shape=tuple(int(size) for size in entry["shape"]), dtype=str(entry["dtype"]))
            for name, entry in entries.items()
            if name != "__metadata__"
        }
    except (KeyError, TypeError) as error:
        message = "an entry has no shape or no dtype"
        raise ValueError(message) from error


def text_config(weights: Weights) -> Mapping[str, Any]:
    """Fields of the language model: those of a multimodal target are nested in `text_config`."""
    nested = weights.config.get("text_config")
    return nested if isinstance(nested, dict) else weights.config


def check_pair(target: Weights, draft: Weights) -> tuple[Finding, ...]:
    """
    Refuse an EAGLE 3 or 3.1 draft that does not fit its target.

    Returns:
        What is suspicious but works.

    Raises:
        ConfigurationError: the first error, and how many more there are.
    """
    findings = tuple(find_problems(target, draft))
    errors = [finding for finding in findings if finding.severity is Severity.ERROR]
    if errors:
        more = f" (and {len(errors) - 1} more)" if len(errors) > 1 else ""
        raise ConfigurationError(f"the draft in {draft.path} does not fit: {errors[0].message}{more}")
    return findings


def find_problems(target: Weights, draft: Weights) -> Iterator[Finding]:
    """
    Everything wrong with a pair, most fundamental first.

    The rules follow what vLLM does without a word: `vllm/model_executor/models/llama_eagle3.py`
    leaves norms that are not in the file at 1, and `interfaces.py` picks default layers.
    """
    fields, depth = _draft_fields(draft), text_config(target).get("num_hidden_layers")
    tensors = {name.removeprefix("model."): info for name, info in draft.tensors.items()}
    if any(name.startswith("model.") for name in draft.tensors):
        # Checked by running it; NeMo AutoModel writes such names.
        yield _error("its tensors are called model.*, which vLLM 0.32 does not load; strip the prefix")
    hidden, width = text_config(target).get("hidden_size"), fields.get("hidden_size")
    expected = fields.get("target_hidden_size") or width
    if hidden != expected:
        yield _error(f"it is made for a target of hidden size {expected}, the target's is {hidden}")
    yield from _vocabulary_problems(fields, tensors, text_config(target).get("vocab_size"))
    layers, is_nested = _aux_layers(fields)
    count = fields.get("num_aux_hidden_states") or len(layers) or DEFAULT_AUX_LAYERS
    yield from _fusion_problems(fields, tensors, count, expected)
    if not layers:
        yield _warning("it names no eagle_aux_hidden_state_layer_ids, so vLLM picks layers by itself")
    elif is_nested:
        yield _warning("it names its aux layers only in eagle_config, which not every vLLM runner reads")
    if layers and len(set(layers)) != count:
        yield _error(f"it names aux layers {layers}, which are not {count} different ones")
    if isinstance(depth, int) and any(not 0 <= layer <= depth for layer in layers):
        yield _error(f"it names aux layers {layers}, but the target has {depth} layers")


def _vocabulary_problems(
    fields: Mapping[str, Any], tensors: Mapping[str, TensorInfo], vocabulary: object
) -> Iterator[Finding]:
    if fields.get("vocab_size") != vocabulary:
        yield _error(f"its vocab_size is {fields.get('vocab_size')}, the target's is {vocabulary}")
    drafted = fields.get("draft_vocab_size") or fields.get("vocab_size")
    if drafted != vocabulary and "d2t" not in tensors:
        yield _error(f"it drafts {drafted} of {vocabulary} tokens, but has no d2t tensor to map them")
    for name in ("d2t", "lm_head.weight"):
        if name in tensors and tensors[name].shape[:1] != (drafted,):
            yield _error(f"{name} has the shape {tensors[name].shape} for a draft_vocab_size of {drafted}")


def _fusion_problems(
    fields: Mapping[str, Any], tensors: Mapping[str, TensorInfo], count: int, hidden: object
) -> Iterator[Finding]:
    if _eagle_config(fields).get("use_aux_hidden_state") is False or not isinstance(hidden, int):
        return
    fc = tensors.get("fc.weight")
    if fc is None:
        if not any(name.startswith("fc.") for name in tensors):
            yield _error("it has no fc.weight; is it an EAGLE 3 draft?")
    elif fc.dtype in UNQUANTIZED and fc.shape[-1:] != (count * hidden,):
        yield _error(f"fc.weight takes {fc.shape[-1]} values, but {count} aux layers give {count * hidden}")
    has = {
        "fc_norm": [name for name in tensors if name.startswith("fc_norm.")],
        "norm_before_fc": [name for name in tensors if name.startswith("input_norm.")],
    }
    before = _eagle_config(fields).get("norm_before_fc", fields.get("norm_before_fc"))
    wants = {"fc_norm": bool(fields.get("fc_norm")), "norm_before_fc": bool(before)}
    needed = {
        "fc_norm": {f"fc_norm.{i}.weight" for i in range(count)},
        "norm_before_fc": {"input_norm.weight"},
    }
    for flag, names in has.items():
        missing = sorted(needed[flag].difference(names))
        if wants[flag] and missing:
            yield _error(f"its config says {flag}, but {missing[0]} is missing; vLLM would not notice")
        if names and not wants[flag]:
            yield _error(f"it has {names[0]}, but its config does not say {flag}")


def _aux_layers(fields: Mapping[str, Any]) -> tuple[tuple[int, ...], bool]:
    """Aux layer ids, and whether they are only where vLLM's first runner looks."""
    name, nested = "eagle_aux_hidden_state_layer_ids", _eagle_config(fields)
    places = ((fields.get(name), False), (nested.get("layer_ids"), False), (nested.get(name), True))
    for layers, is_nested in places:
        if isinstance(layers, list) and layers and all(isinstance(layer, int) for layer in layers):
            return tuple(layers), is_nested
    return (), False


def _eagle_config(fields: Mapping[str, Any]) -> Mapping[str, Any]:
    nested = fields.get("eagle_config")
    return nested if isinstance(nested, dict) else {}


def _draft_fields(draft: Weights) -> Mapping[str, Any]:
    """Fields of a draft; the speculators format nests those of its layer."""
    layer = draft.config.get("transformer_layer_config")
    return {**layer, **draft.config} if isinstance(layer, dict) else draft.config


def _error(message: str) -> Finding:
    return Finding(severity=Severity.ERROR, message=message)


def _warning(message: str) -> Finding:
    return Finding(severity=Severity.WARNING, message=message)


def _read_json(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(file.read_bytes())
    except FileNotFoundError as error:
        raise ConfigurationError(f"{file} does not exist; is {file.parent} a model's directory?") from error
    except OSError as error:
        raise ConfigurationError(f"cannot read {file}: {error.strerror}") from error
    except ValueError as error:
        raise ConfigurationError(f"{file} is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise ConfigurationError(f"{file} holds no JSON object")
    return content


def _read_tensors(file: Path) -> dict[str, TensorInfo]:
    try:
        with file.open("rb") as stream:
            return parse_header(_read_header(stream, file.stat().st_size))
    except OSError as error:
        raise ConfigurationError(f"cannot read {file}: {error.strerror}") from error
    except ValueError as error:
        raise ConfigurationError(f"{file} is not a whole safetensors file: {error}") from error


def _read_header(stream: BinaryIO, size: int) -> bytes:
    length = int.from_bytes(stream.read(LENGTH_BYTES), "little")
    if size < LENGTH_BYTES or not 0 < length <= min(LARGEST_HEADER, size - LENGTH_BYTES):
        message = "its header is longer than the file"
        raise ValueError(message)
    header = stream.read(length)
    entries = json.loads(header)
    if not isinstance(entries, dict):
        return header
    spans = [entry.get("data_offsets", (0, 0)) for entry in entries.values() if isinstance(entry, dict)]
    end = max((span[1] for span in spans), default=0)
    if LENGTH_BYTES + length + end != size:
        message = f"it has {size} bytes where its header tells of {LENGTH_BYTES + length + end}"
        raise ValueError(message)
    return header

"""
Facts about weights on this machine's disk; read-only.

Only `config.json` and the headers of the safetensors files are read, so this needs no torch and takes
milliseconds; the content digest reads every byte.  Format of a safetensors file: 8 bytes length (little
endian), that many bytes of JSON, then the tensors (https://github.com/huggingface/safetensors).
"""

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, BinaryIO

from appliance.errors import ConfigurationError
from appliance.infra.settings import DEMO_MODELS

LENGTH_BYTES = 8
LARGEST_HEADER = 100 * 2**20
"""Maximum header size in bytes, as in the format's own reader."""
CHUNK = 2**20
DIGESTED_SUFFIXES = frozenset({".json", ".safetensors", ".jinja", ".txt", ".model", ".tiktoken"})
"""Files that determine how a model answers: config, tokenizer, chat template and weights."""
TRAINING_RECORD = "training.json"
"""Written by a draft's trainer, if there is one."""
QUANTIZATION = "hf_quant_config.json"
"""Where older ModelOpt keeps `quantization_config`; vLLM reads it (`transformers_utils/config.py`)."""

Progress = Callable[[int, int], None]
"""Called with the bytes read so far and the total."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorInfo:
    shape: tuple[int, ...]
    dtype: str
    """Such as `BF16`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    path: Path
    """Absolute."""
    config: Mapping[str, Any]
    tensors: Mapping[str, TensorInfo]
    digest: str = ""
    """`sha256:` and 64 hex digits; empty unless it was computed."""
    training: Mapping[str, Any] = field(default_factory=dict)
    """Empty if there is none."""


def inspect_weights(path: Path) -> Weights:
    """Read config and headers; raises ConfigurationError if a file is missing or broken."""
    path = path.absolute()
    if not DEMO_MODELS.exists() and path.parent == DEMO_MODELS:
        raise ConfigurationError(
            "the demo models are not installed: install the wheel of sovereign-appliance-demo, which "
            "`pip wheel --no-deps ./demo` builds in a checkout, or name your own with --model or worker.model"
        )
    if not path.is_dir():
        what = "is not a directory" if path.exists() else "does not exist"
        raise ConfigurationError(f"{path} {what}; weights are always local, never a hub name")
    config = _read_json(path / "config.json")
    if config.get("quantization_config") is None and (path / QUANTIZATION).exists():
        config["quantization_config"] = _read_json(path / QUANTIZATION)
    training = _read_json(path / TRAINING_RECORD) if (path / TRAINING_RECORD).exists() else {}
    files = sorted(path.glob("*.safetensors"))
    if not files:
        raise ConfigurationError(f"{path} holds no *.safetensors file; other formats are not served")
    index = path / "model.safetensors.index.json"
    if index.exists():
        for name in sorted(set(_read_json(index).get("weight_map", {}).values())):
            if not (path / name).exists():
                message = f"{path / name} is missing, but {index.name} names it; the copy is incomplete"
                raise ConfigurationError(message)
    tensors: dict[str, TensorInfo] = {}
    for file in files:
        tensors |= _read_tensors(file)
    return Weights(path=path, config=config, tensors=tensors, training=training)


def load_weights(path: Path, *, report: Progress | None = None) -> Weights:
    """`inspect_weights`, and the digest, for which every byte is read."""
    weights = inspect_weights(path)
    return replace(weights, digest=digest_weights(weights.path, report=report))


def digest_weights(path: Path, *, report: Progress | None = None) -> str:
    """
    The SHA-256 of what `sha256sum` prints for the files in byte order: anyone can check it with a shell.
    """
    return digest_files(hash_files(path, report=report))


def digest_files(hashes: Mapping[str, str]) -> str:
    """Digest of a model from the SHA-256 (hex) of its files by name."""
    listing = hashlib.sha256()
    for name in sorted(hashes, key=str.encode):
        listing.update(f"{hashes[name]}  {name}\n".encode())
    return f"sha256:{listing.hexdigest()}"


def hash_files(path: Path, *, report: Progress | None = None) -> dict[str, str]:
    """SHA-256 (hex) by name of each file that determines how a model answers."""
    files = sorted(
        (file for file in path.iterdir() if file.suffix in DIGESTED_SUFFIXES and file.is_file()),
        key=lambda file: file.name.encode(),
    )
    total, done = sum(file.stat().st_size for file in files), 0
    hashes: dict[str, str] = {}
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
        hashes[file.name] = digest.hexdigest()
    return hashes


def parse_header(header: bytes) -> dict[str, TensorInfo]:
    """Parse the JSON of a safetensors header; raises ValueError if it describes no tensors."""
    entries = json.loads(header)
    if not isinstance(entries, dict):
        raise ValueError("the header is not a JSON object")  # noqa: TRY004 - like any other malformed header
    try:
        return {
            name: TensorInfo(shape=tuple(int(size) for size in entry["shape"]), dtype=str(entry["dtype"]))
            for name, entry in entries.items()
            if name != "__metadata__"
        }
    except (KeyError, TypeError) as error:
        raise ValueError("an entry has no shape or no dtype") from error


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
        raise ConfigurationError(f"{file} does not contain a JSON object")
    return content


def _read_tensors(file: Path) -> dict[str, TensorInfo]:
    try:
        with file.open("rb") as stream:
            return parse_header(_read_header(stream, file.stat().st_size))
    except OSError as error:
        raise ConfigurationError(f"cannot read {file}: {error.strerror}") from error
    except ValueError as error:
        raise ConfigurationError(f"{file} is not a complete safetensors file: {error}") from error


def _read_header(stream: BinaryIO, size: int) -> bytes:
    length = int.from_bytes(stream.read(LENGTH_BYTES), "little")
    if size < LENGTH_BYTES or not 0 < length <= min(LARGEST_HEADER, size - LENGTH_BYTES):
        raise ValueError("its header is longer than the file")
    header = stream.read(length)
    entries = json.loads(header)
    if not isinstance(entries, dict):
        return header
    spans = [entry.get("data_offsets", (0, 0)) for entry in entries.values() if isinstance(entry, dict)]
    end = max((span[1] for span in spans), default=0)
    if LENGTH_BYTES + length + end != size:
        raise ValueError(f"it has {size} bytes, and its header describes {LENGTH_BYTES + length + end}")
    return header

"""
Converts a plain draft to the library's format by renaming: no number changes.

The library and vLLM read the result, and vLLM reads what the library makes of it.  Two tensors are added if
missing.  `embed_tokens.weight` is the target's: speculators 0.9.0 takes it from the target where it finds NaN
(`model.py`), but transformers 5 leaves uninitialised memory there, on which a draft would be trained.  `t2d`
marks the target's tokens that a draft with a smaller vocabulary knows.
"""

import json
import re
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from appliance.drafts.lint.architectures import Family
from appliance.drafts.lint.shape import AUX_IDS, SPECULATORS_FLAGS, default_aux_layers, read_shape
from appliance.drafts.training.backend import BYTES_OF
from appliance.errors import DraftRefusedError, DraftStorageError
from appliance.serving.weights import LENGTH_BYTES, Weights, inspect_weights

ALIGNMENT = 8
MAP, KNOWN, EMBEDDING = "d2t", "t2d", "embed_tokens.weight"
LAYER_FIELDS = (
    "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
    "head_dim", "hidden_act", "vocab_size", "max_position_embeddings", "rms_norm_eps", "rope_theta",
    "rope_scaling", "rope_parameters", "attention_bias", "layer_types", "sliding_window",
)  # fmt: skip
LAYER_TYPES = {Family.LLAMA: "llama", Family.QWEN3: "qwen3"}


def speculators_config(config: Mapping[str, Any], target: Weights) -> dict[str, Any]:
    """The draft's config.json in the library's format; DraftRefusedError if it cannot train this kind."""
    shape = read_shape(config)
    family = None if shape.family is None else LAYER_TYPES.get(shape.family)
    if family is None:
        raise DraftRefusedError(
            f"speculators cannot train a draft of kind {shape.family}: use --from-scratch"
        )
    if shape.speculators:
        content = json.loads(json.dumps(config))
    else:
        layer = {name: shape.fields[name] for name in LAYER_FIELDS if shape.fields.get(name) is not None}
        depth = target.config.get("num_hidden_layers")
        named = shape.aux_layers(AUX_IDS) or shape.aux_layers("layer_ids")
        content = {
            "architectures": ["Eagle3Speculator"],
            "speculators_model_type": "eagle3",
            "draft_vocab_size": shape.draft_vocab_size,
            "target_hidden_size": shape.target_hidden_size,
            AUX_IDS: list(named or default_aux_layers(depth if isinstance(depth, int) else None)),
            **{name: bool(shape.fields.get(name)) for name in SPECULATORS_FLAGS},
            "norm_before_fc": shape.norm_before_fc,
            "transformer_layer_config": {"model_type": family, **layer, "tie_word_embeddings": False},
            "tie_word_embeddings": False,
            "speculators_config": {
                "algorithm": "eagle3",
                "default_proposal_method": "greedy",
                "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 3}],
            },
        }
    section = content.setdefault("speculators_config", {})
    section["verifier"] = {
        "architectures": target.config.get("architectures") or [],
        "name_or_path": str(target.path),
    }
    return dict(content)


def convert_draft(draft: Path, target: Weights, out: Path) -> None:
    """Write a draft in the library's format into a new directory."""
    weights = inspect_weights(draft)
    config = speculators_config(weights.config, target)
    files = sorted(draft.glob("*.safetensors"))
    if len(files) > 1:
        raise DraftRefusedError(f"{draft} has its weights in {len(files)} files: merge them into one")
    try:
        out.mkdir(mode=0o700)
        (out / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        tensors = {
            re.sub(r"^midlayer\.", "layers.0.", tensor.name): tensor for tensor in _tensors_in(files[0])
        }
        _write_tensors(_completed(tensors, target), out / "model.safetensors")
    except OSError as error:
        raise DraftStorageError(f"cannot write {out}: {error.strerror}") from error


@dataclass(frozen=True, slots=True, kw_only=True)
class _Stored:
    """A tensor in a safetensors file, or one made here (`made`)."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: Path
    begin: int
    size: int
    made: bytes | None = None

    def read(self) -> bytes:
        if self.made is not None:
            return self.made
        with self.file.open("rb") as stream:
            stream.seek(self.begin)
            return stream.read(self.size)


def _tensors_in(file: Path) -> Iterator[_Stored]:
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(LENGTH_BYTES), "little")
        entries = json.loads(stream.read(length))
    for name, entry in entries.items():
        if name != "__metadata__":
            begin, end = entry["data_offsets"]
            yield _Stored(
                name=name,
                dtype=entry["dtype"],
                shape=tuple(entry["shape"]),
                file=file,
                begin=LENGTH_BYTES + length + begin,
                size=end - begin,
            )


def _completed(tensors: dict[str, _Stored], target: Weights) -> dict[str, _Stored]:
    """Add the tensors that the library would otherwise invent."""
    found = dict(tensors)
    if EMBEDDING not in found:
        stored = [each for file in sorted(target.path.glob("*.safetensors")) for each in _tensors_in(file)]
        named = [each for each in stored if each.name.endswith(EMBEDDING)]
        if not named:
            raise DraftRefusedError(f"{target.path} has no {EMBEDDING}, which speculators needs")
        found[EMBEDDING] = min(named, key=lambda each: len(each.name))
    drafted = found.get(MAP)
    if drafted is not None and KNOWN not in found:
        if drafted.dtype != "I64":
            raise DraftRefusedError(f"the draft's {MAP} is {drafted.dtype}, and speculators needs I64")
        offsets = struct.unpack(f"<{drafted.shape[0]}q", drafted.read())
        known = bytearray(found[EMBEDDING].shape[0])
        for place, offset in enumerate(offsets):
            known[place + offset] = 1
        found[KNOWN] = replace(
            drafted, name=KNOWN, dtype="BOOL", shape=(len(known),), size=len(known), made=bytes(known)
        )
    return found


def _write_tensors(tensors: Mapping[str, _Stored], out: Path) -> None:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    # The largest numbers first, so that all of them begin where they are aligned.
    order = sorted(tensors.items(), key=lambda item: (-BYTES_OF.get(item[1].dtype, 1), item[0]))
    end = 0
    for name, tensor in order:
        span = [end, end + tensor.size]
        header[name] = {"dtype": tensor.dtype, "shape": list(tensor.shape), "data_offsets": span}
        end += tensor.size
    encoded = json.dumps(header, separators=(",", ":")).encode()
    # Spaces after the JSON are part of the format.
    encoded += b" " * (-len(encoded) % ALIGNMENT)
    with out.open("wb") as written:
        written.write(len(encoded).to_bytes(LENGTH_BYTES, "little") + encoded)
        for _name, tensor in order:
            written.write(tensor.read())

"""The table of architectures against the vLLM that is installed, read but never imported."""

import ast
import re
from importlib.util import find_spec
from pathlib import Path

import pytest

from appliance.drafts.lint.architectures import DRAFT_FAMILIES, TARGETS, Family

CLASSES = {
    ("llama_eagle3", "Eagle3LlamaForCausalLM"): Family.LLAMA,
    ("qwen3_eagle3", "Eagle3Qwen3ForCausalLM"): Family.QWEN3,
    ("deepseek_eagle3", "Eagle3DeepseekV2ForCausalLM"): Family.MLA,
}
CLASS = re.compile(r"^class (\w+)\(([^()]*)\):", re.MULTILINE)
TARGET_TABLES = ("_TEXT_GENERATION_MODELS", "_MULTIMODAL_MODELS", "_TRANSFORMERS_SUPPORTED_MODELS")


@pytest.fixture(scope="module")
def root() -> Path:
    spec = find_spec("vllm")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("vllm is not installed")
    return Path(spec.submodule_search_locations[0])


@pytest.fixture(scope="module")
def registry(root) -> dict[str, dict[str, tuple[str, str]]]:
    """Architecture to (module, class), by table."""
    tables = {}
    for node in ast.parse((root / "model_executor/models/registry.py").read_text()).body:
        value = getattr(node, "value", None)
        target = getattr(node, "target", None) or (getattr(node, "targets", None) or [None])[0]
        if isinstance(target, ast.Name) and isinstance(value, ast.Dict):
            entries = zip(value.keys, value.values, strict=True)
            tables[target.id] = {
                key.value: ast.literal_eval(entry) for key, entry in entries if isinstance(entry, ast.Tuple)
            }
    return tables


def test_every_draft_has_the_class_vllm_loads_it_with(registry):
    """Names that `method: eagle3` can lead to: vLLM adds the prefix `Eagle3` to others."""
    reachable = {
        name: CLASSES[entry]
        for name, entry in registry["_SPECULATIVE_DECODING_MODELS"].items()
        if entry in CLASSES and (name.startswith("Eagle3") or name.endswith("Eagle3"))
    }
    assert reachable == DRAFT_FAMILIES


def test_every_target_supports_eagle3_in_vllm(root, registry):
    """A class does if `SupportsEagle3` is among its ancestors."""
    bases = {}
    for folder in (root / "model_executor" / "models", root / "models"):
        for file in folder.rglob("*.py"):
            for name, listed in CLASS.findall(file.read_text(encoding="utf-8")):
                bases.setdefault(name, set()).update(re.findall(r"\w+", listed))

    def supports(name: str, seen: frozenset[str] = frozenset()) -> bool:
        return name == "SupportsEagle3" or any(
            supports(base, seen | {name}) for base in bases.get(name, ()) if base not in seen
        )

    entries = {name: entry for table in TARGET_TABLES for name, entry in registry[table].items()}
    supported = {name for name, (_, owner) in entries.items() if supports(owner)}
    backend = {f"Transformers{kind}ForCausalLM" for kind in ("", "MoE", "MultiModal", "MultiModalMoE")}
    assert supported | backend == TARGETS

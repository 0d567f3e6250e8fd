"""
A small model for each drafting method, made from the demo pair in seconds.

Drafts with random weights are accepted by chance only; those made of the target's own layers more often.
"""

import json
import shutil
from pathlib import Path
from typing import Any

from appliance.infra.settings import DEMO_DRAFT, DEMO_TARGET

TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json")
MTP = "model.mtp_layers.0."


def make_eagle3(directory: Path) -> Path:
    """Plain EAGLE 3: the demo draft without the norms of 3.1."""
    config, tensors = _read(DEMO_DRAFT)
    config = {name: value for name, value in config.items() if name not in {"fc_norm", "norm_output"}}
    return _write(directory, config, {name: t for name, t in tensors.items() if "fc_norm" not in name})


def make_mtp_target(directory: Path) -> Path:
    """The demo target as a MiMo model, with a copy of its last layer to predict the token after the next."""
    import torch  # noqa: PLC0415

    config, tensors = _read(DEMO_TARGET)
    wide, last = config["hidden_size"], config["num_hidden_layers"] - 1
    for layer in range(last + 1):
        for name in ("q_proj", "k_proj", "v_proj"):
            at = f"model.layers.{layer}.self_attn.{name}"
            tensors[f"{at}.bias"] = torch.zeros(tensors[f"{at}.weight"].shape[0])
    source = f"model.layers.{last}."
    tensors |= {
        name.replace(source, MTP): tensor for name, tensor in tensors.items() if name.startswith(source)
    }
    for name in ("token_layernorm", "hidden_layernorm", "final_layernorm"):
        tensors[f"{MTP}{name}.weight"] = torch.ones(wide)
    tensors[f"{MTP}input_proj.weight"] = torch.cat([torch.eye(wide), torch.eye(wide)], dim=1) / 2
    kept = ("hidden_size", "num_attention_heads", "num_key_value_heads", "intermediate_size", "vocab_size")
    kept += ("num_hidden_layers", "max_position_embeddings", "rms_norm_eps", "rope_parameters", "hidden_act")
    made = {name: config[name] for name in (*kept, "bos_token_id", "eos_token_id", "tie_word_embeddings")}
    made |= {"architectures": ["MiMoForCausalLM"], "model_type": "qwen2", "num_nextn_predict_layers": 1}
    _write(directory, made, tensors)
    for name in TOKENIZER:
        shutil.copy(DEMO_TARGET / name, directory / name)
    return directory


def _read(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    from safetensors.torch import load_file  # noqa: PLC0415

    return json.loads((path / "config.json").read_text()), load_file(path / "model.safetensors")


def _write(directory: Path, config: dict[str, Any], tensors: dict[str, Any]) -> Path:
    import torch  # noqa: PLC0415
    from safetensors.torch import save_file  # noqa: PLC0415

    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(config))
    whole = {name: tensor.to(torch.bfloat16).clone() for name, tensor in tensors.items()}
    save_file(whole, directory / "model.safetensors")
    return directory

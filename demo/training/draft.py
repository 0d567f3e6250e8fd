"""
The demo draft: one EAGLE 3.1 layer trained against the frozen target.

EAGLE 3.1 is EAGLE 3 with an RMSNorm on each captured target hidden state before they are fused
(`fc_norm`) and with the draft's normed output fed to its next step (`norm_output`).  The layout of
weights and the order of operations are those of vLLM's `llama_eagle3.py`, which serves this head.

Positions: row t takes the target's hidden states at t and the embedding of token t+1, and predicts
token t+2.  Training-time test unrolls this: step j of row t stands at position t+j, takes the
embedding of token t+1+j and the draft's own output of step j-1, and predicts token t+2+j.
"""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional
from transformers import LlamaConfig, LlamaForCausalLM

from demo.training.precision import mixed_precision
from demo.training.schedule import learning_rate

WEIGHT_PREFIXES = (
    ("midlayer.self_attn.", ("q_proj", "k_proj", "v_proj", "o_proj")),
    ("midlayer.mlp.", ("gate_proj", "up_proj", "down_proj")),
    ("midlayer.", ("input_layernorm", "hidden_norm", "post_attention_layernorm")),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftRecipe:
    """
    `unroll` training-time-test steps; later ones count `decay` as much as the one before.

    One round of `steps` for each peak rate: the first on the corpus, the others half on what the target
    itself writes.
    """

    steps: int
    batch: int = 8
    window: int = 192
    unroll: int = 3
    decay: float = 0.9
    peak_rates: tuple[float, ...] = (2e-3, 1e-3)
    seed: int = 32


def aux_layers(config: LlamaConfig) -> tuple[int, int, int]:
    """The layers whose inputs vLLM captures by default: low, middle, high."""
    depth = int(config.num_hidden_layers)
    return 2, depth // 2, depth - 3


class RmsNorm(nn.Module):
    """Root-mean-square norm in float32."""

    def __init__(self, width: int, epsilon: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.epsilon = epsilon

    def forward(self, x: Tensor) -> Tensor:
        """Return `x` scaled to unit mean square, times the weight."""
        wide = x.float()
        scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.epsilon)
        return (wide * scale * self.weight).to(x.dtype)


class DraftHead(nn.Module):
    """The layer itself; parameter names are the file's weight names with dots for underscores."""

    def __init__(self, config: LlamaConfig, target: LlamaForCausalLM) -> None:
        super().__init__()
        width, epsilon = int(config.hidden_size), float(config.rms_norm_eps)
        self.heads, self.kv_heads = int(config.num_attention_heads), int(config.num_key_value_heads)
        self.head_dim = width // self.heads
        inner, kv_width = int(config.intermediate_size), self.kv_heads * self.head_dim
        self.fc_norm = nn.ModuleList(RmsNorm(width, epsilon) for _ in range(3))
        self.fc = nn.Linear(3 * width, width, bias=False)
        self.input_layernorm = RmsNorm(width, epsilon)
        self.hidden_norm = RmsNorm(width, epsilon)
        self.q_proj = nn.Linear(2 * width, width, bias=False)
        self.k_proj = nn.Linear(2 * width, kv_width, bias=False)
        self.v_proj = nn.Linear(2 * width, kv_width, bias=False)
        self.o_proj = nn.Linear(width, width, bias=False)
        self.post_attention_layernorm = RmsNorm(width, epsilon)
        self.gate_proj = nn.Linear(width, inner, bias=False)
        self.up_proj = nn.Linear(width, inner, bias=False)
        self.down_proj = nn.Linear(inner, width, bias=False)
        self.norm = RmsNorm(width, epsilon)
        self.lm_head = nn.Linear(width, int(config.vocab_size), bias=False)
        self.lm_head.weight.data.copy_(target.lm_head.weight.data)
        self.rope_theta = 10000.0

    def fuse(self, captured: list[Tensor]) -> Tensor:
        """Three hidden states [batch, time, width] into one: the `fc_norm` half of EAGLE 3.1."""
        normed = [norm(state) for norm, state in zip(self.fc_norm, captured, strict=True)]
        return self.fc(torch.cat(normed, dim=-1))

    def step(self, hidden: Tensor, embeds: Tensor, step: int, cache: "StepCache") -> Tensor:
        """One draft step for every row; returns the normed output [batch, time, width]."""
        batch, time, width = hidden.shape
        mixed = torch.cat([self.input_layernorm(embeds), self.hidden_norm(hidden)], dim=-1)
        query = self._heads(self.q_proj(mixed), self.heads)
        key = self._heads(self.k_proj(mixed), self.kv_heads)
        value = self._heads(self.v_proj(mixed), self.kv_heads)
        query, key = self._rotate(query, step), self._rotate(key, step)
        groups = self.heads // self.kv_heads
        cache.append(key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1))
        attended = cache.attend(query).transpose(1, 2).reshape(batch, time, width)
        residual = hidden + self.o_proj(attended)
        x = self.post_attention_layernorm(residual)
        mlp = self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))
        return self.norm(residual + mlp)

    def _heads(self, x: Tensor, count: int) -> Tensor:
        return x.view(x.shape[0], x.shape[1], count, self.head_dim).transpose(1, 2)

    def _rotate(self, x: Tensor, offset: int) -> Tensor:
        half = self.head_dim // 2
        exponents = torch.arange(half, device=x.device, dtype=torch.float32) / half
        positions = torch.arange(x.shape[2], device=x.device, dtype=torch.float32) + offset
        angles = positions[:, None] * self.rope_theta**-exponents
        cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        first, second = x[..., :half], x[..., half:]
        return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


class StepCache:
    """Keys and values of the steps so far: row t sees step 0 up to t, and its own later steps."""

    def __init__(self) -> None:
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []

    def append(self, key: Tensor, value: Tensor) -> None:
        """Take one step's keys and values, [batch, heads, time, head_dim] each."""
        self.keys.append(key)
        self.values.append(value)

    def attend(self, query: Tensor) -> Tensor:
        """Attention of the newest step's queries over everything each row may see."""
        time, scale = query.shape[2], query.shape[-1] ** -0.5
        scores = (query @ self.keys[0].transpose(-1, -2)) * scale
        future = torch.ones(time, time, dtype=torch.bool, device=query.device).triu(1)
        scores = scores.float().masked_fill(future, float("-inf"))
        own = [((query * key).sum(-1, keepdim=True) * scale).float() for key in self.keys[1:]]
        weights = torch.cat([scores, *own], dim=-1).softmax(-1).to(query.dtype)
        mixed = weights[..., :time] @ self.values[0]
        for index, value in enumerate(self.values[1:]):
            mixed = mixed + weights[..., time + index : time + index + 1] * value
        return mixed


def train_draft(
    head: DraftHead,
    batches: Iterator[Tensor],
    target: LlamaForCausalLM,
    recipe: DraftRecipe,
    peak_rate: float,
    report: Callable[[int, int, str], None],
    device: str,
) -> None:
    """Distil the target into the head for one round: cross entropy against its distribution."""
    target = target.float().to(device).eval()
    head.to(device).train()
    layers = aux_layers(target.config)
    embed = target.get_input_embeddings()
    optimizer = torch.optim.AdamW(head.parameters(), lr=peak_rate, betas=(0.9, 0.95))
    agreement = [0.0] * recipe.unroll
    for step in range(recipe.steps):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, recipe.steps, peak_rate)
        batch = next(batches).to(device)
        with mixed_precision(device):
            with torch.no_grad():
                seen = target(input_ids=batch, use_cache=False, output_hidden_states=True)
                embeds = embed(batch)
            rows = recipe.window - 1 - recipe.unroll
            hidden = head.fuse([seen.hidden_states[layer][:, :rows] for layer in layers])
            cache, loss = StepCache(), torch.zeros((), device=device)
            for j in range(recipe.unroll):
                hidden = head.step(hidden, embeds[:, 1 + j : 1 + j + rows], j, cache)
                logits = head.lm_head(hidden).float()
                wanted = seen.logits[:, 1 + j : 1 + j + rows].float()
                loss = loss + recipe.decay**j * functional.cross_entropy(
                    logits.flatten(0, 1), wanted.softmax(-1).flatten(0, 1)
                )
                hit = (logits.argmax(-1) == wanted.argmax(-1)).float().mean().item()
                agreement[j] = hit if step == 0 else 0.95 * agreement[j] + 0.05 * hit
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(head.parameters(), 1.0)
        optimizer.step()
        shown = " ".join(f"{value:.2f}" for value in agreement)
        report(step + 1, recipe.steps, f"agreement {shown}")
    head.eval()


def weight_name(parameter: str) -> str:
    """What a parameter of the head is called in the file."""
    owner = parameter.split(".", maxsplit=1)[0]
    return next((prefix + parameter for prefix, names in WEIGHT_PREFIXES if owner in names), parameter)


def load_draft(directory: Path, target: LlamaForCausalLM) -> DraftHead:
    """Read a head back, to train it further."""
    stored = load_file(directory / "model.safetensors")
    head = DraftHead(target.config, target)
    head.load_state_dict({name: stored[weight_name(name)].float() for name in head.state_dict()})
    return head


def save_draft(head: DraftHead, target: LlamaForCausalLM, directory: Path) -> None:
    """Write the head in the plain layout vLLM reads: safetensors and config.json."""
    directory.mkdir(parents=True, exist_ok=True)
    weights = {
        weight_name(name): value.to("cpu", torch.bfloat16).contiguous()
        for name, value in head.state_dict().items()
    }
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    source = target.config
    config = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_size": source.hidden_size,
        "target_hidden_size": source.hidden_size,
        "intermediate_size": source.intermediate_size,
        "num_hidden_layers": 1,
        "num_attention_heads": source.num_attention_heads,
        "num_key_value_heads": source.num_key_value_heads,
        "head_dim": source.head_dim,
        "hidden_act": "silu",
        "vocab_size": source.vocab_size,
        "draft_vocab_size": source.vocab_size,
        "max_position_embeddings": source.max_position_embeddings,
        "rms_norm_eps": source.rms_norm_eps,
        "rope_theta": 10000.0,
        "attention_bias": False,
        "tie_word_embeddings": False,
        "bos_token_id": source.bos_token_id,
        "eos_token_id": source.eos_token_id,
        "torch_dtype": "bfloat16",
        "fc_norm": True,
        "norm_output": True,
        "norm_before_fc": False,
        "norm_before_residual": False,
        "num_aux_hidden_states": 3,
        "eagle_aux_hidden_state_layer_ids": list(aux_layers(source)),
    }
    (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")

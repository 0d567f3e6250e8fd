"""
An EAGLE 3 or 3.1 head for training: one Llama layer over a target's hidden states.

EAGLE 3.1 is EAGLE 3 with an RMSNorm on each captured hidden state before they are fused (`fc_norm`) and
with the head's normed output fed to its next step (`norm_output`).  Layout and order of operations are
those of vLLM's `model_executor/models/llama_eagle3.py`, which serves this head.

Positions: row t takes the target's hidden states at t and the embedding of token t+1, has position t
and predicts token t+2.  Training-time test unrolls this: step j of row t has position t+j, takes the
embedding of token t+1+j and the head's own output of step j-1, and predicts token t+2+j.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from appliance.drafts.training.head_shape import HeadShape


class RmsNorm(nn.Module):
    def __init__(self, width: int, epsilon: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.epsilon = epsilon

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.epsilon)
        return (wide * scale * self.weight).to(x.dtype)


class StepCache:
    """Keys and values so far: row t attends to rows up to t of step 0, and to its own later steps."""

    def __init__(self, sliding_window: int | None = None) -> None:
        self._keys: list[Tensor] = []
        self._values: list[Tensor] = []
        self._sliding_window = sliding_window

    def append(self, key: Tensor, value: Tensor) -> None:
        """Add keys and values, [batch, heads, time, head_dim] each."""
        self._keys.append(key)
        self._values.append(value)

    def attend(self, query: Tensor) -> Tensor:
        time, scale = query.shape[2], query.shape[-1] ** -0.5
        scores = (query @ self._keys[0].transpose(-1, -2)) * scale
        hidden = self._hidden(time, query.device)
        scores = scores.float().masked_fill(hidden, float("-inf"))
        own = [((query * key).sum(-1, keepdim=True) * scale).float() for key in self._keys[1:]]
        weights = torch.cat([scores, *own], dim=-1).softmax(-1).to(query.dtype)
        mixed = weights[..., :time] @ self._values[0]
        for index, value in enumerate(self._values[1:]):
            mixed = mixed + weights[..., time + index : time + index + 1] * value
        return mixed

    def _hidden(self, time: int, device: torch.device) -> Tensor:
        """Rows of step 0 that a row must not attend to: later ones, and those outside its window."""
        hidden = torch.ones(time, time, dtype=torch.bool, device=device).triu(1)
        if self._sliding_window is not None:
            # Step j of row t has position t+j: the window has moved by j.
            reach = self._sliding_window - (len(self._keys) - 1)
            hidden = hidden | torch.ones_like(hidden).tril(-max(reach, 0))
        return hidden


class DraftHead(nn.Module):
    """Parameter names are the file's weight names without the layer's prefix."""

    def __init__(self, shape: HeadShape) -> None:
        super().__init__()
        self.shape = shape
        width, epsilon = shape.width, shape.epsilon
        fused = len(shape.aux_layers) * shape.target_width
        if shape.fc_norm:
            self.fc_norm = nn.ModuleList(RmsNorm(shape.target_width, epsilon) for _ in shape.aux_layers)
        if shape.norm_before_fc:
            self.input_norm = RmsNorm(fused, epsilon)
        self.fc = nn.Linear(fused, width, bias=False)
        self.input_layernorm = RmsNorm(width, epsilon)
        self.hidden_norm = RmsNorm(width, epsilon)
        self.q_proj = nn.Linear(2 * width, shape.heads * shape.head_dim, bias=False)
        self.k_proj = nn.Linear(2 * width, shape.kv_heads * shape.head_dim, bias=False)
        self.v_proj = nn.Linear(2 * width, shape.kv_heads * shape.head_dim, bias=False)
        self.o_proj = nn.Linear(shape.heads * shape.head_dim, width, bias=False)
        self.post_attention_layernorm = RmsNorm(width, epsilon)
        self.gate_proj = nn.Linear(width, shape.inner, bias=False)
        self.up_proj = nn.Linear(width, shape.inner, bias=False)
        self.down_proj = nn.Linear(shape.inner, width, bias=False)
        self.norm = RmsNorm(width, epsilon)
        self.lm_head = nn.Linear(width, shape.drafted, bias=False)
        self.proposes: Tensor | None = None
        """The target's token of each output; None if the head proposes all tokens."""
        self.embedding: Tensor | None = None
        """The head's own frozen token embedding; None if it uses the target's."""
        self._rotary = LlamaRotaryEmbedding(_rope_config(shape))

    def to_device(self, device: str) -> None:
        self.to(device)
        self.proposes = None if self.proposes is None else self.proposes.to(device)
        self.embedding = None if self.embedding is None else self.embedding.to(device)

    def fuse(self, captured: list[Tensor]) -> Tensor:
        """Fuse hidden states, [batch, time, target width] per aux layer, into [batch, time, width]."""
        if self.shape.norm_before_fc:
            joined = self.input_norm(torch.cat(captured, dim=-1))
        elif self.shape.fc_norm:
            joined = torch.cat([norm(x) for norm, x in zip(self.fc_norm, captured, strict=True)], dim=-1)
        else:
            joined = torch.cat(captured, dim=-1)
        fused: Tensor = self.fc(joined)
        return fused

    def step(
        self, hidden: Tensor, embeds: Tensor, positions: Tensor, cache: StepCache
    ) -> tuple[Tensor, Tensor]:
        """
        Take one draft step for every row; returns the input of `logits` and the next step's `hidden`.

        `hidden`, fused or fed back, `embeds` of the input tokens and both results are [batch, time, width].
        `positions`, [batch, time], are those of the rows in their texts.  The step is added to `cache`.
        """
        shape = self.shape
        batch, time, _ = hidden.shape
        normed = self.hidden_norm(hidden)
        residual = normed if shape.norm_before_residual else hidden
        mixed = torch.cat([self.input_layernorm(embeds), normed], dim=-1)
        cos, sin = self._rotary(mixed, positions)
        query = _rotate(self._heads(self.q_proj(mixed), shape.heads), cos, sin)
        key = _rotate(self._heads(self.k_proj(mixed), shape.kv_heads), cos, sin)
        value = self._heads(self.v_proj(mixed), shape.kv_heads)
        groups = shape.heads // shape.kv_heads
        cache.append(key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1))
        attended = cache.attend(query).transpose(1, 2).reshape(batch, time, shape.heads * shape.head_dim)
        residual = residual + self.o_proj(attended)
        x = self.post_attention_layernorm(residual)
        residual = residual + self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))
        output: Tensor = self.norm(residual)
        return output, output if shape.norm_output else residual

    def logits(self, output: Tensor) -> Tensor:
        """Float32 logits over the tokens it can propose."""
        raw: Tensor = self.lm_head(output)
        return raw.float() * self.shape.logit_scale

    def _heads(self, x: Tensor, count: int) -> Tensor:
        return x.view(x.shape[0], x.shape[1], count, self.shape.head_dim).transpose(1, 2)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate [batch, heads, time, head_dim] by [batch, time, head_dim]."""
    half = x.shape[-1] // 2
    turned = torch.cat([-x[..., half:], x[..., :half]], dim=-1)
    return x * cos.to(x.dtype)[:, None] + turned * sin.to(x.dtype)[:, None]


def _rope_config(shape: HeadShape) -> LlamaConfig:
    rope: dict[str, Any] = dict(shape.rope)
    return LlamaConfig(
        hidden_size=shape.width,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        max_position_embeddings=shape.positions,
        rope_parameters=rope,
    )

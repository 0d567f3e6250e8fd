"""Chooses the training backend."""

import math

from appliance.drafts.training.training_recipe import Backend
from appliance.errors import ConfigurationError
from appliance.serving.devices import Hardware
from appliance.serving.weights import Weights

LARGE_BYTES = 8 * 2**30
"""With a GPU, targets from this size on get a server of their own."""
BYTES_OF = {"F64": 8, "I64": 8, "F32": 4, "I32": 4, "F16": 2, "BF16": 2}
"""Bytes of a number by its type in a safetensors header; other types count as 1."""


def choose_backend(requested: str, device: str, target: Weights, machine: Hardware) -> Backend:
    """Choose a backend, or check the requested one."""
    if requested == "auto":
        is_large = device != "cpu" and machine.gpus > 0 and target_bytes(target) >= LARGE_BYTES
        return Backend.SPECULATORS if is_large else Backend.SMALL
    if requested not in set(Backend):
        raise ConfigurationError("--backend is auto, small or speculators")
    if requested == Backend.SPECULATORS and (device == "cpu" or machine.gpus == 0):
        raise ConfigurationError(
            "the backend speculators needs NVIDIA GPUs, and this machine has none: use --backend small"
        )
    return Backend(requested)


def target_bytes(target: Weights) -> int:
    return sum(BYTES_OF.get(info.dtype, 1) * math.prod(info.shape) for info in target.tensors.values())

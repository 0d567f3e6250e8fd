"""
Where to train, and where that may compute in bfloat16: on a GPU, and on a CPU that has the instructions.

On a CPU without them bfloat16 is emulated and three times slower than float32.
"""

import torch

from appliance.errors import ConfigurationError


def mixed_precision(device: str) -> torch.autocast:
    """A bfloat16 autocast region that is switched off where it would cost time."""
    return torch.autocast(device, dtype=torch.bfloat16, enabled=computes_in_bfloat16(device))


def computes_in_bfloat16(device: str) -> bool:
    """Whether a device has instructions for it."""
    return (
        device != "cpu" or torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()  # noqa: SLF001
    )


def choose_device(asked: str) -> str:
    """
    Return where to train: what was asked for, or a GPU where there is one.

    Raises:
        ConfigurationError: there is no GPU, and one was asked for.
    """
    has_gpu = torch.cuda.is_available()
    if asked == "cuda" and not has_gpu:
        raise ConfigurationError("torch finds no GPU here: say --device cpu")
    return "cuda" if asked != "cpu" and has_gpu else "cpu"

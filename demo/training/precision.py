"""
Where training may compute in bfloat16: on a GPU, and on a CPU that has the instructions.

On a CPU without them bfloat16 is emulated and three times slower than float32.
"""

import torch


def mixed_precision(device: str) -> torch.autocast:
    """A bfloat16 autocast region that is switched off where it would cost time."""
    native = device != "cpu" or torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()  # noqa: SLF001
    return torch.autocast(device, dtype=torch.bfloat16, enabled=native)

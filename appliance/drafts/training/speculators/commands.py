"""
The commands of a training with speculators 0.9.0.  Pure.

They pack the samples, serve the target's hidden states, and train against that server.  Sources:
`speculators/cli/prepare_data.py` and `speculators/train/config/schema.py` of the library, and
`vllm/config/speculative.py` (`extract_hidden_states`) of vLLM 0.32.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from appliance.drafts.training.training_recipe import TrainingRecipe

VERSION = "0.9.0"
HOST = "127.0.0.1"
SHARED_MEMORY = 0.45
"""Share of a GPU for the server if training uses the same GPU."""
OWN_MEMORY = 0.9
WARM_UP = 0.04
EAGLE31 = ("--fc-norm", "--no-norm-before-fc", "--norm-output")
"""Selects EAGLE 3.1; the library's default is EAGLE 3 with another norm."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    python: Path
    """Interpreter of an environment with the library and vLLM."""
    target: Path
    parent: Path | None
    """Directory of the draft to start from, in the library's format; None to start from scratch."""
    layers: tuple[int, ...]
    depth: int
    recipe: TrainingRecipe
    tokens: int
    """Tokens of all rows."""
    scratch: Path
    """Private directory for samples and hidden states."""
    checkpoints: Path
    port: int
    gpus: int

    @property
    def samples(self) -> Path:
        return self.scratch / "samples.jsonl"

    @property
    def packed(self) -> Path:
        return self.scratch / "packed"

    @property
    def hidden_states(self) -> Path:
        """Where the server writes hidden states; they are removed after reading."""
        return self.scratch / "hidden_states"

    @property
    def serving_gpus(self) -> tuple[int, ...]:
        return tuple(range(max(1, self.gpus // 2)))

    @property
    def training_gpus(self) -> tuple[int, ...]:
        """The other half of the GPUs, or the only one."""
        return tuple(range(self.gpus // 2, self.gpus)) if self.gpus > 1 else (0,)


def prepare_command(setup: Setup) -> list[str]:
    """Pack the samples; rows already have tokens and mask, so no server is needed."""
    recipe = setup.recipe
    return [
        *(str(setup.python), "-m", "speculators", "prepare-data"),
        *("--model", str(setup.target)),
        *("--data", str(setup.samples)),
        *("--output", str(setup.packed)),
        *("--seq-length", str(recipe.window)),
        *("--seed", str(recipe.seed)),
        *("--num-preprocessing-workers", "1"),
    ]


def server_command(setup: Setup) -> list[str]:
    """Serve the target's hidden states; this server generates nothing."""
    speculation = {
        "method": "extract_hidden_states",
        "num_speculative_tokens": 1,
        "draft_model_config": {
            # The last one is what the target's own output is computed from.
            "hf_config": {"eagle_aux_hidden_state_layer_ids": [*setup.layers, setup.depth]}
        },
    }
    transfer = {
        "kv_connector": "ExampleHiddenStatesConnector",
        "kv_role": "kv_producer",
        "kv_connector_extra_config": {"shared_storage_path": str(setup.hidden_states)},
    }
    memory = OWN_MEMORY if setup.gpus > 1 else SHARED_MEMORY
    longest = setup.recipe.window + 1
    return [
        *(str(setup.python), "-m", "vllm.entrypoints.openai.api_server"),
        *("--model", str(setup.target)),
        *("--host", HOST, "--port", str(setup.port)),
        *("--tensor-parallel-size", str(len(setup.serving_gpus))),
        *("--gpu-memory-utilization", str(memory)),
        *("--max-model-len", str(longest)),
        # A prompt has to be computed in one piece for its hidden states to be whole.
        *("--no-enable-chunked-prefill", "--max-num-batched-tokens", str(max(longest, 8192))),
        *("--speculative-config", json.dumps(speculation)),
        *("--kv-transfer-config", json.dumps(transfer)),
    ]


def train_command(setup: Setup) -> list[str]:
    count = len(setup.training_gpus)
    torchrun = ("-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={count}")
    launcher = ("-m", "speculators", "train") if count == 1 else (*torchrun, "-m", "speculators.train")
    return [str(setup.python), *launcher, *train_arguments(setup)]


def train_arguments(setup: Setup) -> list[str]:
    recipe, steps = setup.recipe, setup.recipe.steps or 1
    packed = recipe.batch * recipe.window
    passes = -(-steps * packed // max(1, setup.tokens)) + 1
    return [
        *("--verifier-name-or-path", str(setup.target)),
        *("--speculator-type", "eagle3"),
        *(("--from-pretrained", str(setup.parent)) if setup.parent else EAGLE31),
        *("--target-layer-ids", *map(str, setup.layers)),
        *("--data-path", str(setup.packed)),
        *("--hidden-states-path", str(setup.hidden_states)),
        *("--vllm-endpoint", f"http://{HOST}:{setup.port}/v1"),
        *("--on-missing", "generate"),
        *("--save-path", str(setup.checkpoints)),
        *("--total-seq-len", str(packed)),
        *("--train-data-ratio", "0.95"),
        *("--epochs", str(passes), "--max-steps", str(steps)),
        *("--checkpoint-freq", "0.1"),
        *("--ttt-steps", str(recipe.unroll)),
        *("--ttt-step-loss-decay", str(recipe.decay)),
        *("--optimizer", "adamw", "--lr", str(recipe.rate)),
        *("--scheduler-type", "cosine", "--scheduler-total-steps", str(steps)),
        *("--scheduler-warmup-ratio", str(WARM_UP)),
        *("--seed", str(recipe.seed)),
    ]


def private_places(scratch: Path) -> dict[str, str]:
    """
    Variables that keep copies of samples in the private directory.

    Otherwise `datasets`, which packs them, caches what it reads in the account's home
    (`datasets/config.py`), and temporary files go to the shared directory.
    """
    return {"HF_DATASETS_CACHE": str(scratch / "cache"), "TMPDIR": str(scratch / "tmp")}


def visible(gpus: Sequence[int]) -> dict[str, str]:
    return {"CUDA_VISIBLE_DEVICES": ",".join(map(str, gpus))}

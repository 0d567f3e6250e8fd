"""
Its commands, its format, and that samples in clear do not stay.

What the library itself makes of the arguments and the format: `test_training_library.py`.
"""

import json
import os
import stat
import struct
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from appliance.drafts.lint.lint import lint_pair
from appliance.drafts.lint.rules import Rule
from appliance.drafts.training.run_directory import RunDirectory, run_directory
from appliance.drafts.training.speculators.commands import (
    VERSION,
    prepare_command,
    private_places,
    server_command,
    train_arguments,
    train_command,
    visible,
)
from appliance.drafts.training.speculators.convert import convert_draft, speculators_config
from appliance.drafts.training.speculators.processes import processes_of
from appliance.drafts.training.speculators.scratch import (
    PREFIX,
    scratch_directory,
    sweep_scratch,
    write_samples,
)
from appliance.drafts.training.speculators.speculators_run import (
    last_checkpoint,
    row_mask,
    train_with_speculators,
)
from appliance.drafts.training.training_job import Job
from appliance.drafts.training.training_recipe import TrainingRecipe
from appliance.drafts.training.windows import TextWindow
from appliance.errors import ConfigurationError, DraftRefusedError
from appliance.infra.settings import DEMO_DRAFT, DEMO_TARGET
from appliance.serving.weights import inspect_weights
from tests.unit.drafts.lint.builder import eagle31, write
from tests.unit.drafts.training.library import SETUP


@dataclass
class Text:
    token_ids: tuple[int, ...]
    loss_mask: tuple[bool, ...]


JOB = Job(
    run="/runs/one",
    target=str(DEMO_TARGET),
    target_digest="sha256:" + "a" * 64,
    parent=None,
    parent_digest=None,
    dataset="sha256:" + "c" * 64,
    recipe=TrainingRecipe(steps=5),
)


def option(command: list[str], name: str) -> str:
    return command[command.index(name) + 1]


def test_draft_from_scratch_is_eagle31():
    """Both flags are passed, because the library's default differs."""
    arguments = train_arguments(SETUP)
    assert {"--fc-norm", "--no-norm-before-fc", "--norm-output"} <= set(arguments)
    assert "--from-pretrained" not in arguments


def test_refresh_starts_from_its_parent_and_keeps_its_shape():
    """Flags that shape a draft conflict with an existing one."""
    arguments = train_arguments(replace(SETUP, parent=Path("/drafts/runs/one/parent")))
    assert option(arguments, "--from-pretrained") == "/drafts/runs/one/parent"
    assert "--fc-norm" not in arguments


def test_server_and_training_agree_on_layers():
    """The server adds the last layer, which the training uses as the target's output."""
    speculation = json.loads(option(server_command(SETUP), "--speculative-config"))
    layers = speculation["draft_model_config"]["hf_config"]["eagle_aux_hidden_state_layer_ids"]
    assert layers == [2, 16, 29, 32]
    at = train_arguments(SETUP).index("--target-layer-ids")
    assert train_arguments(SETUP)[at + 1 : at + 4] == ["2", "16", "29"]
    assert train_arguments(SETUP)[at + 4].startswith("--")


def test_hidden_states_pass_through_the_private_directory():
    """Written by the server, read and removed by the training, kept by neither."""
    transfer = json.loads(option(server_command(SETUP), "--kv-transfer-config"))
    place = transfer["kv_connector_extra_config"]["shared_storage_path"]
    assert place == option(train_arguments(SETUP), "--hidden-states-path") == str(SETUP.hidden_states)
    assert option(train_arguments(SETUP), "--on-missing") == "generate"
    assert SETUP.hidden_states.parent == SETUP.samples.parent == SETUP.scratch


def test_no_copy_of_a_sample_is_kept_elsewhere():
    """The packing library's cache is in the private directory as well."""
    places = private_places(SETUP.scratch)
    assert set(places) == {"HF_DATASETS_CACHE", "TMPDIR"}
    assert all(Path(place).parent == SETUP.scratch for place in places.values())


def test_server_answers_on_loopback_and_whole_prompts():
    """Chunked prefill would return hidden states in pieces."""
    command = server_command(SETUP)
    assert option(command, "--host") == "127.0.0.1"
    assert option(train_arguments(SETUP), "--vllm-endpoint") == "http://127.0.0.1:8123/v1"
    assert "--no-enable-chunked-prefill" in command
    assert int(option(command, "--max-num-batched-tokens")) >= int(option(command, "--max-model-len")) > 1024


@pytest.mark.parametrize("gpus", range(1, 9))
def test_gpus_are_divided(gpus):
    """Server and training share a GPU only if there is one."""
    setup = replace(SETUP, gpus=gpus)
    serving, training = set(setup.serving_gpus), set(setup.training_gpus)
    assert serving | training == set(range(gpus))
    assert bool(serving & training) == (gpus == 1)
    assert visible((1, 2)) == {"CUDA_VISIBLE_DEVICES": "1,2"}
    memory = float(option(server_command(setup), "--gpu-memory-utilization"))
    assert memory < 0.5 or gpus > 1
    assert ("torch.distributed.run" in train_command(setup)) == (len(training) > 1)


def test_epochs_suffice_for_the_steps():
    for tokens in (100, 10_000, 10_000_000):
        arguments = train_arguments(replace(SETUP, tokens=tokens))
        assert int(option(arguments, "--epochs")) * tokens >= 500 * 8 * 1024
        assert option(arguments, "--max-steps") == "500"


def test_samples_are_packed_unchanged():
    """Tokens and mask exist already, so no server renders anything."""
    command = prepare_command(SETUP)
    assert "--render-endpoint" not in command
    assert option(command, "--seq-length") == "1024"


def tensors_of(file: Path) -> dict[str, tuple[str, list[int], bytes]]:
    """Type, shape and bytes of each tensor, read apart from the code under test."""
    content = file.read_bytes()
    length = int.from_bytes(content[:8], "little")
    assert (8 + length) % 8 == 0
    entries = json.loads(content[8 : 8 + length])
    entries.pop("__metadata__", None)
    body = content[8 + length :]
    return {
        name: (entry["dtype"], entry["shape"], body[slice(*entry["data_offsets"])])
        for name, entry in entries.items()
    }


def test_conversion_changes_no_number(tmp_path):
    """Every tensor keeps its bytes; the target's embedding is added."""
    target = inspect_weights(DEMO_TARGET)
    convert_draft(DEMO_DRAFT, target, tmp_path / "converted")
    before = tensors_of(DEMO_DRAFT / "model.safetensors")
    after = tensors_of(tmp_path / "converted" / "model.safetensors")
    embedding = after.pop("embed_tokens.weight")
    assert after == {name.replace("midlayer.", "layers.0."): tensor for name, tensor in before.items()}
    assert embedding == tensors_of(DEMO_TARGET / "model.safetensors")["model.embed_tokens.weight"]
    findings = lint_pair(target, inspect_weights(tmp_path / "converted"))
    assert {finding.rule for finding in findings} <= {Rule.SPECULATORS_VERIFIER}
    config = speculators_config(inspect_weights(DEMO_DRAFT).config, target)
    assert speculators_config(config, target) == config


def test_smaller_vocabulary_has_maps_in_both_directions(tmp_path):
    """The library needs to know which target tokens the draft knows; vLLM does not."""
    target = inspect_weights(DEMO_TARGET)
    draft = tmp_path / "draft"
    draft.mkdir()
    offsets = [0, 1, 1, 5]
    header = {
        "d2t": {"dtype": "I64", "shape": [4], "data_offsets": [0, 32]},
        "midlayer.hidden_norm.weight": {"dtype": "BF16", "shape": [2], "data_offsets": [32, 36]},
    }
    encoded = json.dumps(header).encode()
    body = struct.pack("<4q", *offsets) + b"abcd"
    (draft / "model.safetensors").write_bytes(len(encoded).to_bytes(8, "little") + encoded + body)
    config = {**json.loads((DEMO_DRAFT / "config.json").read_text()), "draft_vocab_size": 4}
    (draft / "config.json").write_text(json.dumps(config))
    convert_draft(draft, target, tmp_path / "converted")
    made = tensors_of(tmp_path / "converted" / "model.safetensors")
    dtype, shape, known = made["t2d"]
    assert (dtype, shape) == ("BOOL", [2048])
    assert [place for place, is_known in enumerate(known) if is_known] == [0, 2, 3, 8]
    assert made["layers.0.hidden_norm.weight"] == ("BF16", [2], b"abcd")
    assert made["d2t"][2] == body[:32]


def test_kind_the_library_cannot_train_is_refused(tmp_path):
    target, draft = write(eagle31(), tmp_path)
    config = {**draft.config, "architectures": ["Eagle3DeepseekV2ForCausalLM"]}
    with pytest.raises(DraftRefusedError, match="mla"):
        speculators_config(config, target)


def test_row_mask_follows_the_librarys_convention(tmp_path):
    """It predicts the token after t+1 from token t+1, under the mask of token t+1."""
    text = Text(tuple(range(8)), (False, False, False, True, True, True, False, True))
    assert row_mask(text, TextWindow(0, 0, 8, 0)) == [0, 0, 1, 1, 1, 0, 1, 0]
    assert row_mask(text, TextWindow(0, 2, 6, 4)) == [0, 1, 1, 0]


def test_clear_samples_are_private_and_removed(tmp_path):
    """Directory and files are the owner's alone, and removed when the block ends."""
    run = run_directory(tmp_path, JOB.identity, "one")
    with run.locked():
        with suppress(RuntimeError), scratch_directory(run, tmp_path) as scratch:
            assert stat.S_IMODE(scratch.stat().st_mode) == 0o700
            write_samples(scratch / "samples.jsonl", ["a\n", "b\n"])
            assert stat.S_IMODE((scratch / "samples.jsonl").stat().st_mode) == 0o600
            assert (scratch / "samples.jsonl").read_text() == "a\nb\n"
            raise RuntimeError
        assert not scratch.exists()
        with scratch_directory(run) as scratch:
            assert scratch.name.startswith(PREFIX)
        assert not scratch.exists()


def test_what_a_killed_training_left_is_removed_by_the_next(tmp_path):
    killed, alive = (run_directory(tmp_path, JOB.identity, name) for name in ("killed", "alive"))
    code = (
        "import os, signal\n"
        "from pathlib import Path\n"
        "from appliance.drafts.training.run_directory import RunDirectory\n"
        "from appliance.drafts.training.speculators.scratch import scratch_directory, write_samples\n"
        f"run = RunDirectory(path=Path({str(killed.path)!r}))\n"
        f"with run.locked(), scratch_directory(run, Path({str(tmp_path)!r})) as scratch:\n"
        "    write_samples(scratch / 'samples.jsonl', ['secret'])\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == -9
    (left,) = tmp_path.glob(f"{PREFIX}*")
    assert (left / "samples.jsonl").read_text() == "secret"
    with alive.locked(), scratch_directory(alive, tmp_path) as own:
        sweep_scratch(tmp_path)
        assert not left.exists()
        assert own.exists()
    sweep_scratch(tmp_path)
    assert not list(tmp_path.glob(f"{PREFIX}*"))


def test_only_scratch_directories_are_removed(tmp_path):
    """A note that names another directory removes nothing."""
    run = run_directory(tmp_path, JOB.identity, "one")
    with run.locked():
        precious = tmp_path / "precious"
        precious.mkdir()
        (run.path / "scratch.json").write_text(json.dumps({"path": str(precious)}))
    sweep_scratch(tmp_path)
    assert precious.is_dir()


def test_newest_checkpoint_is_taken(tmp_path):
    """By number, not by name; links and incomplete ones are skipped."""
    for name in ("2", "10", "9"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.safetensors").touch()
    (tmp_path / "11").mkdir()
    (tmp_path / "12").symlink_to(tmp_path / "2")
    (tmp_path / "interrupted").mkdir()
    assert last_checkpoint(tmp_path) == tmp_path / "10"
    with pytest.raises(DraftRefusedError, match="no checkpoint"):
        last_checkpoint(tmp_path / "none")


def begin(python: Path, recipe: TrainingRecipe) -> None:
    run = RunDirectory(path=Path("/nowhere"))
    environment = {"PATH": os.environ["PATH"]}
    train_with_speculators(
        replace(JOB, recipe=recipe), run, (), python=python, environment=environment, say=lambda _: None
    )


def test_environment_without_the_library_is_one_line(tmp_path):
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho 0.8.1\n")
    python.chmod(0o755)
    with pytest.raises(ConfigurationError, match=f"speculators 0.8.1, and needs {VERSION}"):
        begin(python, TrainingRecipe(steps=5))
    python.write_text("#!/bin/sh\nexit 1\n")
    with pytest.raises(ConfigurationError, match="no speculators, or no vLLM"):
        begin(python, TrainingRecipe(steps=5))
    with pytest.raises(ConfigurationError, match="cannot run"):
        begin(tmp_path / "absent", TrainingRecipe(steps=5))
    with pytest.raises(ConfigurationError, match="--steps"):
        begin(python, TrainingRecipe(steps=None, minutes=3.0))


def test_its_processes_end_with_the_block(tmp_path):
    with (tmp_path / "log").open("w") as log, processes_of(log, {"PATH": os.environ["PATH"]}) as processes:
        sleeper = processes.start(
            ["/bin/sh", "-c", "sleep 300 & echo $! > " + str(tmp_path / "pid") + "; wait"], ()
        )
        said = "echo 'ValueError: token 7 of the patient'; exit 3"
        failing = processes.start(["/bin/sh", "-c", said], ())
        with pytest.raises(DraftRefusedError, match=r"^it ended with status 3 \(ValueError\); run the same"):
            processes.finish(failing, "it")
        while not (tmp_path / "pid").exists() or not (tmp_path / "pid").read_text().strip():
            time.sleep(0.01)
        assert sleeper.poll() is None
    assert sleeper.poll() is not None
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)

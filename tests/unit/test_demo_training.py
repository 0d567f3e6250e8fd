"""
Training of a demo pair that is stopped and resumed ends with the weights of one that was not.
"""

import pytest
import torch
from transformers import LlamaForCausalLM

from demo.training import draft
from demo.training.draft import DraftRecipe, train_draft
from demo.training.target import TargetRecipe, TargetSize, save_target, target_config, train_target

SIZE = TargetSize(layers=4, width=32, inner=48, heads=2, kv_heads=1, vocabulary=300)
RECIPE = TargetRecipe(steps=8, batch=2, window=16)
IDS = torch.randint(SIZE.vocabulary, (6000,), generator=torch.Generator().manual_seed(5))


@pytest.fixture(autouse=True)
def one_thread():
    """Threads that wait for each other take minutes on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def no_report(step: int, steps: int, text: str) -> None:
    pass


def after(calls: int):
    """A stop after so many questions whether to stop."""
    left = iter(range(calls))
    return lambda: next(left, None) is None


def resumed(train, calls: int):
    """The result of a training in slices, and how many there were."""
    for number in range(1, 20):
        if result := train(after(calls)):
            return result, number
    raise AssertionError("the training never ends")


def test_resumed_target_equals_an_uninterrupted_one(tmp_path):
    config = target_config(0, 1, SIZE)
    whole = train_target(IDS, config, RECIPE, no_report, "cpu")
    parts, slices = resumed(
        lambda stop: train_target(IDS, config, RECIPE, no_report, "cpu", tmp_path, stop), calls=3
    )
    assert slices == 3
    for name, value in whole.state_dict().items():
        assert torch.equal(value, parts.state_dict()[name]), name


def test_resumed_draft_equals_an_uninterrupted_one(tmp_path, monkeypatch):
    """Over two rounds, the second on text of the target that is generated once, with stops in both."""
    generated = []

    def write(ids, target, window, *_more):
        generated.append(target)
        return IDS[: 4 * window].view(4, window)

    monkeypatch.setattr(draft, "WINDOW", 24)
    monkeypatch.setattr(draft, "write_continuations", write)
    target_at = tmp_path / "target"
    torch.manual_seed(3)
    save_target(LlamaForCausalLM(target_config(0, 1, SIZE)), target_at)
    recipe = DraftRecipe(steps=5, batch=2)
    (run := tmp_path / "run").mkdir()

    def train(name: str, *more) -> bool:
        target = LlamaForCausalLM.from_pretrained(target_at)
        arguments = (IDS, target, target_at, tmp_path / name, recipe, lambda _label: no_report, "cpu")
        return train_draft(*arguments, *more)

    assert train("whole")
    _finished, slices = resumed(lambda stop: train("parts", run, stop), calls=3)
    assert slices == 4
    assert len(generated) == 2
    whole, parts = (tmp_path / name / "model.safetensors" for name in ("whole", "parts"))
    assert whole.read_bytes() == parts.read_bytes()

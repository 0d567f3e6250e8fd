"""Finished steps on disk survive, belong to one evaluation, and contain no content."""

import json
import subprocess
import sys

import pytest

from appliance.drafts.evaluation.arms import Arm, Mode
from appliance.drafts.evaluation.equality import LikelyToken, near_tokens, trail_of
from appliance.drafts.evaluation.evaluation_results import PromptResult, StepResult, StepTotals
from appliance.drafts.evaluation.store import FinishedSteps, evaluation_lock
from appliance.errors import DraftRefusedError, DraftStorageError
from tests.unit.drafts.evaluation.evaluation_parts import prompt

ASKED = prompt(token_ids=(41_001, 41_002, 41_003))
SAID = (52_001, 52_002)


def result(number: int = 0, arm: Arm = Arm.CANDIDATE) -> StepResult:
    choices = [[LikelyToken(token_id=53_000 + place, gap=0.25)] for place in range(2)]
    return StepResult(
        arm=arm,
        number=number,
        answered=(
            PromptResult(
                prompt=number,
                mode=Mode.GREEDY,
                tokens=2,
                drafts=3,
                draft_tokens=9,
                accepted=4,
                accepted_at=(2, 1, 1),
                trail=trail_of(ASKED, SAID),
                near=near_tokens(ASKED, SAID, choices, epsilon=1.0),
            ),
        ),
        paces=(StepTotals(batch=4, draft_tokens=3, steps=7, seconds=0.1, requests=28, tokens=60),),
    )


def test_finished_steps_are_read_back(tmp_path):
    work = FinishedSteps(tmp_path / "work", {"prompts": 8})
    assert work.open() == ()
    kept = [result(0), result(1), result(0, Arm.TARGET)]
    for each in kept:
        work.keep(each)
    found = FinishedSteps(tmp_path / "work", {"prompts": 8}).open()
    assert sorted(found, key=repr) == sorted(kept, key=repr)


def test_steps_of_another_evaluation_are_deleted(tmp_path):
    """With other prompts, weights or settings."""
    FinishedSteps(tmp_path / "work", {"prompts": 8}).open()
    other = FinishedSteps(tmp_path / "work", {"prompts": 8})
    other.keep(result())
    assert FinishedSteps(tmp_path / "work", {"prompts": 9}).open() == ()
    assert FinishedSteps(tmp_path / "work", {"prompts": 8}).open() == ()


@pytest.mark.parametrize("content", [b"", b"{}", b"\xff\xfe", b"[1, 2]", None])
def test_damaged_step_is_deleted_and_measured_again(tmp_path, content):
    work = FinishedSteps(tmp_path / "work", {})
    work.open()
    work.keep(result())
    (path,) = (tmp_path / "work").glob("*/*.json")
    path.write_bytes(path.read_bytes()[:-9] if content is None else content)
    assert work.open() == ()
    assert not path.exists()


def test_step_files_contain_no_content(tmp_path):
    work = FinishedSteps(tmp_path / "work", {})
    work.open()
    work.keep(result())
    (path,) = (tmp_path / "work").glob("*/*.json")
    text = path.read_text()
    assert not any(str(token) in text for token in (*ASKED.token_ids, *SAID, 53_000, 53_001))
    assert ASKED.salt not in json.loads(text)["answered"][0].values()
    assert path.stat().st_mode & 0o077 == 0


def test_clear_deletes_all_steps(tmp_path):
    work = FinishedSteps(tmp_path / "work", {})
    work.open()
    work.keep(result())
    work.clear()
    assert not (tmp_path / "work").exists()
    work.clear()


def test_unusable_directory_raises_draft_storage_error(tmp_path):
    (tmp_path / "work").write_text("a file in the way")
    with pytest.raises(DraftStorageError, match=r"work.*run this again"):
        FinishedSteps(tmp_path / "work", {}).open()


def test_lock_is_exclusive_and_released_by_a_kill(tmp_path):
    place = tmp_path / "draft"
    with (
        evaluation_lock(place),
        pytest.raises(DraftRefusedError, match="another process"),
        evaluation_lock(place),
    ):
        pass
    program = (
        "import os, pathlib, signal\n"
        "from appliance.drafts.evaluation.store import evaluation_lock\n"
        f"with evaluation_lock(pathlib.Path({str(place)!r})):\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False, timeout=60).returncode == -9
    with evaluation_lock(place):
        pass

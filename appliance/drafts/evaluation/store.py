"""
Reports on the disk, one directory a candidate, beside the registry's other things.

    D/evaluations/<64 hex of draft>/report.json, report.html

The page is written first: whoever finds report.json finds the page that belongs to it, or a newer one.
"""

import re
from pathlib import Path

from appliance.drafts.evaluation.report import Evaluation
from appliance.drafts.evaluation.work import storing
from appliance.errors import DraftNotFoundError, DraftRefusedError
from appliance.infra.files import write_private
from appliance.speculation.values import Expectation

EVALUATIONS, REPORT, PAGE = "evaluations", "report.json", "report.html"
DIGEST = re.compile(r"sha256:([0-9a-f]{64})", re.ASCII)


def evaluation_directory(directory: Path, draft: str) -> Path:
    """
    Where the evaluation of a draft lies.

    Args:
        directory: of the registry.
        draft: digest of the draft.

    Raises:
        DraftNotFoundError: that is no digest.
    """
    found = DIGEST.fullmatch(draft)
    if found is None:
        raise DraftNotFoundError(f"{draft!r} is no digest of a draft: it is sha256: and 64 hex digits")
    return directory / EVALUATIONS / found[1]


def load_evaluation(directory: Path, draft: str) -> Evaluation | None:
    """
    Read the latest report about a draft; None where there is none.

    Args:
        directory: of the registry.
        draft: digest of the draft.

    Raises:
        DraftRefusedError: the report was altered, or is about another draft.
        DraftStorageError: it cannot be read.
    """
    path = evaluation_directory(directory, draft) / REPORT
    with storing(path):
        try:
            content = path.read_bytes()
        except FileNotFoundError:
            return None
    evaluation = Evaluation.decode(content, str(path))
    if evaluation.draft != draft:
        raise DraftRefusedError(f"{path} is about another draft: evaluate this one again")
    return evaluation


def load_measured(directory: Path, draft: str, target: str) -> dict[str, Expectation]:
    """
    What an evaluation measured a draft to accept, by kind of traffic; nothing where none was completed.

    Args:
        directory: of the registry.
        draft: digest of the draft.
        target: digest of the target it has to have been evaluated with.

    Raises:
        DraftRefusedError: the report was altered, or is about another draft.
        DraftStorageError: it cannot be read.
    """
    evaluation = load_evaluation(directory, draft)
    if evaluation is None or not evaluation.complete or evaluation.target != target:
        return {}
    return evaluation.expectations


def save_evaluation(directory: Path, evaluation: Evaluation, page: str) -> Path:
    """
    Put a report in the place of an earlier one, and return where it is; it survives a crash.

    Args:
        directory: of the registry.
        evaluation: the report.
        page: the same for people, as HTML.

    Raises:
        DraftStorageError: it cannot be written.
    """
    place = evaluation_directory(directory, evaluation.draft)
    with storing(place):
        place.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_private(place / PAGE, page)
        write_private(place / REPORT, evaluation.encode().decode())
    return place / REPORT

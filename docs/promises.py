"""
What README, SECURITY.md and docs/explanation promise, and the tests that fail if it stops being true.

`promises.yaml` quotes each promise from its page.  At the end of `make test`, `python -m docs.promises DIR`
checks that every test it names has passed in that run; the tests write their names to DIR.
"""

import os
import re
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml

ROOT = Path(__file__).parents[1]
LIST = Path(__file__).parent / "promises.yaml"


@dataclass(frozen=True, slots=True, kw_only=True)
class Promise:
    text: str
    """As the page has it, without markup."""
    tests: tuple[str, ...]
    """`path::name`, without parameters."""
    context: str = ""
    """What the page says before it, where the text alone could be misread: the row and column of a table."""
    needs: str = ""
    """A program without which its tests skip, also in CI."""


def load_promises() -> Mapping[str, Sequence[Promise]]:
    """Promises by page."""
    pages = yaml.safe_load(LIST.read_text(encoding="utf-8"))
    return {
        page: [
            Promise(
                text=entry["promise"],
                tests=tuple(entry["tests"]),
                context=entry.get("context", ""),
                needs=entry.get("needs", ""),
            )
            for entry in entries
        ]
        for page, entries in pages.items()
    }


def plain(markdown: str) -> str:
    """Text without links, emphasis and line breaks."""
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", markdown)
    return " ".join(re.sub(r"[*`]|^[>#|-]+ ", "", text, flags=re.MULTILINE).split())


def promises_page(note: str) -> str:
    lines = [
        "# Promises",
        "",
        note,
        "Each promise of README, SECURITY.md and the explanations, and the tests that fail if it is broken.",
        "`make test` ends with a check that all of these tests have passed in that run.",
    ]
    for page, promises in load_promises().items():
        title = f"[{page}](../../{page})"
        lines += ["", f"## {title}", "", "| Promise | Test |", "|---|---|"]
        for promise in promises:
            tests = "<br>".join(f"`{test}`" for test in promise.tests)
            text = f"*{promise.context}* {promise.text}" if promise.context else promise.text
            lines.append(f"| {text.replace('|', chr(92) + '|')} | {tests} |")
    return "\n".join(lines) + "\n"


def not_passed(passed: Path) -> list[str]:
    """Tests of the list that no file below `passed` names."""
    ran = {line for file in passed.iterdir() for line in file.read_text(encoding="utf-8").splitlines()}
    shown = (
        promise
        for promises in load_promises().values()
        for promise in promises
        if not promise.needs or shutil.which(promise.needs, path=f"{os.environ['PATH']}:/usr/local/go/bin")
    )
    return sorted({test for promise in shown for test in promise.tests} - ran)


def main(arguments: Sequence[str]) -> int:
    if not arguments or not arguments[0]:
        sys.stderr.write("`make test` runs this at its end, with the names of the tests that passed\n")
        return 2
    missing, is_strict = not_passed(Path(arguments[0])), os.environ.get("CI") == "true"
    # Elsewhere a tool may be missing, and its tests are skipped.
    word = "FAILED" if is_strict else "SKIPPED"
    for test in missing:
        sys.stderr.write(f"{word}: docs/promises.yaml names {test}, which has not passed in this run\n")
    return int(is_strict and bool(missing))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

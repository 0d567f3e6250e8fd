"""
Text to train the demo pair on: the source of Python's own standard library.

Every machine that can run the build has this text, so nothing is downloaded and no licence but
the PSF's is involved.  Files are split into training and held-out text by a hash of their
relative path, so the split is the same wherever the library is installed.
"""

import ast
import hashlib
import sysconfig
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

HELD_OUT_PERCENT = 4
SKIPPED_PARTS = frozenset(
    {"site-packages", "test", "tests", "idle_test", "__pycache__", "lib2to3", "turtledemo", "encodings"}
)
SKIPPED_FILES = frozenset({"topics.py", "_pydecimal.py", "this.py"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Corpus:
    """Documents as text; `dialogues` are (request, answer) pairs cut out of the training files."""

    training: list[str]
    held_out: list[str]
    dialogues: list[tuple[str, str]]


def load_corpus(root: Path | None = None) -> Corpus:
    """Read the standard library below `root` (default: this interpreter's)."""
    training: list[str] = []
    held_out: list[str] = []
    dialogues: list[tuple[str, str]] = []
    for relative, text in _sources(root or Path(sysconfig.get_path("stdlib"))):
        digest = hashlib.sha256(relative.encode()).digest()
        if digest[0] * 100 // 256 < HELD_OUT_PERCENT:
            held_out.append(text)
        else:
            training.append(text)
            dialogues.extend(_dialogues(text))
    return Corpus(training=training, held_out=held_out, dialogues=dialogues)


def held_out_prompts(corpus: Corpus, *, count: int, characters: int = 600) -> list[str]:
    """Cut `count` prompts of about `characters` from held-out files, each ending at a line's end."""
    prompts: list[str] = []
    stride = 4 * characters
    for offset in range(0, 40 * stride, stride):
        for text in corpus.held_out:
            piece = text[offset : offset + characters]
            cut = piece.rfind("\n")
            if cut > characters // 2:
                prompts.append(piece[: cut + 1])
            if len(prompts) == count:
                return prompts
    return prompts


def _sources(root: Path) -> Iterator[tuple[str, str]]:
    for path in sorted(root.rglob("*.py")):
        relative = path.relative_to(root)
        if SKIPPED_PARTS.intersection(relative.parts) or path.name in SKIPPED_FILES:
            continue
        try:
            yield relative.as_posix(), path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue


def _dialogues(text: str) -> Iterator[tuple[str, str]]:
    """Turn every short documented function into "asked for this, wrote that"."""
    try:
        tree = ast.parse(text)
    except SyntaxError:
        return
    lines = text.split("\n")
    for node in ast.walk(tree):
        if not isinstance(node, ast.FunctionDef):
            continue
        docstring = ast.get_docstring(node)
        source = textwrap.dedent("\n".join(lines[node.lineno - 1 : node.end_lineno]))
        if not docstring or len(source) > 1500:
            continue
        summary = " ".join(docstring.split("\n\n")[0].split())
        yield f"Write a Python function `{node.name}`. {summary}", source

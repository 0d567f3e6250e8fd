"""
What a drill sends: source code, which a draft trained on code predicts well, and noise, which none can.
"""

import json
import secrets
from collections.abc import Callable, Sequence
from importlib.machinery import SourceFileLoader
from importlib.util import find_spec
from itertools import cycle
from pathlib import Path

from appliance.errors import ConfigurationError

PIECE_CHARACTERS = 600
MODULES = (
    "argparse",
    "configparser",
    "csv",
    "difflib",
    "fractions",
    "shutil",
    "statistics",
    "textwrap",
    "zipfile",
)
"""Of the standard library; their source is read, they are not imported."""


def code_prompts() -> tuple[str, ...]:
    """
    Pieces of the standard library's source, of about 600 characters, each beginning with a line.

    Raises:
        ConfigurationError: this Python comes without its source.
    """
    pieces = [piece for name in MODULES for piece in cut(_source(name))]
    if not pieces:
        message = "this Python has no source of its standard library: give prompts of your own with --prompts"
        raise ConfigurationError(message)
    return tuple(pieces)


def file_prompts(path: Path) -> tuple[str, ...]:
    """
    Prompts from a file, one to a line: a JSON string, or the line as it is.

    Raises:
        ConfigurationError: it cannot be read, or has no prompt.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        message = f"cannot read the prompts {path}: {error}"
        raise ConfigurationError(message) from error
    prompts = tuple(prompt for line in lines if (prompt := _line(line)).strip())
    if not prompts:
        message = f"the file {path} has no prompts: write one to a line"
        raise ConfigurationError(message)
    return prompts


def cut(text: str) -> tuple[str, ...]:
    """Cut a text into pieces of whole lines, each ended by the line that makes it long enough."""
    pieces, piece = [], ""
    for line in text.splitlines(keepends=True):
        piece += line
        if len(piece) >= PIECE_CHARACTERS:
            pieces.append(piece)
            piece = ""
    return tuple(pieces)


def in_turn(prompts: Sequence[str]) -> Callable[[], str]:
    """One prompt after the other, from the start again after the last."""
    turn = cycle(prompts)
    return lambda: next(turn)


def noise() -> str:
    """Random hexadecimal digits: no two prompts share a beginning that could be cached."""
    return secrets.token_hex(PIECE_CHARACTERS // 2)


def _line(line: str) -> str:
    if line.startswith('"'):
        try:
            value = json.loads(line)
        except ValueError:
            return line
        return value if isinstance(value, str) else line
    return line


def _source(name: str) -> str:
    spec = find_spec(name)
    loader = spec.loader if spec is not None else None
    return (loader.get_source(name) if isinstance(loader, SourceFileLoader) else None) or ""

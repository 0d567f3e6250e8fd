"""
General text that is mixed in, so that a draft does not forget what the data set does not show.
"""

from dataclasses import dataclass
from pathlib import Path

from transformers import AutoTokenizer

from appliance.errors import ConfigurationError

DOCUMENT_CHARACTERS = 8000
"""Length that longer texts are tokenised and trained on in."""


@dataclass(frozen=True, slots=True)
class Document:
    """A piece of general text; every token of it counts."""

    token_ids: list[int]

    @property
    def loss_mask(self) -> list[bool]:
        """All true."""
        return [True] * len(self.token_ids)


def read_corpus(file: Path, target: Path) -> list[Document]:
    """
    Read a file of plain text and tokenise it as the target does.

    Raises:
        ConfigurationError: it is no text, or the target has no tokenizer in its directory.
    """
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"cannot read the corpus {file}: {error}") from error
    try:
        tokenizer = AutoTokenizer.from_pretrained(target, local_files_only=True)
    except (OSError, ValueError) as error:
        first = str(error).partition("\n")[0]
        raise ConfigurationError(f"the tokenizer in {target} cannot be loaded: {first}") from error
    pieces = [text[at : at + DOCUMENT_CHARACTERS] for at in range(0, len(text), DOCUMENT_CHARACTERS)]
    documents = [Document(ids) for piece in pieces if (ids := tokenizer(piece)["input_ids"])]
    if not documents:
        raise ConfigurationError(f"the corpus {file} is empty")
    return documents

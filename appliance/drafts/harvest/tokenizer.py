"""
The target's own tokenizer, asked in a process of its own.

The engine's libraries are imported there and nowhere else.  Content goes over pipes, never on a
command line or into a file.  Fails closed: a child that dies or is silent ends the harvest.
"""

import hashlib
import json
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from threading import Timer
from typing import Any

from appliance.drafts.harvest.conversation import Conversation
from appliance.drafts.harvest.reasons import Skipped
from appliance.errors import ConfigurationError, DraftRefusedError, DraftStorageError
from appliance.serving.weights import DIGESTED_SUFFIXES

CHILD = "appliance.drafts.harvest.tokenizer_child"
LOAD_SECONDS = 600.0
ANSWER_SECONDS = 120.0
"""Both are generous: nobody waits for a harvest, and the machine serves meanwhile."""
NO_TOKENIZER = frozenset({"config.json", "generation_config.json", "training.json", "hf_quant_config.json"})
"""Files of a model that do not decide how text becomes tokens."""

Tokens = tuple[tuple[int, ...], tuple[int, ...]]
"""Of prompt and answer."""


class TargetTokenizer:
    """One child that has loaded a tokenizer; made by `open_tokenizer`."""

    def __init__(self, child: subprocess.Popen[str]) -> None:
        self._child = child

    def tokenize(
        self, conversation: Conversation, *, prompt_tokens: int, completion_tokens: int
    ) -> Tokens | Skipped:
        """
        Return the tokens the worker saw, or why they cannot be told.

        Args:
            conversation: request and answer.
            prompt_tokens: how many the worker counted.
            completion_tokens: likewise, the last token included.

        Raises:
            DraftStorageError: the child ended, or is silent.
        """
        answer = conversation.answer
        job = {
            **asdict(conversation.asked),
            "answer": answer.text,
            "end": answer.end,
            "stop": answer.stop,
            "prompt_tokens": prompt_tokens,
            "completion_tokens": completion_tokens,
        }
        said = self.ask(json.dumps(job), ANSWER_SECONDS)
        if "skipped" in said:
            return Skipped(said["skipped"])
        return tuple(said["prompt"]), tuple(said["answer"])

    def ask(self, line: str | None, seconds: float) -> dict[str, Any]:
        """Send a line, if there is one, and return what comes back; raises DraftStorageError."""
        child = self._child
        assert child.stdin is not None  # noqa: S101 - it was started with pipes
        assert child.stdout is not None  # noqa: S101 - as above
        watchdog = Timer(seconds, child.kill)
        watchdog.start()
        try:
            if line is not None:
                child.stdin.write(line + "\n")
                child.stdin.flush()
            answer = child.stdout.readline()
            return dict(json.loads(answer))
        except (OSError, ValueError, TypeError) as error:
            raise DraftStorageError(
                f"the process with the target's tokenizer ended, or said nothing for {seconds:g} s: try again"
            ) from error
        finally:
            watchdog.cancel()


@contextmanager
def open_tokenizer(target: Path, environment: Mapping[str, str]) -> Iterator[TargetTokenizer]:
    """
    Load the tokenizer of a target, for as long as the context lasts.

    Args:
        target: directory of its weights.
        environment: of the child; see `sovereignty.environment.offline_environment`.

    Raises:
        DraftRefusedError: it cannot be loaded.
        DraftStorageError: the child cannot be started.
    """
    try:
        child = subprocess.Popen(  # noqa: S603 - our own module, by a list of arguments
            [sys.executable, "-m", CHILD, str(target)],
            env=dict(environment),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            encoding="utf-8",
        )
    except OSError as error:
        raise DraftStorageError(f"cannot start a process for the tokenizer: {error.strerror}") from error
    try:
        tokenizer = TargetTokenizer(child)
        problem = tokenizer.ask(None, LOAD_SECONDS).get("problem")
        if problem:
            where = "; run this where the engine is installed" if problem.startswith("ModuleNot") else ""
            raise DraftRefusedError(f"the tokenizer in {target} cannot be loaded: {problem}{where}")
        yield tokenizer
    finally:
        child.kill()
        for pipe in (child.stdin, child.stdout):
            with suppress(OSError):
                pipe.close()  # type: ignore[union-attr]
        child.wait()


def digest_tokenizer(target: Path) -> str:
    """
    Digest what decides how text becomes tokens: tokenizer files and chat template.

    Made as `serving.weights.digest_weights` makes its own, of fewer files.

    Raises:
        ConfigurationError: a file cannot be read.
    """
    listing = hashlib.sha256()
    try:
        files = sorted(
            (
                file
                for file in target.iterdir()
                if file.suffix in DIGESTED_SUFFIXES - {".safetensors"}
                and file.name not in NO_TOKENIZER
                and not file.name.endswith(".index.json")
                and file.is_file()
            ),
            key=lambda file: file.name.encode(),
        )
        for file in files:
            listing.update(f"{hashlib.sha256(file.read_bytes()).hexdigest()}  {file.name}\n".encode())
    except OSError as error:
        raise ConfigurationError(f"cannot read the tokenizer in {target}: {error.strerror}") from error
    return f"sha256:{listing.hexdigest()}"

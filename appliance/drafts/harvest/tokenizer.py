"""
Runs the target's own tokenizer in a child process.

Only the child imports the engine's libraries.  Content passes through pipes, never through a command line or
a file.  Fails closed: a child that dies or does not answer ends the harvest.
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

from appliance.drafts.harvest.conversation import Conversation, Skipped
from appliance.errors import ConfigurationError, DraftRefusedError, DraftStorageError
from appliance.serving.weights import DIGESTED_SUFFIXES

CHILD = "appliance.drafts.harvest.tokenizer_process"
LOAD_SECONDS = 600.0
ANSWER_SECONDS = 120.0
"""Generous, because the machine serves traffic meanwhile."""
OTHER_FILES = frozenset({"config.json", "generation_config.json", "training.json", "hf_quant_config.json"})
"""Model files that do not affect tokenization."""

Tokens = tuple[tuple[int, ...], tuple[int, ...]]


class TargetTokenizer:
    def __init__(self, child: subprocess.Popen[str]) -> None:
        self._child = child

    def tokenize(
        self, conversation: Conversation, *, prompt_tokens: int, completion_tokens: int
    ) -> Tokens | Skipped:
        """The tokens the worker processed, or why they are unknown; its counts include the last token."""
        answer = conversation.answer
        job = {
            **asdict(conversation.prompt),
            "answer": answer.text,
            "end": answer.end,
            "stop": answer.stop,
            "prompt_tokens": prompt_tokens,
            "completion_tokens": completion_tokens,
        }
        reply = self.ask(json.dumps(job), ANSWER_SECONDS)
        if "skipped" in reply:
            return Skipped(reply["skipped"])
        return tuple(reply["prompt"]), tuple(reply["answer"])

    def ask(self, line: str | None, seconds: float) -> dict[str, Any]:
        child = self._child
        assert child.stdin is not None  # noqa: S101 - started with pipes
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
                f"the tokenizer process ended or did not answer within {seconds:g} s: try again"
            ) from error
        finally:
            watchdog.cancel()


@contextmanager
def open_tokenizer(target: Path, environment: Mapping[str, str]) -> Iterator[TargetTokenizer]:
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
    """Digest the tokenizer files and chat template, as `serving.weights.digest_weights` digests all files."""
    listing = hashlib.sha256()
    try:
        files = sorted(
            (
                file
                for file in target.iterdir()
                if file.suffix in DIGESTED_SUFFIXES - {".safetensors"}
                and file.name not in OTHER_FILES
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

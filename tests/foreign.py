"""
Programs of others that check our logs, built by tests/interop/install.sh.

As a pytest plugin it has them check every log and receipt that our verifier accepts in a test's process.
"""

import functools
import json
import os
import subprocess
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from appliance.audit import verify

BIN = Path(__file__).parents[1] / ".interop" / "bin"
INTEROP, FSCK, LITEWITNESS = (BIN / name for name in ("interop", "fsck", "litewitness"))
SECONDS = 60
"""Time limit: fsck waits forever for a worker if as many tiles as workers are wrong."""
WORKERS = 16
MISSING = (
    "NO PROGRAM OF OTHERS CHECKS LOGS HERE: they are built with Go, and `make tools` says what is missing"
)
REFUSED = {verify.ExitCode.UNUSABLE, verify.ExitCode.INVALID, verify.ExitCode.DIVERGED}


class RefusedError(AssertionError):
    """A program did not accept what it was given; the text is what it reported."""


def are_installed() -> bool:
    return all(os.access(program, os.X_OK) for program in (INTEROP, FSCK, LITEWITNESS))


def check_log(export: Path, keys: Iterable[str]) -> dict[str, Any]:
    """Have golang.org/x/mod, torchwood and transparency-dev/formats check it; returns what they checked."""
    return _interop(keys, "log", export)


def check_receipt(receipt: Path, leaf: Path, keys: Iterable[str]) -> dict[str, Any]:
    return _interop(keys, "receipt", receipt, leaf)


def fsck(export: Path, key: str) -> None:
    """Have Tessera's fsck compute the whole log again; its exit code is 0 whatever it finds."""
    options = ["-ui=false", "-logtostderr", f"-N={WORKERS}", "-public_key=/dev/stdin"]
    done = _run([FSCK, *options, f"-storage_url={export.absolute().as_uri()}"], key)
    if "Successfully fsck'd log with size" not in done.stderr:
        raise RefusedError(done.stderr)


def pytest_report_header() -> str | None:
    return None if are_installed() else MISSING


def pytest_configure() -> None:
    if are_installed():
        verify.verify_export = checks_export(verify.verify_export)
        verify.verify_receipt = checks_receipt(verify.verify_receipt)


def checks_export(ours: Callable[..., verify.Report]) -> Callable[..., verify.Report]:
    """`verify_export` that raises RefusedError if the others do not accept what it accepts."""

    @functools.wraps(ours)
    def verify_export(directory: Path, keys: verify.Keys, *others: Any, **named: Any) -> verify.Report:
        report = ours(directory, keys, *others, **named)
        # The others always read the whole log: what an earlier run has read, or was disposed of, may be gone.
        is_whole = not (report.verified_before or report.gone_below)
        if report.exit_code not in REFUSED and is_whole:
            lines = _lines(keys, report)
            if report.rotations:  # others do not follow rotations
                lines |= {*(directory / "vkey").read_text().split()}
            found = check_log(directory, lines)
            signed = {*found["signed"]}.union(*found["cosigned"].values())
            witnesses = {key.rpartition("+")[0] for key in signed}
            if (found["size"], found["entries"]) != (report.size, report.size) or witnesses < {
                *report.cosigned
            }:
                raise RefusedError(f"ours: {report.size}, {list(report.cosigned)}; others: {found}")
            for line in lines:
                if verify.parse_key(line).kind == verify.ED25519 and short(line) in found["signed"]:
                    fsck(directory, line)
        return report

    return verify_export


def checks_receipt(ours: Callable[..., verify.Report]) -> Callable[..., verify.Report]:
    """Likewise for `verify_receipt`."""

    @functools.wraps(ours)
    def verify_receipt(
        text: bytes, leaf: bytes, keys: verify.Keys, *others: Any, **named: Any
    ) -> verify.Report:
        report = ours(text, leaf, keys, *others, **named)
        if report.exit_code not in REFUSED:
            with tempfile.TemporaryDirectory() as scratch:
                files = Path(scratch, "receipt"), Path(scratch, "leaf")
                for path, content in zip(files, (text, leaf), strict=True):
                    path.write_bytes(content)
                check_receipt(*files, _lines(keys, report))
        return report

    return verify_receipt


def short(key: str) -> str:
    """Name and id of a verifier key, as programs of others print them."""
    name, key_id, _ = key.split("+", 2)
    return f"{name}+{key_id}"


def _lines(keys: verify.Keys, report: verify.Report) -> set[str]:
    given = (keys,) if isinstance(keys, verify.Key) else keys
    return {key.line for key in (*given, *report.witnesses.keys)}


def _interop(keys: Iterable[str], *words: str | Path) -> dict[str, Any]:
    done = _run([INTEROP, *words, "/dev/stdin"], "\n".join(keys))
    if done.returncode:
        raise RefusedError(done.stderr)
    return json.loads(done.stdout)


def _run(command: list[str | Path], given: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, input=given, capture_output=True, text=True, timeout=SECONDS, check=False)

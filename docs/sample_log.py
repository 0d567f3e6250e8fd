"""
Make the log on which auditors practise, docs/tutorial/sample-log.tar.gz: `python -m docs.sample_log`.

A real appliance serves the demo models; its data directory is copied when it has answered twice.  From there
it goes on twice, with the same signing key: once in `log`, once in `rewritten`.
"""

import json
import shutil
import subprocess
import sys
import tarfile
import tempfile
import urllib.request
from pathlib import Path

from demo.process import ApplianceProcess

ARCHIVE = Path(__file__).parent / "tutorial" / "sample-log.tar.gz"
TIMES = 4
TENANT = b'"tenant":"demo"'


def main() -> None:
    """Serve, export, tamper, pack."""
    with tempfile.TemporaryDirectory() as name:
        directory, sample = Path(name), Path(name) / "sample-log"
        sample.mkdir()
        _serve(directory / "data", "a")
        shutil.copytree(directory / "data", directory / "backup")
        _serve(directory / "data", "b")
        _serve(directory / "backup", "c")
        _appliance("audit", "export", sample / "log", "--data", directory / "data")
        _appliance("audit", "export", sample / "rewritten", "--data", directory / "backup")
        key = _appliance("audit", "key", "--data", directory / "data")
        (sample / "log.keys").write_text(key, encoding="utf-8")
        shutil.copy(sample / "log" / "checkpoint", sample / "held-checkpoint")
        shutil.copytree(sample / "log", sample / "tampered")
        _tamper(sample / "tampered")
        for log in ("log", "rewritten", "tampered"):
            (sample / log / "verify.py").unlink()  # the page has the current one
        _pack(sample)
    print(f"wrote {ARCHIVE}, {ARCHIVE.stat().st_size} bytes")


def _serve(data: Path, word: str) -> None:
    with ApplianceProcess("up", data=data) as appliance:
        for number in range(TIMES):
            content = {"model": "demo-coder", "prompt": f"def {word}{number}(", "max_tokens": 8}
            request = urllib.request.Request(  # noqa: S310 - an address of this machine
                f"{appliance.url}/v1/completions",
                data=json.dumps(content).encode(),
                headers={"Authorization": f"Bearer {appliance.key}", "Content-Type": "application/json"},
            )
            urllib.request.urlopen(request, timeout=60).read()  # noqa: S310


def _appliance(*arguments: str | Path) -> str:
    command = [sys.executable, "-m", "appliance", *map(str, arguments)]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout  # noqa: S603


def _tamper(log: Path) -> None:
    """Let the last request have been another tenant's, as one who can edit the export would."""
    for path in sorted(log.rglob("*")):
        if path.is_file() and TENANT in (content := path.read_bytes()):
            before, _, after = content.rpartition(TENANT)
            path.write_bytes(before + TENANT.replace(b"demo", b"lab4") + after)
            return
    raise SystemExit("no entry names the tenant `demo`")


def _pack(sample: Path) -> None:
    with tarfile.open(ARCHIVE, "w:gz") as archive:
        archive.add(sample, "sample-log", filter=_without_owner)


def _without_owner(member: tarfile.TarInfo) -> tarfile.TarInfo:
    member.uid = member.gid = 0
    member.uname = member.gname = ""
    return member


if __name__ == "__main__":
    main()

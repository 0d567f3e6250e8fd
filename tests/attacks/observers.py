"""
Those who might notice, each the real thing: the gateway's log on the attacked store, the auditor's
verifier as a process of its own, the witness.
"""

import asyncio
import json
import subprocess
import sys
from pathlib import Path

from appliance.audit.durability.selfcheck import DamagedError, SelfCheck
from appliance.audit.registry import EntryType
from appliance.audit.store import SqlAuditStore
from appliance.audit.verify import ExitCode
from appliance.errors import AuditError
from tests.attacks.catalogue import DAMAGE, NO_EXPORT, NOT_COSIGNED, Observer
from tests.attacks.scene import Past, Scene
from tests.audit_log import open_log

REPOSITORY = Path(__file__).resolve().parents[2]
UNNOTICED = {ExitCode.VALID, ExitCode.ERASED}


def running_gateway(past: Past, attack) -> dict[Observer, str | None]:
    """What a gateway says that was running during the attack: its scheduled check, and its next entry."""

    async def run() -> None:
        async with open_log(past.scene.settings, store) as log:
            before = log.log.state()
            check.round(before.size, before.root)
            await asyncio.to_thread(attack, past)
            try:
                check.round(before.size, before.root)
            except DamagedError:
                said[Observer.SELF_CHECK] = DAMAGE
            try:
                await log.sink.append(EntryType.AUDIT_READ, actor="cli:root", operation="tail")
            except AuditError as error:
                said[Observer.RUNNING] = type(error).__name__

    said: dict[Observer, str | None] = {Observer.SELF_CHECK: None, Observer.RUNNING: None}
    store = SqlAuditStore(past.scene.installation.database_url)
    check = SelfCheck(store, rest=lambda _seconds: None)
    try:
        asyncio.run(run())
    except AuditError:
        if said[Observer.RUNNING] is None:  # else it only says again, on closing, why it failed
            raise
    finally:
        store.close()
    return said


def starting_gateway(scene: Scene) -> str | None:
    """What the gateway says when it is started on what the attack left."""
    try:
        scene.serve()
    except AuditError as error:
        return type(error).__name__
    return None


def auditor(scene: Scene, name: str, held: Path | None = None, *, opens: bool = False) -> str | None:
    """
    Return what the verifier says of an export, as a process of its own; None when nothing is wrong.

    Args:
        scene: the log.
        name: of the directory to export to.
        held: a checkpoint the auditor kept.
        opens: whether the auditor was given the keys to the archived prompts.
    """
    options = ["--held", str(held)] if held else []
    try:
        export = scene.export(name)
        if opens:
            keys = scene.directory / f"{name}.keys"
            keys.write_text(json.dumps(scene.data_keys()), encoding="utf-8")
            options += ["--payload-keys", str(keys)]
    except AuditError:
        return NO_EXPORT
    command = [sys.executable, "-m", "appliance.audit.verify", str(export), "--json"]
    command += ["--key", scene.vkey, *options]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    report = json.loads(done.stdout)
    assert done.returncode == report["exit_code"], done.stderr
    return None if done.returncode in UNNOTICED else report["verdict"]


def outside_observers(past: Past) -> dict[Observer, str | None]:
    """Ask everyone who sees only what the operator shows, before anything is started again."""
    return {
        Observer.AUDITOR: auditor(past.scene, "shown"),
        Observer.OPENER: auditor(past.scene, "opened", opens=True),
        Observer.HELD: auditor(past.scene, "shown-again", past.held),
        Observer.WITNESS: None if past.scene.have_cosigned(past.witness) else NOT_COSIGNED,
    }

"""
The observers, each the real component: the gateway's log on the attacked store, the auditor's
verifier, the witness.
"""

import asyncio
import contextlib
import io
import json
from pathlib import Path

from appliance.audit import verify
from appliance.audit.durability.selfcheck import DamagedError, SelfCheck
from appliance.audit.entry_types import EntryType
from appliance.audit.store import SqlAuditStore
from appliance.audit.verify import ExitCode
from appliance.errors import AuditError, TenantsAlteredError
from tests.attacks.catalogue import DAMAGE, NO_EXPORT, NOT_COSIGNED, NOT_FORWARDED, TENANTS, Observer
from tests.attacks.scene import Past, Scene
from tests.audit_log import open_log
from tests.forwarding import judge_stream

UNNOTICED = {ExitCode.VALID, ExitCode.ERASED}


def running_gateway(past: Past, attack) -> dict[Observer, str | None]:
    """Reports of a gateway that ran during the attack: its scheduled check, and its next entry."""

    async def run() -> None:
        async with open_log(past.scene.settings, store) as log:
            before = log.log.state()
            check.round(before.size, before.root)
            tenants.read()
            await asyncio.to_thread(attack, past)
            try:
                check.round(before.size, before.root)
            except DamagedError:
                said[Observer.SELF_CHECK] = DAMAGE
            try:
                tenants.read()
            except TenantsAlteredError:
                said[Observer.RUNNING] = TENANTS
            try:
                await log.sink.append(EntryType.AUDIT_READ, actor="cli:root", operation="tail")
            except AuditError as error:
                said[Observer.RUNNING] = type(error).__name__

    said: dict[Observer, str | None] = {Observer.SELF_CHECK: None, Observer.RUNNING: None}
    store = SqlAuditStore(past.scene.installation.database_url)
    check = SelfCheck(store, None, verify_seconds=3600, clock=lambda: 1.0, rest=lambda _seconds: None)
    try:
        with past.scene.tenant_store() as tenants:
            asyncio.run(run())
    except AuditError:
        if said[Observer.RUNNING] is None:  # else it only says again, on closing, why it failed
            raise
    finally:
        store.close()
    return said


def accepting_gateway(past: Past, attack) -> dict[Observer, str | None]:
    """Report of a gateway whose entries no other integrates during the attack."""

    async def run() -> None:
        async with open_log(past.scene.settings, store) as log:
            for _ in range(3):
                reading = log.sink.submit(EntryType.AUDIT_READ, actor="cli:root", operation="tail")
                await log.sink.confirm(reading)
            await asyncio.to_thread(attack, past)
            try:
                async with asyncio.timeout(30):
                    await log.log.wait_failed()
            except AuditError as error:
                said[Observer.RUNNING] = type(error).__name__

    said: dict[Observer, str | None] = {Observer.RUNNING: None}
    with (
        contextlib.closing(SqlAuditStore(past.scene.installation.database_url)) as store,
        past.scene.absent_integrator(),
        contextlib.suppress(AuditError),  # it only says again, on closing, why it failed
    ):
        asyncio.run(run())
    return said


def starting_gateway(scene: Scene) -> str | None:
    """The report of a gateway that is started after the attack."""
    try:
        scene.serve()
        scene.start_tenants()
    except (AuditError, TenantsAlteredError) as error:
        kind = type(error)
        return TENANTS if issubclass(kind, TenantsAlteredError) else kind.__name__
    return None


def auditor(scene: Scene, name: str, held: Path | None = None, *, opens: bool = False) -> str | None:
    """
    Return what the verifier says of an export; None when nothing is wrong.

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
    with contextlib.redirect_stdout(io.StringIO()) as said:
        code = verify.main([str(export), "--json", "--key", scene.vkey, *options])
    report = json.loads(said.getvalue())
    assert code == report["exit_code"]
    return None if code in UNNOTICED else report["verdict"]


def siem(past: Past) -> str | None:
    """What the SIEM's copy shows: as it is, and once the gateway has forwarded the log as it is now."""
    said = _judge_stream(past)
    if said is not None:
        return said
    try:
        past.scene.forward(past.stream)
    except AuditError:
        return _judge_stream(past) or NOT_FORWARDED
    return _judge_stream(past)


def _judge_stream(past: Past) -> str | None:
    code, report = judge_stream(past.stream, past.scene.vkey)
    return None if code in UNNOTICED else report["verdict"]


def outside_observers(past: Past) -> dict[Observer, str | None]:
    """Query the observers that depend on the operator, before any restart."""
    return {
        Observer.AUDITOR: auditor(past.scene, "shown"),
        Observer.OPENER: auditor(past.scene, "opened", opens=True),
        Observer.HELD: auditor(past.scene, "shown-again", past.held),
        Observer.SIEM: siem(past),
        Observer.WITNESS: None if past.scene.have_cosigned(past.witness) else NOT_COSIGNED,
    }

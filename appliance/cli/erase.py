"""
`appliance audit erase | prune | hold | release | holds | approve | withdraw | open | check`: stored content.

A running gateway erases, because only the gateway knows which content is being sealed at that moment; the
commands send it a request.  `open` and `check` read the database and the keys of this machine themselves,
so that no gateway ever returns a tenant's content, and record that in the log first.  All fail closed.
"""

import base64
import json
import os
import sys
from collections.abc import Callable
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import quote

import typer

from appliance.audit.content.payload_keys import DAY_MS, PayloadKeys, Purpose, load_master_key
from appliance.audit.content.payloads import Payload, SqlPayloadStore
from appliance.audit.content.retention import MISDATED
from appliance.audit.content.sealing import LOGGED, Part, commit, commit_under, open_sealed, place, unwrap
from appliance.audit.entry import format_time
from appliance.audit.store import AuditStore
from appliance.cli.common.audit_log import PurposeOption, RecorderOption, open_reader
from appliance.cli.common.options import (
    ConfigOption,
    DataOption,
    UrlOption,
    ask_gateway,
    settings_from,
    wall_clock,
)
from appliance.errors import AuditVerificationError, ConfigurationError
from appliance.infra.data_directory import locate
from appliance.infra.files import write_private
from appliance.infra.settings import Settings

PATIENCE_SECONDS = 600.0
"""A large erasure takes long; the gateway completes it even if the command is interrupted."""
_ask = partial(ask_gateway, timeout_seconds=PATIENCE_SECONDS)


class Logged(StrEnum):
    """A part that the log names; samples are neither shown nor compared."""

    REQUEST = Part.REQUEST.value
    RESPONSE = Part.RESPONSE.value


TenantOption = Annotated[str, typer.Option("--tenant", help="Name of the tenant.")]
BeforeOption = Annotated[
    str | None, typer.Option(help="Only requests before this time (RFC 3339) or date (UTC).")
]
ApprovalArgument = Annotated[
    str, typer.Argument(help="Id of the request; `appliance audit approvals` shows it.")
]
ReasonOption = Annotated[str, typer.Option("--reason", help="Reason; recorded in the audit log.")]


def erase(
    tenant: TenantOption,
    basis: Annotated[str, typer.Option(help="Legal basis or request; recorded in the audit log.")],
    before: BeforeOption = None,
    request: Annotated[list[str] | None, typer.Option(help="Id of a request; repeatable.")] = None,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask for confirmation.")] = False,  # noqa: FBT002
    url: UrlOption = None,
    config: ConfigOption = None,
    data: DataOption = None,
) -> None:
    """Erase stored content permanently: of some requests, from before a time, or all of a tenant."""
    settings = settings_from(config, data)
    what = f"{len(request)} requests" if request else f"requests before {before}" if before else "everything"
    if not yes:
        typer.confirm(f"Erase content of {tenant}: {what}? This cannot be undone", abort=True, err=True)
    body: dict[str, Any] = {"tenant": tenant, "basis": basis}
    if request:
        body["requests"] = request
    if before:
        body["before"] = before
    _show_done("erase", _ask(settings, url, "POST", "audit/erasures", body))


def prune(
    before: BeforeOption = None,
    url: UrlOption = None,
    config: ConfigOption = None,
    data: DataOption = None,
) -> None:
    """Erase all tenants' content from before a time; default: `audit.payload_retention_days` ago."""
    settings = settings_from(config, data)
    days = settings.audit.payload_retention_days
    if before is None:
        if days is None:
            raise ConfigurationError("pass --before TIME, or set audit.payload_retention_days")
        now_ms = int(wall_clock() * 1000)
        before = format_time(now_ms - days * DAY_MS)
    _show_done("prune", _ask(settings, url, "POST", "audit/prunes", {"before": before}))


def hold(
    tenant: TenantOption,
    reason: ReasonOption,
    url: UrlOption = None,
    config: ConfigOption = None,
    data: DataOption = None,
) -> None:
    """Place a legal hold: no content of the tenant is erased or pruned until it is released."""
    body = {"tenant": tenant, "reason": reason}
    index = _ask(settings_from(config, data), url, "POST", "audit/holds", body)["index"]
    typer.echo(f"{tenant} is under a legal hold (entry {index})")


def release(
    tenant: TenantOption,
    reason: ReasonOption,
    url: UrlOption = None,
    config: ConfigOption = None,
    data: DataOption = None,
) -> None:
    """Release a legal hold."""
    body = {"tenant": tenant, "reason": reason}
    _show_done("release", _ask(settings_from(config, data), url, "POST", "audit/holds/releases", body))


def holds(url: UrlOption = None, config: ConfigOption = None, data: DataOption = None) -> None:
    """List the tenants under a legal hold."""
    for tenant, reason in _ask(settings_from(config, data), url, "GET", "audit/holds")["holds"].items():
        typer.echo(f"{tenant}\t{reason}")


def approvals(url: UrlOption = None, config: ConfigOption = None, data: DataOption = None) -> None:
    """List what waits for the approval of a second administrator (`audit.two_person`)."""
    for pending in _ask(settings_from(config, data), url, "GET", "audit/approvals")["approvals"]:
        typer.echo(_line(pending))


def approve(
    approval: ApprovalArgument,
    yes: Annotated[bool, typer.Option("--yes", help="Neither show it nor ask for confirmation.")] = False,  # noqa: FBT002
    url: UrlOption = None,
    config: ConfigOption = None,
    data: DataOption = None,
) -> None:
    """Show what another administrator has requested, and after confirmation approve it and carry it out."""
    settings = settings_from(config, data)
    if not yes:
        for pending in _ask(settings, url, "GET", "audit/approvals")["approvals"]:
            if pending["approval"] == approval:
                typer.echo(_line(pending), err=True)
                typer.confirm("Approve this, and carry it out now", abort=True, err=True)
    done = _ask(settings, url, "POST", f"audit/approvals/{quote(approval, safe='')}")
    _show_done(done["operation"], done)


def withdraw(
    approval: ApprovalArgument, url: UrlOption = None, config: ConfigOption = None, data: DataOption = None
) -> None:
    """Withdraw a request that waits for approval."""
    _ask(settings_from(config, data), url, "DELETE", f"audit/approvals/{quote(approval, safe='')}")
    typer.echo(f"{approval} is withdrawn")


def open_content(
    request_id: Annotated[str, typer.Argument(help="Id of the request, as in the audit log.")],
    part: Annotated[Logged | None, typer.Option(help="Only this part; default: both.")] = None,
    keys: Annotated[
        Path | None, typer.Option(help="Also write the data keys, for `verify --payload-keys`.")
    ] = None,
    purpose: PurposeOption = "",
    url: RecorderOption = None,
    config: ConfigOption = None,
    data: DataOption = None,
) -> None:
    """Decrypt the stored content of one request and verify it against the log; recorded in the log first."""
    settings = settings_from(config, data)
    wanted = [Part(part)] if part else [*LOGGED]
    opened: dict[str, str] = {}
    with open_reader(settings, url, purpose, unrecorded=False) as reader:
        store = SqlPayloadStore(reader.store.database)
        named = _named(reader.store, request_id, "payload_digest")
        for each in wanted:
            if each not in named:
                typer.echo(f"{each}: no content was stored", err=True)
                continue
            index, entry = named[each]
            payload = store.get(request_id, each)
            if payload is None:
                typer.echo(f"{each}: erased", err=True)
                continue
            reader.record("open", index, index + 1)
            data_key = _data_key(settings, payload)
            content = open_sealed(
                payload.sealed.blob,
                place(settings.audit.origin, request_id, each),
                data_key,
                digest=entry["payload_digest"],
                commitment=entry["payload_commitment"],
            )
            opened[f"{request_id}/{each}"] = base64.b64encode(data_key).decode()
            typer.echo(f"{each}: {len(content)} bytes, as in entry {index} of the log", err=True)
            sys.stdout.buffer.write(content)
            sys.stdout.buffer.flush()
    if keys is not None:
        write_private(keys, json.dumps(opened, indent=2) + "\n")


def check(
    request_id: Annotated[str, typer.Argument(help="Id of the request, as in the audit log.")],
    file: Annotated[Path, typer.Argument(help="File with the claimed content.")],
    part: Annotated[Logged, typer.Option(help="Request body or response.")] = Logged.REQUEST,
    purpose: PurposeOption = "",
    url: UrlOption = None,
    config: ConfigOption = None,
    data: DataOption = None,
) -> None:
    """Check whether a file is the body or the answer that the log commits to; recorded in the log first."""
    settings = settings_from(config, data)
    try:
        content = file.read_bytes()
    except OSError as error:
        raise ConfigurationError(f"cannot read {file}: {error.strerror}") from error
    wanted = Part(part)
    where = place(settings.audit.origin, request_id, wanted)
    with open_reader(settings, url, purpose, unrecorded=False) as reader:
        store = SqlPayloadStore(reader.store.database)
        named = _named(reader.store, request_id, "payload_commitment")
        if wanted not in named:
            raise ConfigurationError(f"the log has no commitment to the {wanted} of request {request_id}")
        index, entry = named[wanted]
        reader.record("check", index, index + 1)
        if "payload_digest" in entry:
            payload = store.get(request_id, wanted)
            if payload is None:
                raise ConfigurationError(
                    f"the {part} of request {request_id} was erased, and its key with it"
                )
            found = commit_under(_data_key(settings, payload), where, content)
        else:
            found = commit(_tenant_key(settings, entry["payload_key"], Purpose.COMMITMENT), where, content)
    if found != entry["payload_commitment"]:
        raise AuditVerificationError(f"{file} is not the {part} that entry {index} commits to")
    typer.echo(f"{file} is the {part} that entry {index} commits to")


COMMANDS: dict[str, Callable[..., None]] = {
    "erase": erase,
    "prune": prune,
    "hold": hold,
    "release": release,
    "holds": holds,
    "approvals": approvals,
    "approve": approve,
    "withdraw": withdraw,
    "open": open_content,
    "check": check,
}
"""By name below `appliance audit`."""


def _named(store: AuditStore, request_id: str, field: str) -> dict[Part, tuple[int, dict[str, Any]]]:
    """Index and entry of the parts of a request whose entries have a field."""
    named = {}
    for leaf in store.leaf_by_request(request_id):
        entry = json.loads(leaf.leaf)
        if field in entry:
            named[Part.REQUEST if leaf.type == "request.intent" else Part.RESPONSE] = (leaf.index, entry)
    if not named:
        raise ConfigurationError(f"the log has no such content of request {request_id}")
    return named


def _data_key(settings: Settings, payload: Payload) -> bytes:
    return unwrap(payload.sealed.wrapped_key, _tenant_key(settings, payload.key_id, Purpose.WRAPPING))


def _tenant_key(settings: Settings, key_id: str, purpose: Purpose) -> bytes:
    directory = locate(settings).payload_keys
    master = settings.audit.payload_master_key_file
    keys = PayloadKeys(
        directory,
        master_key=load_master_key(master) if master else None,
        key_days=settings.audit.payload_rotation_days,
        clock=wall_clock,
        random_bytes=os.urandom,
    )
    name = keys.find(key_id, purpose)
    if name is None:
        message = f"the key {key_id} is not in {directory}: it was destroyed, or is on another machine"
        raise ConfigurationError(message)
    return keys.read(name).key


def _line(pending: dict[str, Any]) -> str:
    return "\t".join(f"{name}={value}" for name, value in pending.items())


def _show_done(operation: str, answer: dict[str, Any]) -> None:
    """Show the result, or that it waits for a second administrator."""
    if approval := answer.get("approval"):
        typer.echo(f"nothing is done yet: another administrator has until {answer['expires_at']} to run")
        typer.echo(f"  appliance audit approve {approval}")
    elif operation == "erase":
        _show_erased(answer)
    elif operation == "release":
        typer.echo(f"{answer['tenant']} is no longer under a legal hold (entry {answer['index']})")
    else:
        for each in answer["erased"]:
            _show_erased(each)
        if not answer["erased"]:
            typer.echo("there is no content from before this time that may be erased")


def _show_erased(erased: dict[str, Any]) -> None:
    typer.echo(
        f"{erased['tenant']}: {erased['payloads']} payloads erased, {len(erased['keys'])} keys destroyed, "
        f"{erased.get('files', 0)} files removed, entries {', '.join(map(str, erased['entries'])) or 'none'}"
    )
    if erased.get("misdated"):
        typer.echo(
            f"{erased['tenant']}: {erased['misdated']} payloads stay: {MISDATED}. "
            "Erase them by request id, or everything",
            err=True,
        )

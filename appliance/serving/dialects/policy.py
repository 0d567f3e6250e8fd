"""
Members that a request must not use, and members that the gateway overrides.

vLLM reads more members than OpenAI's API has.  Most are harmless and pass; those below would let a client
run code in the worker, make it call other machines, or reveal another tenant's prompts.
"""

from collections.abc import Mapping
from hashlib import blake2b

from appliance.errors import InvalidRequestError
from appliance.infra.json_members import Member, value_of
from appliance.serving.dialects.media import refuse_media
from appliance.serving.dialects.routes import ANSWERS
from appliance.serving.worker import ServedModel
from appliance.tenancy import Caller, Permission
from appliance.tenancy.limits.estimate import ANSWER_LIMITS

REFUSED = {
    "chat_template": "a template is code, which the worker would run",
    "kv_transfer_params": "it would connect the worker to other machines",
    "ec_transfer_params": "it would connect the worker to other machines",
    "vllm_xargs": "it controls extensions of the worker",
    "mm_processor_kwargs": "it changes what an image costs the worker",
    "media_io_kwargs": "it changes what an image costs the worker",
    "prompt_embeds": "the worker would have to unpack it; send text or tokens",
}
"""Members that no request may set, and why; null is accepted."""
TEMPLATE_ARGUMENTS = "chat_template_kwargs"
PRIORITY = "priority"
SALT = "cache_salt"
SALT_BYTES = 16
MAX_SALT_CHARACTERS = 128
"""vLLM's own bound of a salt."""
STREAM_INTERVAL = "stream_interval"
"""Tokens that a worker collects for one frame: frames are what a worker without the plugin is counted by."""
COUNTS = (*ANSWERS, *ANSWER_LIMITS)
"""Numbers that the gateway reads as well; vLLM would also accept them as text."""
_CHECKED = frozenset({*REFUSED, TEMPLATE_ARGUMENTS, SALT})


def refuse_forbidden(
    members: Mapping[str, Member], may: frozenset[Permission], *, carriers: tuple[str, ...]
) -> None:
    """Refuse members that no worker may receive; those in `carriers` may contain images, sound or video."""
    if not _CHECKED.isdisjoint(members):
        _refuse_members(members)
    for name in COUNTS:
        if name in members and isinstance(members[name].value, str):
            raise InvalidRequestError(f"`{name}` must be a number, not text.", param=name)
    for name in carriers:
        if name in members:
            refuse_media(members[name].value, name, remote=Permission.REMOTE_MEDIA in may)


def _refuse_members(members: Mapping[str, Member]) -> None:
    for name, why in REFUSED.items():
        if value_of(members, name) is not None:
            raise _refusal(name, why)
    arguments = value_of(members, TEMPLATE_ARGUMENTS)
    if isinstance(arguments, dict) and arguments.get("chat_template") is not None:
        raise _refusal(f"{TEMPLATE_ARGUMENTS}.chat_template", REFUSED["chat_template"])
    salt = value_of(members, SALT)
    if salt is not None and not (isinstance(salt, str) and 0 < len(salt) <= MAX_SALT_CHARACTERS):
        message = f"`{SALT}` must be a string of 1 to {MAX_SALT_CHARACTERS} characters."
        raise InvalidRequestError(message, param=SALT)


def may_call(caller: Caller, served: ServedModel) -> bool:
    """Whether a caller may use a model; an adapter needs the permission for all adapters, or its own name."""
    tenant = caller.tenant
    if served.parent is not None and served.name not in tenant.models and Permission.LORA not in tenant.may:
        return False
    return caller.may_use(served.name)


def policy_edits(
    members: Mapping[str, Member], may: frozenset[Permission], *, tenant: str, salted: bool
) -> dict[str, str | None]:
    """Changes to a body by policy; `salted` separates the tenant's entries in the worker's prefix cache."""
    edits: dict[str, str | None] = dict.fromkeys(_removed(members, may))
    if salted:
        given = value_of(members, SALT)
        edits[SALT] = f'"{salt_of(tenant, given if isinstance(given, str) else None)}"'
    return edits


def policy_verdicts(members: Mapping[str, Member], may: frozenset[Permission]) -> list[str]:
    """In the audit log: the members that were removed, `priority_removed` and so on."""
    return [f"{name}_removed" for name in _removed(members, may)]


def _removed(members: Mapping[str, Member], may: frozenset[Permission]) -> list[str]:
    refused = (STREAM_INTERVAL,) if Permission.PRIORITY in may else (PRIORITY, STREAM_INTERVAL)
    return [name for name in refused if name in members]


def salt_of(tenant: str, given: str | None) -> str:
    """
    The salt of a request's blocks in the prefix cache: two tenants never have the same.

    With a shared cache a tenant could find out by its speed what others have sent.  No secret is needed,
    because clients never choose the salt: theirs is mixed in.
    """
    # Not cached: a cache of what clients choose is memory that they control.
    digest = blake2b(tenant.encode(), digest_size=SALT_BYTES, person=b"cache salt")
    if given is not None:
        digest.update(b"\0" + given.encode("utf-8", "surrogatepass"))
    return digest.hexdigest()


def _refusal(name: str, why: str) -> InvalidRequestError:
    return InvalidRequestError(
        f"`{name}` is not accepted: {why}. Leave it out.", param=name, code="parameter_not_allowed"
    )

"""Which members a request must not have, and which the gateway overrides."""

import json
import re
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from appliance.errors import InvalidRequestError
from appliance.infra.json_members import parse_members
from appliance.serving.dialects.policy import (
    COUNTS,
    REFUSED,
    may_call,
    policy_edits,
    policy_verdicts,
    refuse_forbidden,
    salt_of,
)
from appliance.serving.dialects.routes import ROUTES
from appliance.serving.worker import ServedModel
from appliance.tenancy import ApiKey, Caller, Permission, Tenant
from tests.edits import edit_members

NO_PERMISSIONS: frozenset[Permission] = frozenset()
PICTURE = "data:image/png;base64,iVBORw0KGgo="
ELSEWHERE = [
    "http://10.0.0.1/a.png",
    "https://example.org/a.png",
    "file:///etc/passwd",
    "ftp://x",
    " data:,",
    "",
]
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=4),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["type", "image_url", "url", "content", "source", "uuid", "output", "text"]),
            inner,
        )
    ),
    max_leaves=10,
)


def check(path: str, body: dict, may: frozenset[Permission] = NO_PERMISSIONS) -> None:
    members = parse_members(json.dumps({"model": "demo", **body}))
    refuse_forbidden(members, may, carriers=ROUTES[path].carriers)


def refused(path: str, body: dict, may: frozenset[Permission] = NO_PERMISSIONS) -> InvalidRequestError:
    with pytest.raises(InvalidRequestError) as refusal:
        check(path, body, may)
    assert "\n" not in str(refusal.value)
    return refusal.value


def chat(part: object) -> dict:
    """A chat with one part next to the question."""
    return {"messages": user({"type": "text", "text": "what is this"}, part)}


def user(*parts: object) -> list[dict]:
    return [{"role": "user", "content": list(parts)}]


def brought(url: object) -> list[tuple[str, dict]]:
    """Every way to send a URL."""
    picture = {"type": "image_url", "image_url": {"url": url}}
    block = {"type": "image", "source": {"type": "url", "url": url}}
    item = {"type": "input_image", "image_url": url}
    return [
        ("/v1/chat/completions", chat(picture)),
        ("/v1/chat/completions", chat({"image_url": url})),
        ("/v1/chat/completions", chat({"type": "audio_url", "audio_url": {"url": url}})),
        ("/v1/chat/completions", chat({"type": "video_url", "video_url": {"url": url}})),
        ("/v1/responses", {"input": user(item)}),
        ("/v1/responses", {"input": user({"type": "input_file", "file_url": url})}),
        ("/v1/responses", {"input": [{"type": "function_call_output", "call_id": "c", "output": [item]}]}),
        ("/v1/messages", chat(block)),
        ("/v1/messages", {"messages": user({"type": "tool_result", "tool_use_id": "t", "content": [block]})}),
        ("/v1/messages", {"messages": [], "system": [block]}),
        ("/v1/messages/count_tokens", chat(block)),
        ("/v1/embeddings", {"input": [user(picture)]}),
        ("/v1/embeddings", chat(picture)),
        ("/v1/rerank", {"query": "q", "documents": [{"content": [picture]}]}),
        ("/score", {"queries": {"content": [picture]}, "documents": "d"}),
        ("/tokenize", chat(picture)),
    ]


@pytest.mark.parametrize("url", ELSEWHERE)
def test_remote_media_url_is_refused_at_any_depth(url: str):
    """On every route that takes media."""
    for path, body in brought(url):
        error = refused(path, body)
        assert (error.code, "`data:`" in str(error)) == ("media_url_not_allowed", True), path


@pytest.mark.parametrize("url", [PICTURE, PICTURE.replace("data", "DATA"), None])
def test_inline_media_is_accepted(url: str | None):
    for path, body in brought(url):
        if url is not None or "source" not in json.dumps(body):
            check(path, body)


def test_tenant_with_remote_media_permission_may_send_urls():
    """The worker's own list of allowed domains still applies."""
    for path, body in brought("https://example.org/a.png"):
        check(path, body, frozenset({Permission.REMOTE_MEDIA}))


def test_url_inside_text_is_accepted():
    """In a text, in a tool's arguments, in a citation."""
    link = "https://example.org/a.png"
    check("/v1/chat/completions", {"messages": [{"role": "user", "content": link}]})
    check("/v1/chat/completions", chat({"type": "text", "text": link}))
    check(
        "/v1/messages",
        chat({"type": "tool_use", "id": "t", "name": "open", "input": {"url": link, "image_url": link}}),
    )
    cited = {"type": "output_text", "text": "x", "annotations": [{"type": "url_citation", "url": link}]}
    check("/v1/responses", {"input": [{"role": "assistant", "content": [cited]}]})
    check("/v1/responses", {"input": link})


@pytest.mark.parametrize("may", [NO_PERMISSIONS, frozenset(Permission)])
@pytest.mark.parametrize(
    "part",
    [
        {"type": "image_embeds", "image_embeds": "AAAA"},
        {"image_embeds": "AAAA"},
        {"type": "prompt_embeds", "data": "AAAA"},
        {"type": "audio_embeds", "audio_embeds": {"a": "AAAA"}},
        {"type": "image_url", "image_url": None, "uuid": "of-another-tenant"},
        {"type": "image_url", "image_url": {"url": PICTURE}, "uuid": "mine"},
        {"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}, "uuid": "mine"},
    ],
)
def test_tensors_and_media_uuids_are_refused(part: dict, may: frozenset[Permission]):
    """A worker would unpack tensors; a UUID could refer to another tenant's content."""
    assert refused("/v1/chat/completions", chat(part), may).code == "parameter_not_allowed"


def test_uuid_of_a_message_is_accepted():
    """Only a part's is looked up."""
    check("/v1/chat/completions", {"messages": [{"role": "user", "content": "x", "uuid": "mine"}]})


@given(JSON, st.sampled_from(sorted(ROUTES)))
def test_any_content_is_checked_without_a_crash(content: object, path: str):
    """Content of unknown shape is left to the worker."""
    for carrier in ROUTES[path].carriers:
        with suppress(InvalidRequestError):
            check(path, {carrier: content})


@pytest.mark.parametrize("name", REFUSED)
def test_forbidden_members_are_refused_for_every_tenant(name: str):
    """By name, with the reason; null is accepted."""
    error = refused("/v1/chat/completions", {"messages": [], name: {"x": 1}}, frozenset(Permission))
    assert (error.param, error.code) == (name, "parameter_not_allowed")
    assert REFUSED[name] in str(error)
    check("/v1/chat/completions", {"messages": [], name: None})


def test_chat_template_in_template_arguments_is_refused():
    """Arguments of the model's own template pass; one of them could be a template."""
    check("/v1/chat/completions", {"messages": [], "chat_template_kwargs": {"enable_thinking": False}})
    error = refused("/v1/responses", {"input": "x", "chat_template_kwargs": {"chat_template": "{{ 1 }}"}})
    assert error.param == "chat_template_kwargs.chat_template"


def edited(
    body: dict, may: frozenset[Permission] = NO_PERMISSIONS, *, tenant: str = "acme", salted: bool = True
) -> dict:
    """The body as a worker gets it."""
    text = json.dumps({"model": "demo", **body})
    members = parse_members(text)
    edits = policy_edits(members, may, tenant=tenant, salted=salted)
    return json.loads(edit_members(text, members, edits))


def test_priority_is_removed_without_the_permission():
    assert "priority" not in edited({"priority": -5})
    assert edited({"priority": -5}, frozenset({Permission.PRIORITY}))["priority"] == -5


@pytest.mark.parametrize("may", [NO_PERMISSIONS, frozenset(Permission)])
def test_no_client_chooses_how_many_tokens_a_frame_holds(may: frozenset[Permission]):
    """A worker without the plugin is counted by its frames; the log names what was removed."""
    assert "stream_interval" not in edited({"stream_interval": 1000}, may)
    members = parse_members('{"model":"demo","stream_interval":1000}')
    assert policy_verdicts(members, may) == ["stream_interval_removed"]


def test_tenants_have_different_cache_salts():
    """Each has its own salt, the same for all its requests, on every gateway."""
    assert edited({})["cache_salt"] == edited({"seed": 1})["cache_salt"]
    assert edited({})["cache_salt"] != edited({}, tenant="other")["cache_salt"]
    assert "cache_salt" not in edited({}, salted=False)


def test_client_salt_divides_only_its_tenants_cache():
    """The client's salt is mixed in, not used itself."""
    mine, theirs = salt_of("acme", None), salt_of("other", None)
    assert len({mine, theirs, salt_of("acme", "a"), salt_of("acme", "b"), salt_of("acme", theirs)}) == 5
    assert edited({"cache_salt": theirs})["cache_salt"] not in (mine, theirs)
    assert edited({"cache_salt": None})["cache_salt"] == mine


@given(st.text(min_size=1), st.none() | st.text(min_size=1))
def test_any_salt_is_valid_for_vllm(tenant: str, given_salt: str | None):
    """At most 128 characters and none it forbids."""
    assert re.fullmatch(r"[0-9a-f]{32}", salt_of(tenant, given_salt))


@pytest.mark.parametrize("name", COUNTS)
def test_a_count_must_not_be_text(name: str):
    """VLLM would read it as a number, and the gateway's limits would not."""
    assert refused("/v1/completions", {"prompt": "x", name: "128"}).param == name
    check("/v1/completions", {"prompt": "x", name: 128.0})


@pytest.mark.parametrize("salt", ["", 5, ["x"], {}, "x" * 129])
def test_salt_must_be_a_string_that_vllm_accepts(salt: object):
    """It would otherwise be dropped silently, and a long one would only cost memory."""
    check("/v1/completions", {"prompt": "x", "cache_salt": "x" * 128})
    assert refused("/v1/completions", {"prompt": "x", "cache_salt": salt}).param == "cache_salt"


@pytest.mark.parametrize(
    ("tenant", "may"),
    [
        (Tenant(name="acme"), False),
        (Tenant(name="acme", may=frozenset({Permission.LORA})), True),
        (Tenant(name="acme", models=("tuned",)), True),
        (Tenant(name="acme", models=("demo",), may=frozenset({Permission.LORA})), False),
        (Tenant(name="acme", models=(), may=frozenset({Permission.LORA})), False),
    ],
)
def test_adapter_needs_the_permission_or_its_name(tenant: Tenant, may: bool):
    """The permission for every model does not include adapters."""
    adapter = ServedModel(name="tuned", max_model_len=None, created=0, parent="demo")
    caller = Caller(tenant=tenant, key=ApiKey(key_id="abcd2345", digest=""))
    assert may_call(caller, adapter) is may
    base = ServedModel(name="demo", max_model_len=None, created=0)
    assert may_call(caller, base) is tenant.may_use("demo")
    narrow = Caller(tenant=tenant, key=ApiKey(key_id="abcd2345", digest="", models=("other",)))
    assert not may_call(narrow, base)

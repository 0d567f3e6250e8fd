"""
The appliance's settings: read once, frozen, and the only place that reads the environment.

Sources, strongest first: `APPLIANCE_<SECTION>__<FIELD>` variables, then one YAML file, then the
defaults below.  An unknown section, field or `APPLIANCE_*` variable is an error, never ignored.
Secrets are paths of files; there is no default secret.
"""

import os
from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from ipaddress import ip_address
from pathlib import Path
from typing import Annotated, Any, Literal, get_args
from urllib.parse import urlsplit
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

import yaml
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainSerializer,
    ValidationError,
    field_validator,
    model_validator,
)
from pydantic_core import ErrorDetails

from appliance.errors import ConfigurationError
from appliance.infra.key_location import TokenKey, parse_key_location
from appliance.infra.plain_words import what_is_expected

PREFIX = "APPLIANCE_"
CONFIG_VARIABLE = f"{PREFIX}CONFIG"
"""Settings file of commands without `--config`."""
DEFAULT_CONFIG = Path("/etc/appliance/appliance.yaml")
"""Settings file without either, if it exists."""
ROOT = Path(__file__).resolve().parents[2]
DEMO_MODELS = ROOT / "demo" / "models" if (ROOT / "pyproject.toml").exists() else ROOT / "appliance_demo"
"""Of the checkout, or of the package that demo/pyproject.toml describes, installed beside this one."""
DEMO_TARGET = DEMO_MODELS / "demo-coder"
DEMO_DRAFT = DEMO_MODELS / "demo-coder-eagle31"
METHODS_WITH_DRAFT = frozenset({"eagle3", "draft_model"})
MOST_EGRESS_TARGETS = 24
LAST_PORT = 65535
ADMIN_CONNECTIONS = 256
"""Maximum connections of the admin listener."""
REMOVED: Mapping[str, str] = {
    "limits.share_without_database": (
        "a gateway that cannot reach the database uses what it has leased for limits.lease_seconds, then"
        " answers 503; remove the line"
    ),
    "monitor.cooldown_seconds": "a change waits for evidence, not for a time; remove the line",
    **{
        f"monitor.{name}": "monitor.exploration_share bounds exploration, which is always on; remove the line"
        for name in ("probe_share", "probe_seconds", "probe_longest_seconds", "probe_hopeless_seconds")
    },
    **{
        name: f"it is fixed at {value}; remove the line"
        for name, value in {
            "api.max_head_bytes": "65536",
            "api.max_headers": "100",
            "tenants.poll_seconds": "0.5",
            "pool.breaker_failures": "5",
            "pool.breaker_seconds": "5",
            "admission.headroom_requests": "8",
            "admission.retry_share": "0.2",
            "admission.retry_reserve": "100",
            "limits.renew_seconds": "0.5",
            "batch.parallel": "8",
            "monitor.window_drafts": "3200, in effective drafts",
            "monitor.margin": "0.02",
            "monitor.hard_off_retry_seconds": "21600",
            "recycle.canary_requests": "3",
            "recycle.canary_seconds": "60",
            "audit.batch_entries": "256",
            "audit.witness_timeout_seconds": "10",
            "console.login_attempts": "10",
            "console.login_seconds": "60",
            "tracing.queue_spans": "4096",
        }.items()
    },
}
"""Settings of earlier versions, `section.field`, each with what replaces it."""
SignatureAlgorithm = Literal[
    "RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "ES512", "EdDSA"
]

ScopeName = Literal["read", "tenants", "workers", "retention", "drafts"]
"""`AdminScope` of `appliance.tenancy.keys`, which imports this module."""


def _known_zone(name: str) -> str:
    try:
        return ZoneInfo(name).key
    except (ZoneInfoNotFoundError, ValueError, OSError) as error:
        raise ValueError(f"{name} is not a time zone; use a name such as Africa/Nairobi") from error


def split_host(text: str) -> tuple[str, int]:
    """Host and port of `10.0.0.5:8000`, `[fd00::5]:8000` or `worker:8000`; ValueError for other forms."""
    try:
        parts = urlsplit(f"//{text}")
        if parts.hostname and parts.port and parts.netloc == text and "@" not in text:
            return parts.hostname, parts.port
    except ValueError:
        pass
    raise ValueError(f"{text!r} is not a host and port; write 10.0.0.5:8000 or [fd00::5]:8000")


def _key_location(value: object) -> object:
    if not isinstance(value, str | Path | TokenKey | None):
        raise ValueError("write the path of a file, or the pkcs11: URI of a key in a token, as one text")  # noqa: TRY004
    return parse_key_location(value) if isinstance(value, str) else value


SigningKeyFile = Annotated[
    Path | TokenKey | None,
    BeforeValidator(_key_location),
    PlainSerializer(str, when_used="unless-none"),
]


class Section(BaseModel):
    """A frozen group of settings that refuses fields it does not know."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class ApiSettings(Section):
    """Where the gateway listens and what it accepts."""

    host: str = "127.0.0.1"
    """Address to listen on; loopback by default."""
    port: Annotated[int, Field(ge=0, le=65535)] = 8080
    """TCP port to listen on; with 0 the kernel chooses one, named in the ready line."""
    admin_host: str = "127.0.0.1"
    """Address of the admin listener, which serves metrics, the admin API and the console; only Prometheus and
    administrators should be able to reach it."""
    admin_port: Annotated[int, Field(ge=0, le=65535)] = 8081
    """TCP port of the admin listener; with 0 the kernel chooses one, named in the ready line."""
    max_body_bytes: Annotated[int, Field(ge=1024)] = 16 * 2**20
    """Maximum size of a request body, in bytes; a larger one gets 413 before it is read."""
    max_bodies_bytes: Annotated[int, Field(ge=1024)] = 512 * 2**20
    """Maximum bytes of request bodies in memory, each until it is answered; a further request gets 429.  In
    memory a body takes several times its size.  The admin listener has room for one largest body."""
    keep_alive_seconds: Annotated[float, Field(gt=0)] = 10.0
    """After this time without data on a stream the gateway sends a comment frame, so that proxies keep the
    connection."""
    stop_delay_seconds: Annotated[float, Field(ge=0)] = 0.0
    """Time a stopping gateway still serves; it closes each connection after its answer, so that clients go
    elsewhere.  New requests then get 503 with `Retry-After` until the running ones are finished.  For
    Kubernetes, whose Services send nothing to a pod some seconds after it began to stop.  0: it refuses
    connections at once, for proxies that then choose another gateway."""
    drain_seconds: Annotated[int, Field(ge=0)] = 30
    """Maximum time a stopping gateway waits for running requests before it aborts them."""
    share_prefix_cache: bool = False
    """Let tenants share the workers' prefix cache, and their caches of images, sound and video.  This is
    faster if they send the same, but the time to the first token then tells one tenant what another has
    sent."""
    silence_seconds: Annotated[float, Field(gt=0)] = 600.0
    """Maximum time without data from a worker, including before its first byte; then the request fails."""
    max_connections: Annotated[int, Field(ge=1)] = 10_000
    """Maximum open connections, including idle ones; a further one gets 503 and is closed.  The admin
    listener has 256 of its own."""
    head_seconds: Annotated[float, Field(gt=0)] = 20.0
    """Maximum time for a request's headers, and for a TLS handshake; then 408."""
    body_seconds: Annotated[float, Field(gt=0)] = 30.0
    """Maximum time for a request's body, plus one second per KiB; then 408."""
    idle_seconds: Annotated[int, Field(ge=1)] = 65
    """Close a connection after this time without a request; longer than the idle time-out of a proxy in
    front."""
    stalled_seconds: Annotated[float, Field(gt=0)] = 120.0
    """Maximum time a client may read nothing of an answer, plus one second per KiB it has read; then the
    connection is closed."""

    @model_validator(mode="after")
    def _the_largest_body_has_room(self) -> "ApiSettings":
        if self.max_bodies_bytes < self.max_body_bytes:
            message = "max_bodies_bytes is smaller than max_body_bytes: the largest body would have no room"
            raise ValueError(message)
        return self

    @property
    def admin_listener(self) -> "ApiSettings":
        """The admin listener's address and bounds; its connections are its own."""
        return self.model_copy(
            update={
                "host": self.admin_host,
                "port": self.admin_port,
                "max_connections": ADMIN_CONNECTIONS,
                "max_bodies_bytes": self.max_body_bytes,
            }
        )


class TlsSettings(Section):
    """
    Encrypted connections.

    Without a certificate the gateway serves plain HTTP, for loopback or behind a proxy on the same machine.
     Changed files are loaded at run time.
    """

    certificate_file: Path | None = None
    """Certificate chain (PEM), the gateway's own certificate first."""
    key_file: Path | None = None
    """Its private key (PEM)."""
    key_password_file: Path | None = None
    """File with the key's password; null if the key is not encrypted."""
    minimum_version: Literal["1.2", "1.3"] = "1.2"
    """Minimum TLS version; 1.3 is used if the client supports it."""
    client_ca_file: Path | None = None
    """Certificate authorities (PEM) of client certificates; null: no client certificates are requested."""
    client_tenants: dict[str, str] = {}
    """Tenant of each client certificate, by a name in the certificate: `uri:spiffe://bank/billing`,
    `dns:host.bank` or `cn:billing`."""
    require_client_certificate: bool = False
    """Refuse callers without a client certificate, and keys and tokens of another tenant than the
    certificate's; health and metrics need no certificate."""
    command_certificate_file: Path | None = None
    """Client certificate (PEM) of this machine's commands, if the gateway requires one."""
    command_key_file: Path | None = None
    """Its private key (PEM)."""

    @model_validator(mode="after")
    def _files_come_together(self) -> "TlsSettings":
        if (self.certificate_file is None) != (self.key_file is None):
            raise ValueError("certificate_file and key_file come together: set both or neither")
        if (self.command_certificate_file is None) != (self.command_key_file is None):
            message = "command_certificate_file and command_key_file come together: set both or neither"
            raise ValueError(message)
        if self.client_ca_file is None and (self.client_tenants or self.require_client_certificate):
            message = "client certificates need client_ca_file: set it to the authorities that sign them"
            raise ValueError(message)
        if self.client_ca_file is not None and self.certificate_file is None:
            raise ValueError("client_ca_file needs TLS: set certificate_file and key_file as well")
        if not all(name.startswith(("uri:", "dns:", "cn:")) for name in self.client_tenants):
            raise ValueError("client_tenants: each name starts with `uri:`, `dns:` or `cn:`")
        return self


class OidcSettings(Section):
    """
    Bearer tokens (JWT) of an identity provider, accepted in addition to API keys.

    They are verified offline with the provider's public keys, copied to a file.
    """

    jwks_file: Path | None = None
    """The provider's public keys (JSON Web Key Set); read again if the file changes.  Null: tokens are not
    accepted."""
    issuer: str = ""
    """Required value of `iss`, exact match."""
    audience: str = ""
    """Required value in `aud`: this gateway's name at the provider."""
    algorithms: Annotated[tuple[SignatureAlgorithm, ...], Field(min_length=1)] = (
        "RS256",
        "PS256",
        "ES256",
        "ES384",
        "EdDSA",
    )
    """Accepted signature algorithms; unsigned tokens and shared secrets are never accepted."""
    leeway_seconds: Annotated[float, Field(ge=0, le=300)] = 30.0
    """Maximum difference between the provider's clock and this one."""
    max_lifetime_seconds: Annotated[float, Field(ge=60)] = 86400.0
    """Maximum time from `iat` to `exp` of an accepted token."""
    tenant_claim: str = "tenant"
    """Claim with the tenant: a string, or a list of strings such as groups."""
    tenants: dict[str, str] = {}
    """Tenant for each value of that claim; if empty, the value is the tenant's name."""
    admin_claim: str | None = None
    """Claim that grants access to the admin API; null: tokens do not grant it."""
    admin_values: tuple[str, ...] = ()
    """Values of that claim that grant access.  Such a token cannot call models, like an admin key."""
    admin_scopes: dict[str, tuple[ScopeName, ...]] = {}
    """Scopes of each of these values, such as `{auditors: [read]}`; without an entry here, a value has all
    scopes.  A token with several values has the scopes of all of them."""
    admin_tenant: str = "operator"
    """Tenant recorded for admin tokens."""
    manage_claim: str | None = None
    """Claim that grants the callers of a tenant the making of keys for it; null: tokens do not grant it."""
    manage_values: tuple[str, ...] = ()
    """Values of that claim that grant it."""

    @model_validator(mode="after")
    def _tokens_say_whom_they_are_for(self) -> "OidcSettings":
        if self.jwks_file is not None and not (self.issuer and self.audience):
            message = "jwks_file needs issuer and audience: tokens for other services must be refused here"
            raise ValueError(message)
        if (self.admin_claim is None) != (not self.admin_values):
            raise ValueError("admin_claim and admin_values come together: set both or neither")
        if (self.manage_claim is None) != (not self.manage_values):
            raise ValueError("manage_claim and manage_values come together: set both or neither")
        if unknown := sorted(self.admin_scopes.keys() - set(self.admin_values)):
            raise ValueError(f"admin_scopes: {unknown[0]} is not one of admin_values, which grant access")
        return self


class DataSettings(Section):
    """Data on this machine's disk."""

    directory: Path = Path("data")
    """Directory of the database, keys and worker logs; created with mode 0700."""
    control_token_file: Path | None = None
    """Secret shared by gateways and workers, in a file of mode 0600; default: `control.token` in the data
    directory, created at the first start.  Machines that share a worker need the same one.  If it has several
    lines, gateways present the first, and workers accept all."""


class TenantsSettings(Section):
    """Tenants and keys; they are stored in the audit log's database."""

    file: Path | None = None
    """Tenants file (YAML), imported at each start: it adds and changes tenants, and removes none; default:
    `tenants.yaml` in the data directory, if it exists."""
    mac_key_file: Path | None = None
    """Key of the MAC that protects tenants and keys against changes in the database: at least 32 characters
    in a file of mode 0600; default: `tenants-mac.key` in the data directory, created at the first start.
    Gateways that share a database need the same one."""
    stale_seconds: Annotated[float, Field(ge=10)] | None = 900.0
    """Time without a confirmed read of tenants and keys after which callers get 503, because keys may have
    been revoked meanwhile; null: never."""


def control_port_of(chosen: int | None, port: int) -> int:
    """Port of the control listener of a worker at `port`: the one chosen, or the next."""
    return chosen or port + 1


class WorkerSettings(Section):
    """The vLLM worker that `appliance worker` and `appliance up` start."""

    model: Path = DEMO_TARGET
    """Directory of the target model's weights; a local path, not a hub name."""
    task: Literal["generate", "embed", "score"] = "generate"
    """Task of the model: `generate` text; `embed` for embeddings and similarity scores; `score` for a
    cross-encoder that scores and reranks.  Only `generate` uses a draft."""
    draft: Path | None = DEMO_DRAFT
    """Directory of the draft that `method` needs: an EAGLE 3 or 3.1 head, or a complete small model; null
    serves the target model alone."""
    bad_draft: Literal["refuse", "target_only"] = "refuse"
    """If the draft does not fit its target: refuse to start, or serve the target model alone."""
    served_name: str | None = None
    """Model name for clients; default: the last part of the model's path."""
    method: Literal["eagle3", "draft_model", "mtp", "ngram", "suffix", "none"] = "eagle3"
    """Drafting method; `eagle3` covers EAGLE 3 and 3.1, `draft_model` is an independent small model, `mtp`
    uses prediction layers in the target's weights, `ngram` and `suffix` repeat parts of the request, `none`
    serves the target model alone."""
    draft_tokens: Annotated[int, Field(ge=1, le=16)] = 3
    """Maximum draft tokens per step (K)."""
    draft_token_schedule: tuple[tuple[int, int, int], ...] | None = None
    """Ranges (first batch size, last batch size, K) with every K the worker may use; default: `draft_tokens`
    at every batch size except the largest few, which take 0, 1, 2, 3, 5 and 8 as far as they are fewer, so
    that all of them are compiled; the monitor then chooses among them."""
    device: Literal["auto", "cpu", "gpu"] = "auto"
    """Device; `auto` uses the GPU if the NVIDIA driver reports one."""
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto"
    """Data type; `auto` is the model's own, or float32 on a CPU without bfloat16."""
    max_model_len: Annotated[int, Field(ge=16)] | None = None
    """Maximum context in tokens; default: from the model's config."""
    max_num_seqs: Annotated[int, Field(ge=1)] = 64
    """Maximum requests decoded together (the largest batch size)."""
    tensor_parallel_size: Annotated[int, Field(ge=1)] = 1
    """Number of GPUs that share each layer."""
    pipeline_parallel_size: Annotated[int, Field(ge=1)] = 1
    """Number of pipeline stages that divide the layers."""
    gpu_memory_fraction: Annotated[float, Field(gt=0, le=1)] = 0.9
    """Maximum share of a GPU's memory for the worker."""
    cpu_kv_cache_gib: Annotated[float, Field(gt=0, le=65536)] = 1
    """Size of the KV cache on a CPU, in GiB."""
    eager: bool | None = None
    """Skip compilation and CUDA graphs; default: true on a CPU, false on a GPU."""
    host: str = "127.0.0.1"
    """Address the worker listens on; only gateways should be able to reach it."""
    scrape_token_file: Path | None = None
    """File with the token that Prometheus presents to read the worker's `/metrics`, and nothing else; null:
    only the control token opens it."""
    tls_certificate_file: Path | None = None
    """Certificate chain (PEM) of the worker; null: it serves plain HTTP.  Its supervisor also presents it to
    the worker as a client."""
    tls_key_file: Path | None = None
    """Its private key (PEM), not encrypted."""
    tls_client_ca_file: Path | None = None
    """Certificate authorities (PEM) of gateways; the worker then refuses connections without a certificate of
    theirs."""
    port: Annotated[int, Field(ge=0, le=65535)] = 0
    """Port the worker listens on; 0 picks a free one (only with `appliance up`)."""
    control_port: Annotated[int, Field(ge=1, le=65535)] | None = None
    """Port of the control listener in the worker's engine process, at the same address and with the same TLS;
    null: the one after the worker's own."""
    max_startup_seconds: Annotated[int, Field(ge=10)] = 1800
    """Maximum time to load the model; then the start counts as failed."""
    drain_seconds: Annotated[int, Field(ge=0)] = 30
    """Maximum time a stopping worker waits for its running requests; gateways send new ones to
    other workers."""
    max_restarts: Annotated[int, Field(ge=0)] = 3
    """Consecutive failed starts after which the supervisor gives up."""
    tool_call_parser: str | None = None
    """vLLM's parser of the model's tool calls (`hermes`, `llama3_json`, `mistral` ...); null: requests with
    tools are refused unless `tool_choice` is `none`."""
    reasoning_parser: str | None = None
    """vLLM's parser that separates reasoning from the answer (`qwen3` ...); null: all output is the
    answer."""
    extra_arguments: tuple[str, ...] = ()
    """Further vLLM arguments, passed unchanged; arguments that would open an egress are refused."""

    @property
    def cpu_kv_cache_bytes(self) -> int:
        return int(self.cpu_kv_cache_gib * 2**30)

    @property
    def own_draft(self) -> Path | None:
        """The draft, if the method reads one."""
        return self.draft if self.method in METHODS_WITH_DRAFT and self.task == "generate" else None

    @model_validator(mode="after")
    def _files_come_together(self) -> "WorkerSettings":
        if (self.tls_certificate_file is None) != (self.tls_key_file is None):
            raise ValueError("tls_certificate_file and tls_key_file come together: set both or neither")
        if self.tls_client_ca_file is not None and self.tls_certificate_file is None:
            raise ValueError(
                "tls_client_ca_file needs TLS: set tls_certificate_file and tls_key_file as well"
            )
        return self

    @model_validator(mode="after")
    def _ports_differ(self) -> "WorkerSettings":
        if self.port and self.control_port == self.port:
            raise ValueError("port and control_port must differ")
        if self.port == LAST_PORT and self.control_port is None:
            raise ValueError(f"no port follows port {LAST_PORT}: set control_port")
        return self


class PoolSettings(Section):
    """Workers started elsewhere that the gateway may also use."""

    urls: tuple[str, ...] = ()
    """Base URLs of running workers, such as `http://10.0.0.5:8000`.  The gateway sends the control token to
    each."""
    ca_file: Path | None = None
    """Certificate authorities (PEM) of `https://` workers; null: those of the system.  Changed files are
    loaded at run time."""
    certificate_file: Path | None = None
    """Client certificate (PEM) that the gateway presents to `https://` workers."""
    key_file: Path | None = None
    """Its private key (PEM), not encrypted."""
    connect_seconds: Annotated[float, Field(gt=0)] = 2.0
    """Maximum time to connect to a worker; then the gateway tries another one."""
    discover: str | None = None
    """Base URL whose host name resolves to all workers, such as `http://workers.llm.svc:8000` for a headless
    Kubernetes service: one worker per address.  With `https://`, each worker's certificate must have that
    name."""
    discover_seconds: Annotated[float, Field(gt=0)] = 5.0
    """Time between two resolutions of that name."""
    control_port: Annotated[int, Field(ge=1, le=65535)] | None = None
    """Port of the workers' control listeners (their `worker.control_port`), at the address of each worker;
    null: the one after the worker's own."""
    affinity_prefixes: Annotated[int, Field(ge=0)] = 16384
    """Maximum conversation prefixes for which the gateway remembers the last worker, so that its KV cache is
    used again; about 180 bytes each; 0: requests are routed by load alone."""

    @model_validator(mode="after")
    def _files_come_together(self) -> "PoolSettings":
        if (self.certificate_file is None) != (self.key_file is None):
            raise ValueError("certificate_file and key_file come together: set both or neither")
        return self


class PickerSettings(Section):
    """
    The endpoint picker (`appliance picker`): it tells the proxy of others which worker of `pool` to use.

    It polls workers as `monitor` says.  It serves TLS with the certificate of `tls`, and requires client
    certificates if `tls.client_ca_file` is set; without a certificate it makes one at each start, as most
    proxies expect, which do not verify it.
    """

    host: str = "127.0.0.1"
    """Address to listen on."""
    port: Annotated[int, Field(ge=0, le=65535)] = 9002
    """TCP port of the external processor (gRPC); with 0 the kernel chooses one, named in the ready line."""
    health_port: Annotated[int, Field(ge=0, le=65535)] = 9003
    """TCP port of the health service (gRPC) without TLS, for probes."""
    metrics_port: Annotated[int, Field(ge=0, le=65535)] = 9090
    """TCP port of `/metrics`."""
    plaintext: bool = False
    """Serve the external processor without TLS, for proxies that cannot use it."""


class AdmissionSettings(Section):
    """Which requests go to a worker, wait or are refused."""

    worker_requests: Annotated[int, Field(ge=1)] | None = None
    """Maximum requests of this gateway in one worker; default: the worker's batch size, or 256 if it does not
    report one, plus 8."""
    queue_requests: Annotated[int, Field(ge=0)] = 1024
    """Maximum queued requests per priority class.  When the queue is full, the tenant with the longest queue
    gets 429."""
    queue_bytes: Annotated[int, Field(ge=0)] = 128 * 2**20
    """Maximum bytes of queued request text per priority class; parsed content takes additional memory."""
    wait_seconds: Annotated[float, Field(gt=0)] = 60.0
    """Maximum time a request waits for a worker; then 429."""
    batch_wait_seconds: Annotated[float, Field(gt=0)] = 600.0
    """The same for requests of class `batch`."""
    worker_wait_seconds: Annotated[float, Field(ge=0)] = 60.0
    """Time since a model lost its last worker in which requests wait for one to return; after it, and if one
    has waited too long, they get 503 with `Retry-After`.  0: they get it at once."""
    standard_share: Annotated[float, Field(ge=0, lt=1)] = 0.2
    """Share of turns for class `standard` while `interactive` requests wait."""
    batch_share: Annotated[float, Field(ge=0, lt=1)] = 0.05
    """Share of turns for class `batch` while requests of higher classes wait."""
    tenant_weights: dict[str, Annotated[int, Field(ge=1)]] = {}
    """Consecutive turns by tenant name while other tenants wait; 1 for tenants not listed."""

    @model_validator(mode="after")
    def _something_is_left_for_the_highest_class(self) -> "AdmissionSettings":
        if self.standard_share + self.batch_share >= 1:
            message = "standard_share and batch_share must leave turns for interactive: lower one of them"
            raise ValueError(message)
        return self


class LimitSettings(Section):
    """How tenants' limits are counted; the same on all gateways that share a database."""

    time_zone: Annotated[str, AfterValidator(_known_zone)] = "UTC"
    """Time zone of token budgets' days and months, such as `Africa/Nairobi`."""
    guess_tokens: Annotated[int, Field(ge=0)] = 512
    """Tokens reserved for an answer if the client sets no maximum; the difference is settled when it ends."""
    lease_seconds: Annotated[float, Field(ge=2)] = 10.0
    """How long a gateway uses its leased share of a limit if it cannot reach the database, and for how long a
    killed gateway's share is unavailable to others."""


class BatchSettings(Section):
    """Tenants' files, and batches of requests that run in idle capacity."""

    directory: Path | None = None
    """Directory of the files, best on a volume of its own; default: `files` in the data directory, from where
    files of before are still served.  Gateways that share a database may share the directory: each writes its
    own part, and each can then serve every file."""
    max_file_bytes: Annotated[int, Field(ge=1024)] = 200 * 2**20
    """Maximum size of a file, in bytes."""
    upload_seconds: Annotated[float, Field(gt=0)] = 3600.0
    """Maximum time of an upload."""
    max_requests: Annotated[int, Field(ge=1)] = 50_000
    """Maximum requests in one batch."""
    tenant_bytes: Annotated[int, Field(ge=0)] = 10 * 2**30
    """Maximum bytes of one tenant's files, uploads in flight included; outputs of batches count, and are
    stored even beyond it, but then no new batch is accepted."""
    tenant_files: Annotated[int, Field(ge=0)] = 1000
    """Maximum files of one tenant, uploads in flight included."""
    tenant_batches: Annotated[int, Field(ge=0)] = 50
    """Maximum open batches of one tenant."""
    keep_free_bytes: Annotated[int, Field(ge=0)] = 2 * 2**30
    """Minimum free space on the disk of the files; uploads that would leave less are refused, and batches
    pause."""
    file_days: Annotated[int, Field(ge=1)] = 30
    """Delete a file after this number of days, unless its tenant chose another time."""
    concurrency: Annotated[int, Field(ge=1)] = 16
    """Maximum concurrent requests of batches in this gateway."""
    idle_share: Annotated[float, Field(gt=0, le=1)] = 0.5
    """A batch request starts only while its workers run fewer requests than this share of their batch size
    (see `admission.worker_requests`), counting all clients, and have no queue."""


class MonitorSettings(Section):
    """How acceptance and goodput are monitored, and when speculation stops and resumes."""

    interval_seconds: Annotated[float, Field(gt=0)] = 1.0
    """Time between two polls of each worker."""
    scrape_timeout_seconds: Annotated[float, Field(gt=0)] = 2.0
    """Maximum time of one poll; a later answer counts as failed and changes nothing."""
    control: Literal["auto", "observe"] = "auto"
    """`auto` controls workers; `observe` only measures, and every worker keeps its start configuration."""
    min_drafts: Annotated[int, Field(ge=1)] = 32
    """Minimum drafts for a verdict."""
    collapsed_below: Annotated[float, Field(ge=1)] = 1.25
    """Acceptance length below which the draft counts as collapsed, whatever its baseline."""
    exploration_share: Annotated[float, Field(gt=0, le=0.1)] = 0.01
    """Maximum share of a worker's time that may be lost to steps with other numbers of draft tokens, which
    measure whether those would pay.  A CPU worker that does not draft may lose as much as ten minutes allow
    within a few."""
    hard_off_after_seconds: Annotated[float, Field(ge=60)] | None = 3600.0
    """Restart a worker without its draft after this time without a draft that paid, if another worker can
    serve meanwhile; null: never."""
    lease_seconds: Annotated[float, Field(ge=5)] = 15.0
    """After this time without a renewal another gateway takes over control."""


class RecycleSettings(Section):
    """How a worker is recycled: restarted while others serve."""

    drain_seconds: Annotated[float, Field(ge=0)] = 60.0
    """Maximum time for its running requests; then it is restarted anyway."""
    start_seconds: Annotated[float, Field(gt=0)] = 1860.0
    """Maximum time until it answers again, including its shutdown."""


class DraftSettings(Section):
    """Draft models: where they are stored, and what a new one has to prove before it serves."""

    directory: Path | None = None
    """The draft registry, with data sets, training runs and evaluations; default: `drafts` in the data
    directory.  Workers on other machines need the same path, on a shared volume."""
    trusted_keys_file: Path | None = None
    """Public keys of importable drafts, one per line, as for bundles; null: only drafts made here."""
    signing_key_file: SigningKeyFile = None
    """Signing key of revisions made here, or the URI of one in a token, as `audit.signing_key_file`; default:
    `drafts.key` in the data directory, created when first needed."""
    trial_drafts: Annotated[int, Field(ge=64)] = 2000
    """Minimum drafts of a new draft model's canary, on served traffic."""
    trial_seconds: Annotated[float, Field(gt=0)] = 1800.0
    """Maximum time of the canary; if it is inconclusive by then, the draft is refused."""
    trial_margin: Annotated[float, Field(ge=0, le=0.5)] = 0.02
    """Maximum relative loss of acceptance length and of tokens per engine second in the canary."""


class WitnessSettings(Section):
    """An independent party that cosigns the log's newest checkpoint."""

    name: str
    """Name in its cosignatures, such as `auditor.example/witness`."""
    key: str
    """Its verifier key, `name+hash+base64`, or the path of a file with its keys, one a line."""
    url: str | None = None
    """Its address, such as `http://10.0.0.9:8090`; null: its cosignatures are transferred as files."""


def _is_http_url(url: str) -> bool:
    try:
        parts = urlsplit(url)
        fits = parts.scheme in {"http", "https"} and parts.hostname and parts.port != 0
    except ValueError:
        return False
    return bool(fits) and "@" not in url and "#" not in url


class ForwardSettings(Section):
    """Where the log is forwarded to: a SIEM that takes syslog over TLS."""

    destination: str
    """Host and port, such as `siem.hospital.example:6514`; its certificate must have this name."""
    ca_file: Path | None = None
    """Certificate authorities (PEM) of the destination; null: the system's."""
    certificate_file: Path | None = None
    """Client certificate (PEM, chain included), if the destination requires one."""
    key_file: Path | None = None
    """Its private key (PEM)."""
    format: Literal["json", "ocsf", "cef"] = "json"
    """Format of an event: `json`, `ocsf` (Open Cybersecurity Schema Framework 1.2) or `cef` (Common Event
    Format)."""
    allow_public: bool = False
    """Allow a destination with a public address, which is refused otherwise: entries name tenants."""

    @field_validator("destination")
    @classmethod
    def _is_host_and_port(cls, destination: str) -> str:
        split_host(destination)
        return destination

    @model_validator(mode="after")
    def _files_come_together(self) -> "ForwardSettings":
        if (self.certificate_file is None) != (self.key_file is None):
            raise ValueError("certificate_file and key_file come together: set both or neither")
        return self


def _refuse_open(value: object) -> object:
    if value == "open":
        raise ValueError("the mode open was removed: use spool with enough audit.spool_bytes, or strict")
    return value


class AuditSettings(Section):
    """The audit log."""

    origin: str = "appliance.local/audit"
    """Name of this log in every checkpoint and receipt; it cannot be changed later."""
    database_url: str | None = None
    """SQLAlchemy URL; default: SQLite file `audit.db` in the data directory."""
    signing_key_file: SigningKeyFile = None
    """Ed25519 key (PKCS#8 PEM, mode 0600), or the URI of one in a PKCS#11 token, with its module and the file
    of the PIN: `pkcs11:token=LABEL;object=LABEL?module-path=/PATH&pin-source=/PATH`; default: `audit.key` in
    the data directory."""
    gateway: str | None = None
    """Name under which this gateway writes the log, unique among gateways; default: created at the first
    start and kept in `gateway.id` in the data directory."""
    gateway_dead_seconds: Annotated[float, Field(gt=0)] = 300.0
    """After this time without a heartbeat a gateway counts as dead, and its open requests are ended in the
    log."""
    batch_seconds: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Maximum time a commit waits for further entries; 0 commits what has queued meanwhile."""
    queue_entries: Annotated[int, Field(ge=1)] = 4096
    """Maximum entries waiting for a commit; if the queue is full, requests get 503."""
    append_timeout_seconds: Annotated[float, Field(gt=0)] = 10.0
    """Maximum time until an entry is durable; then its request is refused."""
    checkpoint_seconds: Annotated[float, Field(gt=0)] = 1.0
    """Maximum time between a new entry and a signed checkpoint that covers it."""
    checkpoint_entries: Annotated[int, Field(ge=1)] = 1000
    """Maximum new entries before a checkpoint is signed."""
    heartbeat_seconds: Annotated[float, Field(gt=0)] = 60.0
    """Time between checkpoints of an idle log."""
    post_quantum: bool = False
    """Also sign every checkpoint with ML-DSA-44, by the key `audit-mldsa.key` next to the signing key,
    created at the first start; a checkpoint then takes 3.5 KiB more.  Auditors need both public keys."""
    witnesses: tuple[WitnessSettings, ...] = ()
    """Witnesses that cosign the log, each with `name`, `key` (its verifier keys, or a file with one per line)
    and, if it is reachable, `url`; without `url`, its cosignatures are transferred as files."""
    witness_seconds: Annotated[float, Field(ge=1)] = 60.0
    """Minimum time between two cosignatures of the same witness."""
    timestamp_certificate_file: Path | None = None
    """Certificates (PEM) of the time-stamp authority, or of the authority that issues them; null: the log is
    not time-stamped."""
    timestamp_url: str | None = None
    """Its address (RFC 3161 over HTTP), such as `https://tsa.example/tsr`; null: time stamps are transferred
    as files."""
    timestamp_policy: str | None = None
    """Object identifier of the policy that time stamps must have; null: any."""
    timestamp_seconds: Annotated[float, Field(ge=60)] = 3600.0
    """Time between two time stamps of a log that grows."""
    timestamp_ca_file: Path | None = None
    """Certificate authorities (PEM) of an `https://` address; null: those of the system."""
    timestamp_client_certificate_file: Path | None = None
    """Client certificate (PEM) that the gateway presents to the time-stamp authority."""
    timestamp_client_key_file: Path | None = None
    """Its private key (PEM), not encrypted."""
    forward: ForwardSettings | None = None
    """Forward the log to a SIEM by syslog over TLS, with `destination` (host and port), `ca_file`,
    `certificate_file` and `key_file` (client certificate), `format` (`json`, `ocsf` or `cef`) and
    `allow_public` (a public address is refused otherwise); null: it is not forwarded."""
    durability: Annotated[Literal["strict", "spool"], BeforeValidator(_refuse_open)] = "strict"
    """What happens to requests while the database takes no entries.  `strict`: they are refused with 503.
    `spool`: entries go to a local spool; once it is full, requests are refused with 503."""
    spool_directory: Path | None = None
    """Directory of the spool, one per gateway, preferably not on the database's disk; default: `spool` in the
    data directory."""
    spool_bytes: Annotated[int, Field(ge=0)] = 256 * 2**20
    """Maximum size of the spool in bytes; a thousand entries take about half a MiB.  0 with `strict` only."""
    spool_after_seconds: Annotated[float, Field(gt=0)] = 1.0
    """Maximum time the database may take over an entry before it goes to the spool."""
    low_disk_bytes: Annotated[int, Field(ge=0)] = 2**30
    """Free space on the disk of the database (SQLite), the spool or the data directory below which operators
    are warned."""
    verify_seconds: Annotated[float, Field(ge=0)] = 3600.0
    """Time between two rounds of the check of stored entries, which reads the whole log within a day;
    0: never."""
    payload_keys_directory: Path | None = None
    """Directory, mode 0700, of the keys of stored content; default: `payload-keys` in the data directory.
    Gateways that share a database need the same.  Back it up apart from the database, with a short
    retention."""
    payload_master_key_file: Path | None = None
    """File, mode 0600, of 32 random bytes in base64 that encrypt those keys; default: they are not
    encrypted."""
    payload_rotation_days: Annotated[float, Field(gt=0)] = 7.0
    """Age of a tenant's key after which new content gets a new key."""
    payload_max_bytes: Annotated[int, Field(ge=1024)] = 4 * 2**20
    """Maximum stored bytes of an answer; of a longer one the beginning is stored, and the log records it."""
    payload_queue_bytes: Annotated[int, Field(ge=2**20)] = 128 * 2**20
    """Maximum content waiting to be stored, in bytes; a request that would exceed it gets 503."""
    payload_retention_days: Annotated[int, Field(ge=1)] | None = None
    """Default age at which `appliance audit prune` erases content; entries stay."""
    dispose_after_days: Annotated[int, Field(ge=183)] | None = None
    """Age at which entries are removed: on SQLite by the gateway, once a day; on PostgreSQL by
    `appliance audit dispose`, which you run as the owner's role.  Null: entries stay."""
    two_person: bool = False
    """Erasing kept content and releasing a legal hold wait for the approval of a second administrator, up to
    a day; pruning by `payload_retention_days` does not, and entries are disposed of by `dispose_after_days`
    only.  Set it on every gateway."""

    @field_validator("timestamp_url")
    @classmethod
    def _is_a_timestamp_url(cls, url: str | None) -> str | None:
        if url is not None and not _is_http_url(url):
            raise ValueError("write http://host/path or https://host/path, without user or fragment")
        return url

    @model_validator(mode="after")
    def _timestamps_can_be_requested(self) -> "AuditSettings":
        if (self.timestamp_client_certificate_file is None) != (self.timestamp_client_key_file is None):
            message = "timestamp_client_certificate_file and timestamp_client_key_file come together"
            raise ValueError(message)
        is_https = (self.timestamp_url or "").startswith("https://")
        if not is_https and (self.timestamp_ca_file or self.timestamp_client_key_file):
            message = "timestamp_ca_file and timestamp_client_key_file are for a timestamp_url with https://"
            raise ValueError(message)
        if self.timestamp_certificate_file is None and (self.timestamp_url or self.timestamp_policy):
            message = "time stamps are trusted by a certificate: set timestamp_certificate_file"
            raise ValueError(message)
        return self


def _as_word(value: object) -> object:
    """YAML reads a bare `on` and `off` as yes and no."""
    return {True: "on", False: "off"}[value] if isinstance(value, bool) else value


class SovereigntySettings(Section):
    """What keeps data inside, in addition to the network around the appliance."""

    wall: Annotated[Literal["on", "off", "required"], BeforeValidator(_as_word)] = "on"
    """Make the kernel (Landlock, Linux 6.7) refuse TCP connections to ports that these settings do not imply,
    for gateway, worker and their child processes, and (Linux 5.13) hide a gateway's data and secrets from a
    worker on the same machine.  `on` continues if the kernel cannot; `required` refuses to start."""
    connect_ports: tuple[Annotated[int, Field(ge=1, le=65535)], ...] = ()
    """Additional TCP ports to which connections are allowed, such as those of workers added later
    and of their control listeners."""


class EgressSettings(Section):
    """
    The egress check: each gateway makes outbound attempts that have to fail.

    The addresses are used for nothing else.  `off` by default: an operator has to agree before a program
    contacts outside addresses.
    """

    mode: Annotated[Literal["off", "warn", "strict"], BeforeValidator(_as_word)] = "off"
    """`off`: no check except `appliance egress check`.  `warn`: checks are recorded, and `/readyz` warns.
    `strict`: a gateway is ready only after a check with result `closed`, and not after one with result `open`
    until the next `closed`."""
    interval_seconds: Annotated[float, Field(ge=1)] = 3600.0
    """Time between two checks; the first is made at the start."""
    retry_seconds: Annotated[float, Field(ge=1)] = 60.0
    """Time to the next check after a result other than `closed`, if that is sooner."""
    timeout_seconds: Annotated[float, Field(ge=0.1, le=60)] = 3.0
    """Maximum time of each attempt; all run concurrently."""
    tcp_targets: tuple[str, ...] = (
        "1.1.1.1:443",
        "8.8.8.8:443",
        "192.0.2.1:443",
        "[2606:4700:4700::1111]:443",
        "[2001:4860:4860::8888]:443",
        "[2001:db8::1]:443",
    )
    """Addresses and ports that must refuse a connection: public resolvers, where a server always listens, and
    addresses reserved for documentation, where none can."""
    udp_targets: tuple[str, ...] = (
        "8.8.8.8:53",
        "9.9.9.9:53",
        "192.0.2.1:53",
        "[2620:fe::fe]:53",
        "[2001:db8::1]:53",
    )
    """Addresses and ports that must not answer a DNS query."""
    metadata_targets: tuple[str, ...] = ("169.254.169.254:80", "[fd00:ec2::254]:80")
    """Metadata services of clouds, which must refuse a connection as well."""
    canary_name: str | None = "example.com"
    """Public name that this machine's resolver must not resolve, since that needs an outside server; null:
    not checked."""
    control: str | None = None
    """Host and port inside the enclave that must accept a connection, such as a worker's: only with it does a
    failed egress attempt prove anything.  Default: the database, if it is PostgreSQL; otherwise a listener on
    loopback that the check opens, which proves least."""

    @field_validator("tcp_targets", "udp_targets", "metadata_targets")
    @classmethod
    def _are_addresses(cls, targets: tuple[str, ...]) -> tuple[str, ...]:
        for text in targets:
            host, _port = split_host(text)
            try:
                ip_address(host)
            except ValueError as error:
                message = f"{text}: write an IP address, not a name, so that no resolver is needed"
                raise ValueError(message) from error
        return targets

    @field_validator("control")
    @classmethod
    def _has_a_port(cls, control: str | None) -> str | None:
        if control is not None:
            split_host(control)
        return control

    @model_validator(mode="after")
    def _are_neither_too_many_nor_too_few(self) -> "EgressSettings":
        if len(self.tcp_targets) + len(self.udp_targets) + len(self.metadata_targets) > MOST_EGRESS_TARGETS:
            raise ValueError(f"at most {MOST_EGRESS_TARGETS} targets together: an audit entry holds no more")
        if self.mode == "strict" and not (self.tcp_targets or self.udp_targets or self.metadata_targets):
            message = "strict needs targets: without any, no check returns `closed` and no gateway gets ready"
            raise ValueError(message)
        return self


class CostSettings(Section):
    """
    Recording of engine time and energy, and the prices of cost reports.

    Seconds and tokens need no settings; a missing price is not in the sums, and the report says so.
    The formulas are in [What serving costs](../explanation/cost.md).
    """

    currency: Annotated[str, Field(pattern=r"^[A-Za-z]{1,8}$")] = "USD"
    """Currency of all prices; a label, nothing is converted."""
    worker_price: Annotated[float, Field(ge=0)] | None = None
    """Purchase price of one worker's machine, depreciated evenly over `depreciation_years`."""
    depreciation_years: Annotated[float, Field(gt=0)] = 4.0
    """Years over which `worker_price` is depreciated."""
    worker_price_per_hour: Annotated[float, Field(ge=0)] | None = None
    """Price of one worker's rented machine per hour; instead of `worker_price`."""
    people_per_month: Annotated[float, Field(ge=0)] | None = None
    """Monthly cost of the people who run this installation, divided over the time of all workers."""
    power_price_per_kwh: Annotated[float, Field(ge=0)] | None = None
    """Price of one kWh at the meter."""
    pue: Annotated[float, Field(ge=1)] = 1.0
    """Power usage effectiveness: energy at the meter per unit used by a machine, cooling included."""
    watts_idle: Annotated[float, Field(ge=0)] | None = None
    """Power draw of a worker's machine while its engine is idle, if no GPU measures it."""
    watts_busy: Annotated[float, Field(ge=0)] | None = None
    """Power draw while its engine works, if no GPU measures it."""
    watts_host: Annotated[float, Field(ge=0)] = 0.0
    """Power draw of a worker's machine without its GPUs, added to what these measure."""
    flush_seconds: Annotated[float, Field(ge=1, le=60)] = 30.0
    """Maximum time between two writes to the database, and so the maximum loss in a crash."""
    retention_days: Annotated[int, Field(ge=1)] = 800
    """Delete recorded usage after this number of days."""

    @model_validator(mode="after")
    def _one_kind_of_price(self) -> "CostSettings":
        if self.worker_price is not None and self.worker_price_per_hour is not None:
            raise ValueError(
                "worker_price is for a bought machine, worker_price_per_hour for a rented one: set only one"
            )
        if (self.watts_idle is None) != (self.watts_busy is None):
            raise ValueError("watts_idle and watts_busy come together: set both or neither")
        return self


class ConsoleSettings(Section):
    """The operator console: web pages at `/console` for people with an admin key."""

    enabled: bool = True
    """Serve the pages; the admin API is served either way."""
    idle_seconds: Annotated[float, Field(ge=1)] = 900.0
    """End a session after this time without a click; automatic refreshes do not count."""
    session_seconds: Annotated[float, Field(ge=1)] = 28800.0
    """Maximum duration of a session."""
    behind_tls: bool = False
    """Set it if a proxy in front terminates TLS: browsers then send the session cookie over encrypted
    connections only.  With the gateway's own TLS that is always so."""


class TracingSettings(Section):
    """
    Traces of requests, sent to an OpenTelemetry collector inside the enclave; off by default.

    A trace has durations by component and names the tenant; it never contains prompts or answers.
    [How to set it up](../how-to/trace-requests.md).
    """

    enabled: bool = False
    """Trace requests, and have the worker of this process trace its share of them."""
    endpoint: str = "http://127.0.0.1:4318/v1/traces"
    """OTLP over HTTP (protobuf) endpoint of the collector, path included."""
    ca_file: Path | None = None
    """Certificate authorities (PEM) of the collector; null: the system's."""
    allow_public: bool = False
    """Allow an endpoint with a public address, which is refused otherwise: traces name tenants and models."""
    sample_ratio: Annotated[float, Field(ge=0, le=1)] = 0.1
    """Share of requests that are traced."""
    client_context: Literal["link", "ignore", "continue"] = "link"
    """Handling of a client's `traceparent`: `link` starts a new trace that links to it, `ignore` ignores it,
    `continue` continues it.  With `continue`, callers decide what is traced, so use it only if your own proxy
    is the only client."""
    interval_seconds: Annotated[float, Field(gt=0, le=60)] = 2.0
    """Maximum time spans wait to be sent together."""
    timeout_seconds: Annotated[float, Field(gt=0, le=60)] = 5.0
    """Maximum time the collector may take for a batch of spans; then it is dropped."""

    @field_validator("endpoint")
    @classmethod
    def _is_a_url(cls, endpoint: str) -> str:
        if not _is_http_url(endpoint) or "?" in endpoint:
            message = "write http://host:4318/v1/traces or https://..., without user, query or fragment"
            raise ValueError(message)
        return endpoint

    @model_validator(mode="after")
    def _stays_inside(self) -> "TracingSettings":
        parts = urlsplit(self.endpoint)
        if self.ca_file is not None and parts.scheme != "https":
            raise ValueError("ca_file is for an endpoint that begins with https://")
        try:
            is_public = ip_address(parts.hostname or "").is_global
        except ValueError:
            is_public = False  # a name: looked up when a process starts
        if is_public and not self.allow_public:
            address = parts.hostname
            message = f"endpoint is {address}, a public address: name a collector inside, or set allow_public"
            raise ValueError(message)
        return self


class LogSettings(Section):
    """The operator log; it never contains prompts or completions."""

    level: Literal["debug", "info", "warning", "error"] = "info"
    """Minimum severity of written events."""
    format: Literal["auto", "json", "console"] = "auto"
    """`auto` writes JSON to standard error; `up`, `gateway` and `worker` on a terminal write it to
    `logs/appliance.log` in the data directory instead, of at most 64 MiB; three older files are kept.  `json`
    and `console` write to standard error."""


class Settings(Section):
    """All settings of one appliance."""

    api: ApiSettings = ApiSettings()
    tls: TlsSettings = TlsSettings()
    oidc: OidcSettings = OidcSettings()
    data: DataSettings = DataSettings()
    tenants: TenantsSettings = TenantsSettings()
    worker: WorkerSettings = WorkerSettings()
    pool: PoolSettings = PoolSettings()
    picker: PickerSettings = PickerSettings()
    admission: AdmissionSettings = AdmissionSettings()
    limits: LimitSettings = LimitSettings()
    batch: BatchSettings = BatchSettings()
    monitor: MonitorSettings = MonitorSettings()
    recycle: RecycleSettings = RecycleSettings()
    drafts: DraftSettings = DraftSettings()
    audit: AuditSettings = AuditSettings()
    sovereignty: SovereigntySettings = SovereigntySettings()
    egress: EgressSettings = EgressSettings()
    cost: CostSettings = CostSettings()
    console: ConsoleSettings = ConsoleSettings()
    tracing: TracingSettings = TracingSettings()
    log: LogSettings = LogSettings()

    @model_validator(mode="after")
    def _spool_has_room(self) -> "Settings":
        if self.audit.durability == "spool" and not self.audit.spool_bytes:
            raise ValueError("audit.durability is spool and audit.spool_bytes is 0: give the spool some room")
        return self


def load_settings(
    file: Path | None = None,
    *,
    environment: Mapping[str, str] | None = None,
    overrides: Mapping[str, Mapping[str, Any]] | None = None,
) -> Settings:
    """
    Read file, environment and command line (`overrides`, the strongest) into one frozen `Settings`.

    Raises ConfigurationError: a line for each problem, which names the setting and what is wrong with it.
    """
    values = _read_file(file) if file else {}
    variables, problems = _read_environment(os.environ if environment is None else environment)
    _merge(values, variables)
    _merge(values, overrides or {})
    try:
        settings = Settings.model_validate(values)
    except ValidationError as error:
        problems += [_describe(problem) for problem in error.errors(include_url=False, include_input=False)]
        raise ConfigurationError("\n".join(problems)) from error
    if problems:
        raise ConfigurationError("\n".join(problems))
    return settings


def _read_file(file: Path) -> dict[str, dict[str, Any]]:
    try:
        content = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"cannot read the settings file {file}: {error}") from error
    except (yaml.YAMLError, ValueError) as error:  # a ValueError is a date that does not exist
        message = f"the settings file {file} is not YAML: {' '.join(str(error).split())}"
        raise ConfigurationError(message) from error
    if content is None:
        return {}
    if not isinstance(content, dict) or not all(isinstance(section, dict) for section in content.values()):
        message = f"the settings file {file} must hold sections such as `api:` with fields below them"
        raise ConfigurationError(message)
    return content


def _read_environment(environment: Mapping[str, str]) -> tuple[dict[str, dict[str, Any]], list[str]]:
    """Return what the variables set, and the problems of those that are no settings."""
    values: dict[str, dict[str, Any]] = {}
    problems = []
    for name, text in environment.items():
        if not name.startswith(PREFIX) or name == CONFIG_VARIABLE:
            continue
        section, separator, field = name.removeprefix(PREFIX).lower().partition("__")
        if not separator or section not in Settings.model_fields:
            known = [
                PREFIX + setting.upper().replace(".", "__")
                for setting in _setting_names(Settings)
                if setting.count(".") == 1
            ]
            if close := get_close_matches(name, known, n=1):
                problems.append(f"{name} is not a setting; did you mean {close[0]}?")
            else:
                sections = ", ".join(Settings.model_fields)
                form = f"{PREFIX}<SECTION>__<FIELD>, with a section of {sections}"
                problems.append(f"{name} is not a setting: use {form}")
            continue
        values.setdefault(section, {})[field] = _parse_scalar(text)
    return values, problems


def _parse_scalar(text: str) -> Any:  # noqa: ANN401 - the field's type decides; pydantic reads it
    if not text.startswith(("[", "{")) and text not in {"", "~", "null"}:
        return text
    try:
        return yaml.safe_load(text)
    except (yaml.YAMLError, ValueError):
        return text


def _merge(values: dict[str, dict[str, Any]], stronger: Mapping[str, Mapping[str, Any]]) -> None:
    for section, fields in stronger.items():
        values[section] = {**values.get(section, {}), **fields}


def _describe(problem: ErrorDetails) -> str:
    where = ".".join(str(part) for part in problem["loc"])
    if problem["type"] == "extra_forbidden":
        if (what_now := REMOVED.get(where)) is not None:
            return f"{where} is no longer a setting: {what_now}"
        nearest = _nearest(".".join(part for part in problem["loc"] if isinstance(part, str)))
        what_now = "`appliance config` lists all of them" if nearest is None else f"did you mean {nearest}?"
        return f"{where} is not a setting; {what_now}"
    what = what_is_expected(problem)
    return f"{where}: {what}" if where else what


def _nearest(name: str) -> str | None:
    """Return the setting probably meant: one spelt alike in its section, or of its name in another."""
    section, _, field = name.rpartition(".")
    split = [known.rpartition(".") for known in _setting_names(Settings)]
    beside = [known[2] for known in split if known[0] == section]
    if close := get_close_matches(field, beside, n=1):
        return f"{section}.{close[0]}" if section else close[0]
    return next(("".join(known) for known in split if known[2] == field), None)


def _setting_names(model: type[BaseModel]) -> Iterator[str]:
    """Yield the names of all settings and their sections, such as `audit` and `audit.forward.format`."""
    for name, field in model.model_fields.items():
        yield name
        for part in (field.annotation, *get_args(field.annotation)):
            if isinstance(part, type) and issubclass(part, BaseModel):
                yield from (f"{name}.{inner}" for inner in _setting_names(part))


def process_environment() -> Mapping[str, str]:
    return dict(os.environ)


def forget_variables(prefix: str) -> None:
    """Remove variables with this prefix from the environment, before a library reads them."""
    for name in [name for name in os.environ if name.startswith(prefix)]:
        del os.environ[name]

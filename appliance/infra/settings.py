"""
The appliance's settings: read once, frozen, and the only place that reads the environment.

Sources, strongest first: `APPLIANCE_<SECTION>__<FIELD>` variables, then one YAML file, then the
defaults below.  An unknown section, field or `APPLIANCE_*` variable is an error, never ignored.
Secrets are paths of files; there is no default secret.
"""

import os
from collections.abc import Mapping
from ipaddress import ip_address
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

import yaml
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    field_validator,
    model_validator,
)

from appliance.errors import ConfigurationError

PREFIX = "APPLIANCE_"
ROOT = Path(__file__).resolve().parents[2]
DEMO_TARGET = ROOT / "demo" / "models" / "demo-coder"
DEMO_DRAFT = ROOT / "demo" / "models" / "demo-coder-eagle31"
MOST_EGRESS_TARGETS = 24
REMOVED: Mapping[str, str] = {
    "limits.share_without_database": (
        "a gateway that cannot reach the database uses what it has leased for limits.lease_seconds, then"
        " answers 503; remove the line"
    ),
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
            "monitor.probe_hopeless_seconds": "900",
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


def _known_zone(name: str) -> str:
    try:
        return ZoneInfo(name).key
    except (ZoneInfoNotFoundError, ValueError, OSError) as error:
        message = f"{name} is no time zone; use a name such as Africa/Nairobi"
        raise ValueError(message) from error


def split_host(text: str) -> tuple[str, int]:
    """
    Host and port of `10.0.0.5:8000`, `[fd00::5]:8000` or `worker:8000`.

    Raises:
        ValueError: it is none of these.
    """
    try:
        parts = urlsplit(f"//{text}")
        if parts.hostname and parts.port and parts.netloc == text and "@" not in text:
            return parts.hostname, parts.port
    except ValueError:
        pass
    message = f"{text!r} is no host and port; write 10.0.0.5:8000 or [fd00::5]:8000"
    raise ValueError(message)


class Section(BaseModel):
    """A frozen group of settings that refuses fields it does not know."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


class ApiSettings(Section):
    """Where the gateway listens and what it accepts."""

    host: str = "127.0.0.1"
    """Address to listen on; loopback unless told otherwise."""
    port: Annotated[int, Field(ge=0, le=65535)] = 8080
    """TCP port to listen on; 0 lets the kernel choose one, which the ready line then names."""
    max_body_bytes: Annotated[int, Field(ge=1024)] = 16 * 2**20
    """Largest request body accepted, in bytes; more is answered 413 before it is read."""
    max_bodies_bytes: Annotated[int, Field(ge=1024)] = 512 * 2**20
    """Most bytes of request bodies held at once, each until it has been answered; a further one is answered
    429.  In memory a body takes several times its bytes."""
    keep_alive_seconds: Annotated[float, Field(gt=0)] = 10.0
    """Silence on a stream after which a comment frame is sent, so proxies do not cut it."""
    drain_seconds: Annotated[int, Field(ge=0)] = 30
    """How long a stopping gateway lets running requests finish before it ends them."""
    share_prefix_cache: bool = False
    """Let tenants share what workers keep of prompts.  That is faster where they send the same ones, but how
    soon an answer begins then tells one tenant what another has sent."""
    silence_seconds: Annotated[float, Field(gt=0)] = 600.0
    """How long a worker may send nothing before the request fails, its first byte included."""
    max_connections: Annotated[int, Field(ge=1)] = 10_000
    """Most connections held at once, idle ones included; a further one is answered 503 and closed."""
    head_seconds: Annotated[float, Field(gt=0)] = 20.0
    """How long a request's headers may take to arrive, and a TLS handshake; then 408."""
    body_seconds: Annotated[float, Field(gt=0)] = 30.0
    """How long a request's body may take to arrive, on top of one second for each KiB of it; then 408."""
    idle_seconds: Annotated[int, Field(ge=1)] = 65
    """How long a connection may stay open without a request; longer than a proxy in front keeps its own."""
    stalled_seconds: Annotated[float, Field(gt=0)] = 120.0
    """How long a client may read nothing of an answer that waits for it, on top of one second for each KiB
    that it does read; then it is cut off."""

    @model_validator(mode="after")
    def _the_largest_body_has_room(self) -> "ApiSettings":
        if self.max_bodies_bytes < self.max_body_bytes:
            message = "max_bodies_bytes is smaller than max_body_bytes: the largest body would have no room"
            raise ValueError(message)
        return self


class TlsSettings(Section):
    """
    Encrypted connections.

    Without a certificate the gateway speaks plain HTTP, which is for loopback, or behind a proxy on the same
    machine.  Changed files are taken over while it runs.
    """

    certificate_file: Path | None = None
    """Certificate chain (PEM), the gateway's own first."""
    key_file: Path | None = None
    """Its private key (PEM)."""
    key_password_file: Path | None = None
    """File with the key's password; null: the key is not encrypted."""
    minimum_version: Literal["1.2", "1.3"] = "1.2"
    """Oldest TLS accepted; 1.3 is used wherever the client can."""
    client_ca_file: Path | None = None
    """Authorities (PEM) whose client certificates are believed; null: none is asked for."""
    client_tenants: dict[str, str] = {}
    """Tenant of each client certificate, by a name in it: `uri:spiffe://bank/billing`, `dns:host.bank` or
    `cn:billing`."""
    require_client_certificate: bool = False
    """Refuse callers without a client certificate, and keys and tokens that belong to another tenant
    than it does; health and metrics need none."""
    command_certificate_file: Path | None = None
    """Client certificate (PEM) that commands of this machine show, where one is required."""
    command_key_file: Path | None = None
    """Its private key (PEM)."""

    @model_validator(mode="after")
    def _files_come_together(self) -> "TlsSettings":
        if (self.certificate_file is None) != (self.key_file is None):
            message = "certificate_file and key_file come together: set both or neither"
            raise ValueError(message)
        if (self.command_certificate_file is None) != (self.command_key_file is None):
            message = "command_certificate_file and command_key_file come together: set both or neither"
            raise ValueError(message)
        if self.client_ca_file is None and (self.client_tenants or self.require_client_certificate):
            message = "client certificates are believed only if client_ca_file names who signs them"
            raise ValueError(message)
        if self.client_ca_file is not None and self.certificate_file is None:
            message = "client_ca_file needs TLS: set certificate_file and key_file as well"
            raise ValueError(message)
        if not all(name.startswith(("uri:", "dns:", "cn:")) for name in self.client_tenants):
            message = "client_tenants: each name starts with `uri:`, `dns:` or `cn:`"
            raise ValueError(message)
        return self


class OidcSettings(Section):
    """
    Bearer tokens (JWT) of an identity provider, accepted beside API keys.

    They are checked offline, against the keys the provider publishes, copied here as a file.
    """

    jwks_file: Path | None = None
    """The provider's public keys (JSON Web Key Set); read again when it changes.  Null: no tokens."""
    issuer: str = ""
    """What `iss` must say, to the letter."""
    audience: str = ""
    """What `aud` must say or contain: the name this gateway has at the provider."""
    algorithms: Annotated[tuple[SignatureAlgorithm, ...], Field(min_length=1)] = (
        "RS256",
        "PS256",
        "ES256",
        "ES384",
        "EdDSA",
    )
    """Signatures accepted; unsigned tokens and shared secrets never are."""
    leeway_seconds: Annotated[float, Field(ge=0, le=300)] = 30.0
    """How far the provider's clock and this one may be apart."""
    tenant_claim: str = "tenant"
    """Claim that says whose a token is: a word, or a list of words such as groups."""
    tenants: dict[str, str] = {}
    """Tenant for each value of that claim; empty: the value is the tenant's name."""
    admin_claim: str | None = None
    """Claim that opens the admin API; null: tokens never do."""
    admin_values: tuple[str, ...] = ()
    """Values of that claim that open it.  Such a token cannot call models, as an admin key cannot."""
    admin_tenant: str = "operator"
    """Tenant that admin tokens are recorded under."""

    @model_validator(mode="after")
    def _tokens_say_whom_they_are_for(self) -> "OidcSettings":
        if self.jwks_file is not None and not (self.issuer and self.audience):
            message = "jwks_file needs issuer and audience: a token made for others must not be taken here"
            raise ValueError(message)
        if (self.admin_claim is None) != (not self.admin_values):
            message = "admin_claim and admin_values come together: set both or neither"
            raise ValueError(message)
        return self


class DataSettings(Section):
    """What is kept on this machine's disk."""

    directory: Path = Path("data")
    """Directory for the database, keys and worker logs; created mode 0700."""
    control_token_file: Path | None = None
    """Secret shared by control and workers, in a file of mode 0600; default: `control.token` in the
    data directory, made at the first start.  Machines that share a worker need the same."""


class TenantsSettings(Section):
    """Who may call; tenants and keys are in the audit log's database."""

    file: Path | None = None
    """Tenants file (YAML), imported at each start: it adds and changes, and removes nothing; default:
    `tenants.yaml` in the data directory, if there is one."""


class WorkerSettings(Section):
    """The vLLM worker that `appliance worker` and `appliance up` start."""

    model: Path = DEMO_TARGET
    """Directory of the target model's weights; always local, never a hub name."""
    task: Literal["generate", "embed", "score"] = "generate"
    """What the model is for: `generate` text; `embed` for embeddings, and scores by their likeness;
    `score` for a cross-encoder that scores and reranks.  Only `generate` uses a draft."""
    draft: Path | None = DEMO_DRAFT
    """Directory of the draft head (EAGLE 3 or 3.1); null serves the target alone."""
    bad_draft: Literal["refuse", "target_only"] = "refuse"
    """What to do with a draft that does not fit its target: not to start, or to serve the target alone."""
    served_name: str | None = None
    """Name clients use in `model`; default: the last part of the model's path."""
    method: Literal["eagle3", "ngram", "suffix", "mtp", "none"] = "eagle3"
    """How drafts are made; `eagle3` covers EAGLE 3 and 3.1, `none` serves the target alone."""
    draft_tokens: Annotated[int, Field(ge=1, le=16)] = 3
    """Most draft tokens per step (K)."""
    draft_token_schedule: tuple[tuple[int, int, int], ...] | None = None
    """Ranges (first batch size, last batch size, K) that name every K the worker may use; default:
    `draft_tokens` at every batch size but the largest few, which take 0, 1, 2, 3, 5 and 8 as far as
    they are fewer, so that all of them are compiled; control then chooses among them."""
    device: Literal["auto", "cpu", "gpu"] = "auto"
    """Where to run; `auto` takes the GPU when the NVIDIA driver shows one."""
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto"
    """Arithmetic type; `auto` is the model's own, or float32 on a CPU without bfloat16."""
    max_model_len: Annotated[int, Field(ge=16)] | None = None
    """Longest context in tokens; default: what the model's config says."""
    max_num_seqs: Annotated[int, Field(ge=1)] = 64
    """Most requests decoded together (the largest batch size)."""
    tensor_parallel_size: Annotated[int, Field(ge=1)] = 1
    """GPUs that share each layer."""
    pipeline_parallel_size: Annotated[int, Field(ge=1)] = 1
    """Groups of GPUs that share the layers among them."""
    gpu_memory_fraction: Annotated[float, Field(gt=0, le=1)] = 0.9
    """Share of a GPU's memory the worker may take."""
    cpu_kv_cache_gib: Annotated[int, Field(ge=1)] = 1
    """Memory for the KV cache on a CPU, in GiB."""
    eager: bool | None = None
    """Skip compilation and CUDA graphs; default: yes on a CPU, no on a GPU."""
    host: str = "127.0.0.1"
    """Address the worker listens on; only gateway and control should reach it."""
    port: Annotated[int, Field(ge=0, le=65535)] = 0
    """Port the worker listens on; 0 picks a free one (only with `appliance up`)."""
    max_startup_seconds: Annotated[int, Field(ge=10)] = 1800
    """How long loading the model may take before the start counts as failed."""
    max_restarts: Annotated[int, Field(ge=0)] = 3
    """Failed starts in a row after which the supervisor gives up."""
    tool_call_parser: str | None = None
    """Reads tool calls out of the model's words, by vLLM's name for its way of writing them (`hermes`,
    `llama3_json`, `mistral` ...); null: requests with tools are refused unless `tool_choice` is `none`."""
    reasoning_parser: str | None = None
    """Tells a model's reasoning from its answer, by vLLM's name (`qwen3` and others); null: all is answer."""
    extra_arguments: tuple[str, ...] = ()
    """Further vLLM arguments, passed on as they are; those that would open a way out are refused."""


class PoolSettings(Section):
    """Workers started elsewhere that the gateway may use as well."""

    urls: tuple[str, ...] = ()
    """Base URLs of running workers, such as `http://10.0.0.5:8000`."""
    connect_seconds: Annotated[float, Field(gt=0)] = 2.0
    """How long to try to reach a worker before another is tried."""
    discover: str | None = None
    """Base URL whose host name stands for many workers, such as `http://workers.llm.svc:8000` for a headless
    Kubernetes service: there is one at each address the name resolves to."""
    discover_seconds: Annotated[float, Field(gt=0)] = 5.0
    """Time between two resolutions of that name."""
    affinity_prefixes: Annotated[int, Field(ge=0)] = 16384
    """Beginnings of conversations of which is remembered who answered them last, so that their KV cache can
    be used again; about 180 bytes each; 0: requests go by load alone."""


class AdmissionSettings(Section):
    """Who goes to a worker at once, who waits, and who is turned away."""

    worker_requests: Annotated[int, Field(ge=1)] | None = None
    """Most requests this gateway has with one worker at a time; default: what the worker says it batches, or
    256 where it does not say, and 8."""
    queue_requests: Annotated[int, Field(ge=0)] = 1024
    """Most requests of one priority class that wait for a worker; of more, those of whoever has most waiting
    are answered 429."""
    queue_bytes: Annotated[int, Field(ge=0)] = 128 * 2**20
    """Most bytes of text of one priority class that wait; what is made of it comes on top."""
    wait_seconds: Annotated[float, Field(gt=0)] = 60.0
    """How long a request may wait for a worker before it is answered 429."""
    batch_wait_seconds: Annotated[float, Field(gt=0)] = 600.0
    """The same for requests of class `batch`."""
    standard_share: Annotated[float, Field(ge=0, lt=1)] = 0.2
    """Share of the turns that class `standard` gets while `interactive` requests wait."""
    batch_share: Annotated[float, Field(ge=0, lt=1)] = 0.05
    """Share of the turns that class `batch` gets while requests of higher classes wait."""
    tenant_weights: dict[str, Annotated[int, Field(ge=1)]] = {}
    """Turns in a row by tenant name, while others wait; 1 for a tenant that is not named."""

    @model_validator(mode="after")
    def _something_is_left_for_the_highest_class(self) -> "AdmissionSettings":
        if self.standard_share + self.batch_share >= 1:
            message = "standard_share and batch_share must leave turns for interactive: lower one of them"
            raise ValueError(message)
        return self


class LimitSettings(Section):
    """How tenants' limits are counted; gateways that share a database need the same."""

    time_zone: Annotated[str, AfterValidator(_known_zone)] = "UTC"
    """Where the days and months of token budgets begin, such as `Africa/Nairobi`."""
    guess_tokens: Annotated[int, Field(ge=0)] = 512
    """Tokens reserved for an answer whose length the client does not bound; settled when it has ended."""
    lease_seconds: Annotated[float, Field(ge=2)] = 10.0
    """How long a gateway goes on with what it holds of a limit when it cannot reach the database, and what
    a killed gateway keeps from the others."""


class BatchSettings(Section):
    """Files that tenants leave here, and batches of requests that are run while there is idle capacity."""

    directory: Path | None = None
    """Directory of the files; default: `files` in the data directory.  Gateways that share a database may
    share it, too: each writes a part of its own, and any of them then gives out every file."""
    max_file_bytes: Annotated[int, Field(ge=1024)] = 200 * 2**20
    """Largest file accepted, in bytes."""
    max_requests: Annotated[int, Field(ge=1)] = 50_000
    """Most requests in one batch."""
    tenant_bytes: Annotated[int, Field(ge=0)] = 10 * 2**30
    """Most bytes of files that one tenant may keep; what batches put out counts, and is kept all the same."""
    tenant_files: Annotated[int, Field(ge=0)] = 1000
    """Most files that one tenant may keep."""
    tenant_batches: Annotated[int, Field(ge=0)] = 50
    """Most batches of one tenant that have not ended."""
    keep_free_bytes: Annotated[int, Field(ge=0)] = 2 * 2**30
    """Free space on the disk of the files below which none is accepted any more."""
    file_days: Annotated[int, Field(ge=1)] = 30
    """Age at which a file is deleted, unless its tenant chose another."""
    concurrency: Annotated[int, Field(ge=1)] = 16
    """Most requests of batches under way at once in this gateway."""
    idle_share: Annotated[float, Field(gt=0, le=1)] = 0.5
    """A request of a batch begins only while its workers have fewer requests, whoever sent them, than this
    share of what they batch (see `admission.worker_requests`), and while none waits in them."""


class MonitorSettings(Section):
    """How acceptance and goodput are watched, and when speculation stops and comes back."""

    interval_seconds: Annotated[float, Field(gt=0)] = 1.0
    """Time between two looks at each worker."""
    scrape_timeout_seconds: Annotated[float, Field(gt=0)] = 2.0
    """How long one look may take; a late one counts as failed and changes nothing."""
    control: Literal["auto", "observe"] = "auto"
    """`auto` steers workers; `observe` only measures, and every worker drafts as it was started."""
    window_drafts: Annotated[int, Field(ge=1)] = 400
    """Size of the window that acceptance is computed over, in drafts."""
    min_drafts: Annotated[int, Field(ge=1)] = 32
    """Fewer drafts than this give no verdict."""
    collapsed_below: Annotated[float, Field(ge=1)] = 1.25
    """Acceptance length under which the draft has collapsed, whatever is usual for it."""
    margin: Annotated[float, Field(ge=0, le=0.5)] = 0.03
    """Gain or loss in tokens per second, as a fraction, within which nothing is changed."""
    cooldown_seconds: Annotated[float, Field(ge=0)] = 2.0
    """Least time between two changes of a worker's mode."""
    probe_share: Annotated[float, Field(gt=0, le=0.2)] = 0.02
    """Most of a worker's steps that go into probes and into measuring costs."""
    probe_seconds: Annotated[float, Field(gt=0)] = 5.0
    """From a fallback to the first probe; doubles with each probe that fails."""
    probe_longest_seconds: Annotated[float, Field(gt=0)] = 20.0
    """Most time between two probes of a draft that has paid on this worker before."""
    hard_off_after_seconds: Annotated[float, Field(ge=60)] | None = 3600.0
    """After so long without a draft that paid, a worker is restarted without it, if another one can
    serve meanwhile; null: never."""
    lease_seconds: Annotated[float, Field(ge=5)] = 15.0
    """How long a control loop that has gone silent keeps others from acting."""


class RecycleSettings(Section):
    """How a worker is restarted on purpose, while others serve."""

    drain_seconds: Annotated[float, Field(ge=0)] = 60.0
    """How long its requests may take to finish before it is restarted all the same."""
    start_seconds: Annotated[float, Field(gt=0)] = 1860.0
    """How long it may then take to answer again, what it needs to end included."""


class DraftSettings(Section):
    """The life of draft models: where they are kept, and what a new one has to show before it serves."""

    directory: Path | None = None
    """The draft registry, with data sets, training runs and evaluations; default: `drafts` in the data
    directory.  Workers on other machines need the same path, on a volume they share."""
    trusted_keys_file: Path | None = None
    """Whose drafts may be imported: public keys, one a line, as for bundles; null: only what is made here."""
    signing_key_file: Path | None = None
    """What signs revisions made here; default: `drafts.key` in the data directory, made when first needed."""
    trial_drafts: Annotated[int, Field(ge=64)] = 2000
    """Fewest drafts that a new draft is tried with on its first worker, on served traffic."""
    trial_seconds: Annotated[float, Field(gt=0)] = 1800.0
    """How long that trial may take; one that is not decided by then is a refusal."""
    trial_margin: Annotated[float, Field(ge=0, le=0.5)] = 0.02
    """Share of acceptance length and of tokens per engine second that a new draft may lose."""


class WitnessSettings(Section):
    """Somebody else who keeps the log's newest head, and says so."""

    name: str
    """Name in its cosignatures, such as `auditor.example/witness`."""
    key: str
    """Its verifier key, `name+hash+base64`, or the path of a file with its keys, one a line."""
    url: str | None = None
    """Where it answers, such as `http://10.0.0.9:8090`; null: its cosignatures are carried by file."""


def _refuse_open(value: object) -> object:
    if value == "open":
        message = "the mode open was removed: use spool with enough audit.spool_bytes, or strict"
        raise ValueError(message)
    return value


class AuditSettings(Section):
    """The audit log."""

    origin: str = "appliance.local/audit"
    """Name of this log in every checkpoint and receipt; choose it once, it cannot change later."""
    database_url: str | None = None
    """SQLAlchemy URL; default: SQLite file `audit.db` in the data directory."""
    signing_key_file: Path | None = None
    """Ed25519 key (PKCS#8 PEM, mode 0600); default: `audit.key` in the data directory."""
    gateway: str | None = None
    """Name under which this gateway writes the log, never shared by two; default: made at the first
    start and kept in `gateway.id` in the data directory."""
    gateway_dead_seconds: Annotated[float, Field(gt=0)] = 300.0
    """Silence after which another gateway counts as dead, and its open requests are ended in the log."""
    batch_seconds: Annotated[float, Field(ge=0, le=1)] = 0.0
    """How long a commit may wait for company; 0 commits whatever has queued up meanwhile."""
    queue_entries: Annotated[int, Field(ge=1)] = 4096
    """Entries that may wait for a commit; when full, requests are refused with 503."""
    append_timeout_seconds: Annotated[float, Field(gt=0)] = 10.0
    """How long an entry may take to become durable before its request is refused."""
    checkpoint_seconds: Annotated[float, Field(gt=0)] = 1.0
    """Most time between a new entry and a signed checkpoint that covers it."""
    checkpoint_entries: Annotated[int, Field(ge=1)] = 1000
    """Most new entries before a checkpoint is signed, whatever the time."""
    heartbeat_seconds: Annotated[float, Field(gt=0)] = 60.0
    """Time between checkpoints when nothing happens."""
    post_quantum: bool = False
    """Sign every checkpoint with ML-DSA-44 as well, by the key `audit-mldsa.key` beside the signing key,
    made at the first start; a checkpoint then takes 3.5 KiB more.  Auditors need both public keys."""
    witnesses: tuple[WitnessSettings, ...] = ()
    """Who cosigns the log, each with `name`, `key` (its verifier keys, or a file with one a line) and, if
    it can be reached from here, `url`; without one its cosignatures are carried by file."""
    witness_seconds: Annotated[float, Field(ge=1)] = 60.0
    """Least time between two cosignatures of the same witness."""
    durability: Annotated[Literal["strict", "spool"], BeforeValidator(_refuse_open)] = "strict"
    """What happens to requests while the database takes no entries.  `strict`: they are refused with 503.
    `spool`: entries go to a local spool; once it is full, requests are refused with 503."""
    spool_directory: Path | None = None
    """Directory of the spool, one for each gateway, best not on the database's disk; default: `spool` in
    the data directory."""
    spool_bytes: Annotated[int, Field(ge=0)] = 256 * 2**20
    """Maximum size of the spool in bytes; a thousand entries take about half a MiB.  0 with `strict` only."""
    spool_after_seconds: Annotated[float, Field(gt=0)] = 1.0
    """How long the database may take over an entry before it goes to the spool."""
    low_disk_bytes: Annotated[int, Field(ge=0)] = 2**30
    """Free space on the disk of the database (SQLite), the spool or the data directory below which operators
    are warned."""
    verify_seconds: Annotated[float, Field(ge=0)] = 3600.0
    """Time between two checks of what is stored against what was written; 0: never."""
    payload_keys_directory: Path | None = None
    """Directory, mode 0700, of the keys to kept content; default: `payload-keys` in the data directory.
    Gateways that share a database need the same.  Back it up apart from the database, and briefly."""
    payload_master_key_file: Path | None = None
    """File, mode 0600, of 32 random bytes in base64 that encrypt those keys; default: they are in clear."""
    payload_rotation_days: Annotated[float, Field(gt=0)] = 7.0
    """How long a tenant's key encrypts new content before another takes over."""
    payload_max_bytes: Annotated[int, Field(ge=1024)] = 4 * 2**20
    """Most bytes kept of an answer; of a longer one the beginning is kept, and the log says so."""
    payload_queue_bytes: Annotated[int, Field(ge=2**20)] = 128 * 2**20
    """Content that may wait to be kept, in bytes; a request that would exceed it is refused with 503."""
    payload_retention_days: Annotated[int, Field(ge=1)] | None = None
    """Age at which `appliance audit prune` erases content unless told another; entries stay."""


def _as_word(value: object) -> object:
    """YAML reads a bare `on` and `off` as yes and no."""
    return {True: "on", False: "off"}[value] if isinstance(value, bool) else value


class SovereigntySettings(Section):
    """What keeps data inside, beside the network that the appliance is put into."""

    wall: Annotated[Literal["on", "off", "required"], BeforeValidator(_as_word)] = "on"
    """Have the kernel (Landlock, Linux 6.7) refuse TCP connections to ports that these settings do not imply,
    for gateway, worker and all they start.  `on` goes on without where the kernel cannot; `required` refuses
    to start."""
    connect_ports: tuple[Annotated[int, Field(ge=1, le=65535)], ...] = ()
    """Further TCP ports that may be connected to, such as those of workers to be listed later."""


class EgressSettings(Section):
    """
    The egress check: attempts to get out that have to fail, made by each gateway for itself.

    The addresses are never needed for anything else.  `off` unless told otherwise, since whoever runs a
    program has to agree before it knocks at foreign doors.
    """

    mode: Annotated[Literal["off", "warn", "strict"], BeforeValidator(_as_word)] = "off"
    """`off`: no check but by `appliance egress check`.  `warn`: checks are recorded, and `/readyz` warns.
    `strict`: a gateway is not ready before a check said `closed`, nor from one that said `open` to the next
    that says `closed`."""
    interval_seconds: Annotated[float, Field(ge=1)] = 3600.0
    """Time between two checks; the first is made at the start."""
    retry_seconds: Annotated[float, Field(ge=1)] = 60.0
    """Time to the next check after one that did not say `closed`, if that is sooner."""
    timeout_seconds: Annotated[float, Field(ge=0.1, le=60)] = 3.0
    """How long each attempt may take; all are made at once."""
    tcp_targets: tuple[str, ...] = (
        "1.1.1.1:443",
        "8.8.8.8:443",
        "192.0.2.1:443",
        "[2606:4700:4700::1111]:443",
        "[2001:4860:4860::8888]:443",
        "[2001:db8::1]:443",
    )
    """Addresses and ports that must not take a connection: public resolvers, where something always listens,
    and addresses reserved for documentation, where nobody can."""
    udp_targets: tuple[str, ...] = (
        "8.8.8.8:53",
        "9.9.9.9:53",
        "192.0.2.1:53",
        "[2620:fe::fe]:53",
        "[2001:db8::1]:53",
    )
    """Addresses and ports that must not answer a DNS query."""
    metadata_targets: tuple[str, ...] = (
        "169.254.169.254:80",
        "[fd00:ec2::254]:80",
    )
    """Metadata services of clouds, which must not take a connection either."""
    canary_name: str | None = "example.com"
    """Public name that this machine's resolver must not resolve, since that needs somebody outside; null:
    not tried."""
    control: str | None = None
    """Host and port of the enclave's own that must take a connection, such as a worker's: only next to it
    does a failure to get out prove something.  Default: the database, where it is PostgreSQL; otherwise a
    listener that the check opens on loopback, which proves least."""

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
    def _an_entry_holds_them(self) -> "EgressSettings":
        if len(self.tcp_targets) + len(self.udp_targets) + len(self.metadata_targets) > MOST_EGRESS_TARGETS:
            message = f"at most {MOST_EGRESS_TARGETS} targets together: an audit entry holds no more"
            raise ValueError(message)
        return self

    @model_validator(mode="after")
    def _strict_has_something_to_try(self) -> "EgressSettings":
        if self.mode == "strict" and not (self.tcp_targets or self.udp_targets or self.metadata_targets):
            message = "strict needs targets: without any no check says `closed`, and no gateway gets ready"
            raise ValueError(message)
        return self


class CostSettings(Section):
    """
    What engine time and energy are recorded by, and what a report prices them with.

    Nothing is needed for seconds and tokens; a price that is missing is left out of the sums, and the
    report says so.  The formulas are in [What serving costs](../explanation/cost.md).
    """

    currency: Annotated[str, Field(pattern=r"^[A-Za-z]{1,8}$")] = "USD"
    """What all prices are in; a word beside the figures, nothing is converted."""
    worker_price: Annotated[float, Field(ge=0)] | None = None
    """What the machine of one worker cost to buy; spread evenly over `depreciation_years`."""
    depreciation_years: Annotated[float, Field(gt=0)] = 4.0
    """Years over which `worker_price` is written off."""
    worker_price_per_hour: Annotated[float, Field(ge=0)] | None = None
    """What one worker's machine costs an hour, where it is rented; instead of `worker_price`."""
    people_per_month: Annotated[float, Field(ge=0)] | None = None
    """What the people who run this installation cost a month, spread over the time of all workers."""
    power_price_per_kwh: Annotated[float, Field(ge=0)] | None = None
    """Price of one kWh at the meter."""
    pue: Annotated[float, Field(ge=1)] = 1.0
    """Power usage effectiveness: energy at the meter for each unit a machine takes, cooling included."""
    watts_idle: Annotated[float, Field(ge=0)] | None = None
    """What a worker's machine draws while its engine has nothing to do, where no GPU measures it."""
    watts_busy: Annotated[float, Field(ge=0)] | None = None
    """What it draws while its engine works, likewise."""
    watts_host: Annotated[float, Field(ge=0)] = 0.0
    """What a worker's machine draws beside its GPUs, added to what these measure."""
    flush_seconds: Annotated[float, Field(ge=1, le=60)] = 30.0
    """Most time between two writes to the database, and so what a crash may lose."""
    retention_days: Annotated[int, Field(ge=1)] = 800
    """Age at which what was recorded is deleted."""

    @model_validator(mode="after")
    def _one_kind_of_price(self) -> "CostSettings":
        if self.worker_price is not None and self.worker_price_per_hour is not None:
            message = "worker_price is of a bought machine, worker_price_per_hour of a rented one: set one"
            raise ValueError(message)
        if (self.watts_idle is None) != (self.watts_busy is None):
            message = "watts_idle and watts_busy come together: set both or neither"
            raise ValueError(message)
        return self


class ConsoleSettings(Section):
    """The operator console: web pages at `/console` for people with an admin key."""

    enabled: bool = True
    """Whether the pages are there; the admin API is there either way."""
    idle_seconds: Annotated[float, Field(ge=1)] = 900.0
    """How long a login lasts without a click; what a page refreshes by itself does not count."""
    session_seconds: Annotated[float, Field(ge=1)] = 28800.0
    """How long a login lasts at most."""
    behind_tls: bool = False
    """Set it where a proxy in front ends TLS: browsers then send the session over encrypted connections only.
    With TLS of our own that is always so."""


class TracingSettings(Section):
    """
    Traces of requests, sent to an OpenTelemetry collector inside the enclave; off unless switched on.

    A trace says which part of the appliance took how long for whom, and never what was asked or answered.
    [How to set it up](../how-to/trace-requests.md).
    """

    enabled: bool = False
    """Trace requests, and have the worker of this process trace its share of them."""
    endpoint: str = "http://127.0.0.1:4318/v1/traces"
    """Where the collector takes OTLP over HTTP (protobuf), path included."""
    ca_file: Path | None = None
    """Authorities (PEM) that the collector's certificate is checked with; null: this machine's."""
    allow_public: bool = False
    """Let the endpoint have a public address, which is refused otherwise: traces name tenants and models."""
    sample_ratio: Annotated[float, Field(ge=0, le=1)] = 0.1
    """Share of the requests that are traced."""
    client_context: Literal["link", "ignore", "continue"] = "link"
    """What becomes of a client's own `traceparent`: `link` starts a trace of ours that points to it, `ignore`
    does not look at it, `continue` makes ours part of it.  With `continue` callers decide what is traced, so
    it is for gateways that only a proxy of your own can reach."""
    interval_seconds: Annotated[float, Field(gt=0, le=60)] = 2.0
    """How long spans wait for others to be sent with."""
    timeout_seconds: Annotated[float, Field(gt=0, le=60)] = 5.0
    """How long the collector may take for a batch; then it is dropped."""

    @field_validator("endpoint")
    @classmethod
    def _is_a_url(cls, endpoint: str) -> str:
        try:
            parts = urlsplit(endpoint)
            fits = parts.scheme in {"http", "https"} and parts.hostname and parts.port != 0
        except ValueError:
            fits = False
        if not fits or "@" in endpoint or "?" in endpoint or "#" in endpoint:
            message = "write http://host:4318/v1/traces or https://..., without user, query or fragment"
            raise ValueError(message)
        return endpoint

    @model_validator(mode="after")
    def _stays_inside(self) -> "TracingSettings":
        parts = urlsplit(self.endpoint)
        if self.ca_file is not None and parts.scheme != "https":
            message = "ca_file is for an endpoint that begins with https://"
            raise ValueError(message)
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
    """What operators read; prompts and completions are never in it."""

    level: Literal["debug", "info", "warning", "error"] = "info"
    """Least severe event that is written."""
    format: Literal["auto", "json", "console"] = "auto"
    """`auto` writes JSON unless a terminal is attached."""


class Settings(Section):
    """All settings of one appliance."""

    api: ApiSettings = ApiSettings()
    tls: TlsSettings = TlsSettings()
    oidc: OidcSettings = OidcSettings()
    data: DataSettings = DataSettings()
    tenants: TenantsSettings = TenantsSettings()
    worker: WorkerSettings = WorkerSettings()
    pool: PoolSettings = PoolSettings()
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
    def _window_holds_a_verdict(self) -> "Settings":
        if self.monitor.min_drafts > self.monitor.window_drafts:
            message = (
                "monitor.min_drafts is larger than monitor.window_drafts: no verdict could ever be given"
            )
            raise ValueError(message)
        return self

    @model_validator(mode="after")
    def _a_spool_has_room(self) -> "Settings":
        if self.audit.durability == "spool" and not self.audit.spool_bytes:
            message = "audit.durability is spool and audit.spool_bytes is 0: give the spool some room"
            raise ValueError(message)
        return self


def load_settings(
    file: Path | None = None,
    *,
    environment: Mapping[str, str] | None = None,
    overrides: Mapping[str, Mapping[str, Any]] | None = None,
) -> Settings:
    """
    Read file, environment and command line into one frozen `Settings`.

    Args:
        file: YAML file of sections, or None for none.
        environment: variables to read instead of the process's own (for tests).
        overrides: `{section: {field: value}}` from the command line; stronger than everything.

    Raises:
        ConfigurationError: one line that names the setting and what is wrong with it.
    """
    values = _read_file(file) if file else {}
    _merge(values, _read_environment(os.environ if environment is None else environment))
    _merge(values, overrides or {})
    _refuse_removed(values)
    try:
        return Settings.model_validate(values)
    except ValidationError as error:
        raise ConfigurationError(_first_problem(error)) from error


def _read_file(file: Path) -> dict[str, dict[str, Any]]:
    try:
        content = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        message = f"cannot read the settings file {file}: {error}"
        raise ConfigurationError(message) from error
    except (yaml.YAMLError, ValueError) as error:  # a ValueError is a date that does not exist
        message = f"the settings file {file} is not YAML: {' '.join(str(error).split())}"
        raise ConfigurationError(message) from error
    if content is None:
        return {}
    if not isinstance(content, dict) or not all(isinstance(section, dict) for section in content.values()):
        message = f"the settings file {file} must hold sections such as `api:` with fields below them"
        raise ConfigurationError(message)
    return content


def _read_environment(environment: Mapping[str, str]) -> dict[str, dict[str, Any]]:
    values: dict[str, dict[str, Any]] = {}
    for name, text in environment.items():
        if not name.startswith(PREFIX):
            continue
        section, separator, field = name.removeprefix(PREFIX).lower().partition("__")
        if not separator or section not in Settings.model_fields:
            sections = ", ".join(Settings.model_fields)
            message = f"{name} is no setting: use {PREFIX}<SECTION>__<FIELD>, with a section of {sections}"
            raise ConfigurationError(message)
        values.setdefault(section, {})[field] = _parse_scalar(text)
    return values


def _parse_scalar(text: str) -> Any:  # noqa: ANN401 - the field's type decides; pydantic reads it
    if not text.startswith(("[", "{")) and text not in {"", "~", "null"}:
        return text
    try:
        return yaml.safe_load(text)
    except (yaml.YAMLError, ValueError):
        return text


def _refuse_removed(values: Mapping[str, Mapping[str, Any]]) -> None:
    for section, fields in values.items():
        for field in fields:
            if (what_now := REMOVED.get(f"{section}.{field}")) is not None:
                message = f"{section}.{field} is no longer a setting: {what_now}"
                raise ConfigurationError(message)


def _merge(values: dict[str, dict[str, Any]], stronger: Mapping[str, Mapping[str, Any]]) -> None:
    for section, fields in stronger.items():
        values[section] = {**values.get(section, {}), **fields}


def _first_problem(error: ValidationError) -> str:
    problem = error.errors(include_url=False, include_input=False)[0]
    where = ".".join(str(part) for part in problem["loc"])
    if problem["type"] == "extra_forbidden":
        return f"{where} is no setting; `appliance config show` lists them all"
    # Some messages hold the value, which may have line ends.
    what = " ".join(str(problem["msg"]).removeprefix("Value error, ").split())
    return f"{where}: {what}" if where else what


def process_environment() -> Mapping[str, str]:
    """A copy of this process's environment, for whoever builds a child's out of it."""
    return dict(os.environ)


def forget_variables(prefix: str) -> None:
    """Take variables that begin so out of this process's environment, for a library that would read them."""
    for name in [name for name in os.environ if name.startswith(prefix)]:
        del os.environ[name]

"""
The appliance's settings: read once, frozen, and the only place that reads the environment.

Sources, strongest first: `APPLIANCE_<SECTION>__<FIELD>` variables, then one YAML file, then the
defaults below.  An unknown section, field or `APPLIANCE_*` variable is an error, never ignored.
Secrets are paths of files; there is no default secret.
"""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from appliance.errors import ConfigurationError

PREFIX = "APPLIANCE_"
ROOT = Path(__file__).resolve().parent.parent
DEMO_TARGET = ROOT / "demo" / "models" / "demo-coder"
DEMO_DRAFT = ROOT / "demo" / "models" / "demo-coder-eagle31"


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
    keep_alive_seconds: Annotated[float, Field(gt=0)] = 10.0
    """Silence on a stream after which a comment frame is sent, so proxies do not cut it."""
    drain_seconds: Annotated[int, Field(ge=0)] = 30
    """How long a stopping gateway lets running requests finish before it ends them."""
    silence_seconds: Annotated[float, Field(gt=0)] = 600.0
    """How long a worker may send nothing before the request fails, its first byte included."""


class DataSettings(Section):
    """What is kept on this machine's disk."""

    directory: Path = Path("data")
    """Directory for the audit database, keys, tenants and worker logs; created mode 0700."""
    control_token_file: Path | None = None
    """Secret shared by control and workers, in a file of mode 0600; default: `control.token` in the
    data directory, made at the first start.  Machines that share a worker need the same."""


class WorkerSettings(Section):
    """The vLLM worker that `appliance worker` and `appliance up` start."""

    model: Path = DEMO_TARGET
    """Directory of the target model's weights; always local, never a hub name."""
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
    extra_arguments: tuple[str, ...] = ()
    """Further vLLM arguments, passed on as they are; those that would open a way out are refused."""


class PoolSettings(Section):
    """Workers started elsewhere that the gateway may use as well."""

    urls: tuple[str, ...] = ()
    """Base URLs of running workers, such as `http://10.0.0.5:8000`."""
    connect_seconds: Annotated[float, Field(gt=0)] = 2.0
    """How long to try to reach a worker before another is tried."""


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
    probe_hopeless_seconds: Annotated[float, Field(gt=0)] = 900.0
    """Most time between two probes of a draft that never has."""
    hard_off_after_seconds: Annotated[float, Field(ge=60)] | None = 3600.0
    """After so long without a draft that paid, a worker is restarted without it, if another one can
    serve meanwhile; null: never."""
    hard_off_retry_seconds: Annotated[float, Field(ge=60)] = 21600.0
    """From a hard-off to the restart that tries the draft again."""
    lease_seconds: Annotated[float, Field(ge=5)] = 15.0
    """How long a control loop that has gone silent keeps others from acting."""


class RecycleSettings(Section):
    """How a worker is restarted on purpose, while others serve."""

    drain_seconds: Annotated[float, Field(ge=0)] = 60.0
    """How long its requests may take to finish before it is restarted all the same."""
    start_seconds: Annotated[float, Field(gt=0)] = 1860.0
    """How long it may then take to answer again, what it needs to end included."""
    canary_requests: Annotated[int, Field(ge=1)] = 3
    """Requests of the gateway's own that it has to answer before it gets any other."""
    canary_seconds: Annotated[float, Field(gt=0)] = 60.0
    """How long each of them may take; the first after a start is slow."""


class WitnessSettings(Section):
    """Somebody else who keeps the log's newest head, and says so."""

    name: str
    """Name in its cosignatures, such as `auditor.example/witness`."""
    key: str
    """Its verifier key, `name+hash+base64`, or the path of a file with its keys, one a line."""
    url: str | None = None
    """Where it answers, such as `http://10.0.0.9:8090`; null: its cosignatures are carried by file."""


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
    batch_entries: Annotated[int, Field(ge=1, le=4096)] = 256
    """Most entries in one commit."""
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
    witness_timeout_seconds: Annotated[float, Field(gt=0)] = 10.0
    """How long a witness may take to answer; the log does not wait for it."""
    durability: Literal["strict", "spool", "open"] = "strict"
    """What happens to requests while the database takes no entries.  `strict`: they are refused with 503.
    `spool`: entries go to a local spool; once it is full, they are refused.  `open`: as `spool`, but then
    they are served unrecorded, and an `audit.gap` entry later counts what is missing."""
    spool_directory: Path | None = None
    """Directory of the spool, one for each gateway, best not on the database's disk; default: `spool` in
    the data directory."""
    spool_bytes: Annotated[int, Field(ge=0)] = 256 * 2**20
    """Most bytes of the spool, a thousand entries being about half a MiB; 0, with `open` only: no spool."""
    spool_after_seconds: Annotated[float, Field(gt=0)] = 1.0
    """How long the database may take over an entry before it goes to the spool."""
    low_disk_bytes: Annotated[int, Field(ge=0)] = 2**30
    """Free space on the database's (SQLite) and the spool's disk below which operators are warned."""
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


class LogSettings(Section):
    """What operators read; prompts and completions are never in it."""

    level: Literal["debug", "info", "warning", "error"] = "info"
    """Least severe event that is written."""
    format: Literal["auto", "json", "console"] = "auto"
    """`auto` writes JSON unless a terminal is attached."""


class Settings(Section):
    """All settings of one appliance."""

    api: ApiSettings = ApiSettings()
    data: DataSettings = DataSettings()
    worker: WorkerSettings = WorkerSettings()
    pool: PoolSettings = PoolSettings()
    monitor: MonitorSettings = MonitorSettings()
    recycle: RecycleSettings = RecycleSettings()
    audit: AuditSettings = AuditSettings()
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


def _merge(values: dict[str, dict[str, Any]], stronger: Mapping[str, Mapping[str, Any]]) -> None:
    for section, fields in stronger.items():
        values[section] = {**values.get(section, {}), **fields}


def _first_problem(error: ValidationError) -> str:
    problem = error.errors(include_url=False, include_input=False)[0]
    where = ".".join(str(part) for part in problem["loc"])
    if problem["type"] == "extra_forbidden":
        return f"{where} is no setting; `appliance config show` lists them all"
    what = str(problem["msg"]).removeprefix("Value error, ")
    return f"{where}: {what}" if where else what


def process_environment() -> Mapping[str, str]:
    """A copy of this process's environment, for whoever builds a child's out of it."""
    return dict(os.environ)

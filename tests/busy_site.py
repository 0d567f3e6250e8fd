"""
Metrics of a site where everything has happened: what bounds of series and of a scrape are held against.
"""

from itertools import product

from prometheus_client import CollectorRegistry

from appliance.audit.registry import EntryType
from appliance.drafts.promotion.promotion import PromotionStage
from appliance.errors import ERROR_TABLE, Outcome
from appliance.gateway.attribution import context_bucket
from appliance.infra.metrics import Metrics
from appliance.infra.metrics.families import OFTEN
from appliance.speculation.values import Reason, SpeculationMode, buckets_up_to
from appliance.tenancy import PriorityClass
from appliance.tenancy.limits.quota import Measure

TENANTS = tuple(f"tenant-{number}" for number in range(200))
MODELS = ("general", "coder", "small")
ROUTES = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages", "/v1/embeddings")
VALUES = {
    "model": MODELS,
    "route": ROUTES,
    "outcome": tuple(Outcome),
    "kind": ("prompt", "completion"),
    "limit": tuple(Measure),
    "result": ("ok", "failed"),
    "code": tuple({spec.code for spec in ERROR_TABLE.values()}),
    "type": tuple(EntryType),
    "worker": tuple(f"10.0.0.{number}:8000" for number in range(4)),
    "mode": tuple(SpeculationMode),
    "reason": tuple(Reason),
    "batch": buckets_up_to(64),
    "position": range(3),
    "priority": tuple(PriorityClass),
    "verdict": ("closed", "open", "inconclusive"),
    "disk": ("database", "spool", "data"),
    "state": ("known", "cosigned"),
    "version": ("0.1.0",),
    "context": tuple(sorted({context_bucket(tokens) for tokens in range(0, 2**18, 512)})),
    "draft_tokens": range(4),
    "health": ("up", "down"),
    "stage": tuple(PromotionStage),
    "bound": ("low", "high"),
    "of": ("worker_hour", "site_hour", "kwh"),
}
"""What each label can be; a new label brings its values."""


def saw_template(metrics: Metrics, template: str, model: str = "general") -> None:
    """A request with this template was drafted for."""
    counts = {"drafts": 1, "draft_tokens": 3, "accepted_tokens": 2}
    metrics.record_drafts(model=model, template=template, context="0-1k", **counts)


def busy_site(tenants: tuple[str, ...]) -> Metrics:
    """Metrics after everything that can happen has happened: to every tenant, on every model and worker."""
    metrics = Metrics(CollectorRegistry())
    values = {**VALUES, "tenant": tenants}
    for family in vars(metrics).values():
        names = getattr(family, "_labelnames", ())
        if names and "template" not in names:
            for labels in product(*(values[name] for name in names)):
                family.labels(*labels)
    # Clients make templates, so it is not their labels that are bounded, but how many are told apart.
    for model, number, _ in product(MODELS, range(100), range(OFTEN)):
        saw_template(metrics, f"chat-{number:08x}", model)
    return metrics

"""
Metrics with every label value set: the bounds of series and of a scrape are tested with them.
"""

from itertools import product

from prometheus_client import CollectorRegistry

from appliance.audit.entry_types import EntryType
from appliance.drafts.promotion.promotion import PromotionStage
from appliance.errors import ERROR_TABLE, Outcome
from appliance.gateway.attribution import context_bucket
from appliance.gateway.suspect import Suspicion
from appliance.infra.metrics import Metrics
from appliance.infra.metrics.families import OFTEN
from appliance.speculation.values import Capability, Reason, SpeculationMode, buckets_up_to
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
    "capability": tuple(Capability),
    "suspicion": tuple(Suspicion),
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
"""Values of each label; a new label adds its own."""


def record_template(metrics: Metrics, template: str, model: str = "general") -> None:
    """Count one drafted request of this template."""
    counts = {"drafts": 1, "draft_tokens": 3, "accepted_tokens": 2}
    metrics.record_drafts(model=model, template=template, context="0-1k", **counts)


def full_metrics(tenants: tuple[str, ...]) -> Metrics:
    """Metrics with every combination of label values, for these tenants."""
    metrics = Metrics(CollectorRegistry())
    values = {**VALUES, "tenant": tenants}
    for family in vars(metrics).values():
        names = getattr(family, "_labelnames", ())
        if names and "template" not in names:
            for labels in product(*(values[name] for name in names)):
                family.labels(*labels)
    # Clients make templates, so the number of template labels is bounded, not their values.
    for model, number, _ in product(MODELS, range(100), range(OFTEN)):
        record_template(metrics, f"chat-{number:08x}", model)
    return metrics

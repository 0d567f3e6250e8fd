"""The values of the page templates: the figures of the admin API."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from prometheus_client.metrics import MetricWrapperBase

from appliance.api.console.chart import draw
from appliance.api.console.console import Console
from appliance.api.services import Services
from appliance.serving.worker import WorkerSnapshot
from appliance.speculation.values import Reason, SpeculationMode, draft_tokens_at
from appliance.tenancy import Tenant
from appliance.tenancy.allowances import BOUNDS

MODES: dict[SpeculationMode, str] = {
    SpeculationMode.SPECULATIVE: "speculative",
    SpeculationMode.TARGET_ONLY: "target-only",
}
REASONS: dict[Reason, str] = {
    Reason.HEALTHY: "Drafts pay: more tokens a second with them than without.",
    Reason.TOO_FEW_DRAFTS: "Too few drafts lately to decide; the mode stays.",
    Reason.BELOW_BREAK_EVEN: "Drafts cost more than they gain on this traffic, so they are off.",
    Reason.COLLAPSED: "Almost no draft token is accepted: check draft, chat template and weights.",
    Reason.RECOVERED: "Drafts pay again.",
    Reason.COUNTER_RESET: "The engine restarted, and its counters with it.",
    Reason.SCRAPE_FAILED: "The worker could not be scraped.",
    Reason.NOT_CONTROLLABLE: "Its drafting cannot be stopped; other workers are preferred.",
    Reason.OPERATOR_OVERRIDE: "An operator set an override.",
    Reason.DRAFT_LINT_FAILED: "The draft does not fit the model, so it was started without.",
}
CHANGES = 8
"""Maximum latest changes shown."""
LIMIT_NAMES = {
    "requests_per_minute": "requests/min",
    "tokens_per_minute": "tokens/min",
    "concurrent_requests": "at once",
    "tokens_per_day": "tokens/day",
    "tokens_per_month": "tokens/month",
}


def overview(services: Services, console: Console) -> dict[str, Any]:
    now = console.clock()
    snapshots = services.pool.snapshots
    workers = [worker_figures(services, console, snapshot) for snapshot in snapshots]
    waiting = int(sum(_values(services.metrics.queue_requests)))
    in_flight = sum(services.pool.in_flight.values())
    counts = {word: sum(worker["mode"] == word for worker in workers) for word in MODES.values()}
    modes = ", ".join(f"{count} {word}" for word, count in counts.items() if count)
    number = f"{len(workers)} worker{'' if len(workers) == 1 else 's'}"
    return {
        "workers": workers,
        "chart": draw(console.history.samples, now),
        "waiting": waiting,
        "in_flight": in_flight,
        "tokens_per_second": sum(snapshot.tokens_per_second for snapshot in snapshots if snapshot.healthy),
        "entries": services.audit.state().size,
        "egress": services.egress_status(),
        "changes": [
            {
                "time": change.time,
                "worker": change.worker,
                "mode": MODES.get(change.mode, str(change.mode)),
                "reason": REASONS.get(change.reason, str(change.reason)),
            }
            for change in reversed(services.control.events(0)[-CHANGES:])
        ],
        "warnings": warnings(services),
        "status": f"{number}{': ' + modes if modes else ''}. {in_flight} in flight, {waiting} waiting.",
    }


def tenants(services: Services, now: float) -> dict[str, Any]:
    use = _use_of(services)
    return {
        "tenants": [_tenant(each, now, use) for each in services.tenants.tenants],
        "status": f"{len(services.tenants.tenants)} tenants.",
    }


def tenant(services: Services, shown: Tenant, now: float) -> dict[str, Any]:
    return _tenant(shown, now, _use_of(services))


def audit(services: Services, console: Console) -> dict[str, Any]:
    state, health, progress = services.audit.state(), services.audit_health(), console.verification.progress
    texts = {
        "never": "Not verified from here yet.",
        "copying": f"Verifying: {progress.copied} of {progress.entries} entries read.",
        "checking": f"Verifying: {progress.entries} entries read, checking every hash and signature.",
        "done": f"Verified: {progress.meaning}.",
        "failed": "The log could not be verified; the reason is below.",
    }
    return {
        "state": state,
        "health": health,
        "witnesses": console.witnesses(),
        "timestamps": console.timestamps(),
        "progress": progress,
        "elapsed": services.clock() - progress.began if progress.is_running else progress.seconds,
        "status": texts[progress.stage],
    }


def egress(services: Services) -> dict[str, Any]:
    egress = services.egress_status()
    last = egress.last
    verdict = str(last.verdict) if last else "not checked yet"
    return {
        "egress": egress,
        "report": last.to_json() if last else None,
        "wall": services.wall,
        "can_check": services.egress is not None and egress.mode != "off",
        "status": f"Egress: {verdict if egress.mode != 'off' else 'checks are off'}.",
    }


def warnings(services: Services) -> list[str]:
    """Problems that need an operator, one line each."""
    health, late = services.audit_health(), services.tenants_warning()
    problem = health.problem(services.audit.state().failure)
    egress = services.egress_status()
    found = [problem, *health.warnings, late, egress.problem, *egress.warnings]
    return list(dict.fromkeys(warning for warning in found if warning))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Use:
    """Since this gateway started, by tenant."""

    limits: dict[tuple[str, str], float]
    """Share in use, by tenant and limit."""
    requests: dict[str, float]
    tokens: dict[str, float]


def _use_of(services: Services) -> _Use:
    limits = {
        (sample.labels["tenant"], sample.labels["limit"]): sample.value
        for family in services.metrics.limit_used.collect()
        for sample in family.samples
    }
    requests, tokens = _by_tenant(services.metrics.requests), _by_tenant(services.metrics.tokens)
    return _Use(limits=limits, requests=requests, tokens=tokens)


def _tenant(shown: Tenant, now: float, use: _Use) -> dict[str, Any]:
    return {
        "name": shown.name,
        "disabled": shown.disabled,
        "models": shown.models,
        "speculation": str(shown.speculation),
        "content": str(shown.content),
        "open_keys": sum(key.is_valid_at(now) for key in shown.keys),
        "bounds": [
            # The share in use is None until this gateway has had a request under the limit.
            {"name": LIMIT_NAMES[name], "most": most, "used": use.limits.get((shown.name, name))}
            for name in BOUNDS
            if (most := getattr(shown.limits, name)) is not None
        ],
        "by_model": len(shown.limits.by_model),
        "requests": int(use.requests.get(shown.name, 0)),
        "tokens": int(use.tokens.get(shown.name, 0)),
    }


def worker_figures(services: Services, console: Console, snapshot: WorkerSnapshot) -> dict[str, Any]:
    window, metrics, reading = snapshot.figures.window, snapshot.metrics, snapshot.reading
    mode, reason = MODES[snapshot.decision.mode], REASONS[snapshot.decision.reason]
    if not snapshot.speculates:
        mode, reason = MODES[snapshot.worker.mode.TARGET_ONLY], "The worker was started without a draft."
    return {
        "name": snapshot.worker.worker_id,
        "models": ", ".join(served.name for served in snapshot.models),
        "healthy": snapshot.healthy,
        "admission": str(snapshot.admission),
        "drained": snapshot.drained,
        "mode": mode,
        "reason": reason,
        "length": window.acceptance_length if window.drafts else None,
        "rate": window.acceptance_rate if window.drafts else None,
        "break_even": console.history.break_even(snapshot),
        "draft_tokens": (
            draft_tokens_at(reading.table, max(1, reading.batch)) if reading and reading.table else None
        ),
        "tokens_per_second": snapshot.tokens_per_second,
        "in_flight": services.pool.in_flight.get(snapshot.worker.worker_id, 0),
        "waiting": metrics.waiting if metrics else 0,
        "cache": metrics.kv_cache_usage if metrics else None,
    }


def _values(family: MetricWrapperBase) -> Iterable[float]:
    return (sample.value for metric in family.collect() for sample in metric.samples)


def _by_tenant(family: MetricWrapperBase) -> dict[str, float]:
    sums: dict[str, float] = {}
    for metric in family.collect():
        for sample in metric.samples:
            if sample.name.endswith("_total"):
                tenant = sample.labels["tenant"]
                sums[tenant] = sums.get(tenant, 0.0) + sample.value
    return sums

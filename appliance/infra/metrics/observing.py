"""
State that other packages keep, read at every scrape: the audit log and its witnesses, the tenants.
"""

from collections.abc import Callable
from typing import Protocol

from appliance.infra.metrics.families import Metrics


class AuditView(Protocol):
    @property
    def size(self) -> int: ...

    @property
    def queued(self) -> int: ...

    @property
    def checkpoint_size(self) -> int:
        """Entries the newest checkpoint covers."""

    @property
    def checkpoint_time(self) -> float:
        """When it was signed, in seconds since the epoch."""

    @property
    def open_requests(self) -> int:
        """Intents without an outcome yet."""

    @property
    def failure(self) -> str | None: ...


def observe_audit(metrics: Metrics, state: Callable[[], AuditView]) -> None:
    metrics.audit_tree_size.set_function(lambda: state().size)
    metrics.audit_queue_entries.set_function(lambda: state().queued)
    metrics.audit_checkpoint_size.set_function(lambda: state().checkpoint_size)
    metrics.audit_checkpoint_lag.set_function(lambda: _lag(state()))
    metrics.audit_checkpoint_time.set_function(lambda: state().checkpoint_time)
    metrics.audit_open_requests.set_function(lambda: state().open_requests)
    metrics.audit_failing.set_function(lambda: state().failure is not None)


def _lag(state: AuditView) -> int:
    return state.size - state.checkpoint_size


class TenantsView(Protocol):
    @property
    def generation(self) -> int:
        """Number of changes that led to them."""

    @property
    def age_seconds(self) -> float:
        """How long ago the database last confirmed them."""

    @property
    def next_key_expiry(self) -> int:
        """Unix time at which the next key ends that was not rotated; 0 for none."""


def observe_tenants(metrics: Metrics, view: TenantsView) -> None:
    metrics.keys_next_end.set_function(lambda: view.next_key_expiry)
    metrics.tenants_generation.set_function(lambda: view.generation)
    metrics.tenants_age_seconds.set_function(lambda: view.age_seconds)


class WitnessView(Protocol):
    @property
    def known(self) -> int:
        """Witnesses in the settings."""

    @property
    def cosigned(self) -> int:
        """Those that have cosigned it."""

    @property
    def size(self) -> int:
        """Entries the newest cosignature covers."""

    @property
    def time(self) -> int:
        """When it was given, in Unix time."""


def observe_witnesses(metrics: Metrics, level: Callable[[], WitnessView]) -> None:
    metrics.audit_witnesses.labels("known").set_function(lambda: level().known)
    metrics.audit_witnesses.labels("cosigned").set_function(lambda: level().cosigned)
    metrics.audit_witnessed_size.set_function(lambda: level().size)
    metrics.audit_witness_time.set_function(lambda: level().time)

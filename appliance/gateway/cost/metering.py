"""What the gateway and the control loop report for cost metering, and the case without metering."""

# ruff: noqa: ARG002 - `NoMetering` uses no argument

from typing import Protocol

from appliance.gateway.cost.presence import ActiveRequests, Presence
from appliance.serving.usage import Usage
from appliance.serving.worker import WorkerId, WorkerSnapshot


class Metering(Protocol):
    def begin(self, worker_id: WorkerId, tenant: str, model: str) -> ActiveRequests: ...

    def end(self, group: ActiveRequests) -> None: ...

    def count(self, worker_id: WorkerId, tenant: str, model: str, usage: Usage) -> None:
        """Count a request that has ended, under the last worker that received it."""

    def poll_started(self, worker_id: WorkerId) -> None: ...

    def observe(self, snapshot: WorkerSnapshot, *, acting: bool) -> None:
        """`acting`: this gateway controls the workers, and so measures drafting costs."""


class NoMetering:
    def __init__(self) -> None:
        self._group = ActiveRequests(Presence())

    def begin(self, worker_id: WorkerId, tenant: str, model: str) -> ActiveRequests:
        return self._group

    def end(self, group: ActiveRequests) -> None: ...

    def count(self, worker_id: WorkerId, tenant: str, model: str, usage: Usage) -> None: ...

    def poll_started(self, worker_id: WorkerId) -> None: ...

    def observe(self, snapshot: WorkerSnapshot, *, acting: bool) -> None: ...


NO_METERING = NoMetering()

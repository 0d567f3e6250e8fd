"""
`appliance` with a gateway that records nothing: what the real one is compared with.

    python -m benchmarks.audit.unaudited gateway --data DIRECTORY --port 0

It exists in the benchmark only: the product has no switch that turns its log off.  Everything else
is built as it always is; the log is open, and nothing is written to it.
"""

import asyncio
from collections.abc import Callable
from typing import Any

import appliance.app.gateway_process
from appliance.audit.pending import Receipt
from appliance.cli import main
from appliance.gateway.intents import IntentRecorder
from appliance.gateway.outcomes import OutcomeRecorder


class NoAudit:
    """An audit sink that has made everything durable before it is asked to."""

    def __init__(self) -> None:
        self._size = 0

    def submit(self, _entry_type: Any, /, **_fields: Any) -> asyncio.Future[Receipt]:  # noqa: ANN401
        """Count, and be done at once."""
        future: asyncio.Future[Receipt] = asyncio.get_running_loop().create_future()
        future.set_result(Receipt(index=self._size, entry_id=""))
        self._size += 1
        return future

    async def confirm(self, pending: asyncio.Future[Receipt]) -> Receipt:
        """Return what is done already."""
        return pending.result()


def unaudited(recorder: Callable[..., Any]) -> Callable[..., Any]:
    """A recorder of the product with a sink that keeps nothing."""
    return lambda **parts: recorder(**{**parts, "audit": NoAudit()})


if __name__ == "__main__":
    appliance.app.gateway_process.IntentRecorder = unaudited(IntentRecorder)
    appliance.app.gateway_process.OutcomeRecorder = unaudited(OutcomeRecorder)
    main()

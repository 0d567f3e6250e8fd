"""
Who goes to a worker now, who waits, and who is turned away.

- `queue`: the bounded fair queue; `places`: how many requests a worker should hold; `retries`: how many
  second tries there may be.  Pure.
- `admission`: lets requests through, or has them wait for a place.

Waiting is done here, where it can be fair and bounded, and not inside a worker, which serves whoever
came first.  Fails closed towards load: what finds no place is refused, never held without limit.
"""

from appliance.gateway.admission.admission import AdmissionControl, Asked, Slot
from appliance.gateway.admission.queue import Bounds, FairQueue, Lane, Waiter

__all__ = [
    "AdmissionControl",
    "Asked",
    "Bounds",
    "FairQueue",
    "Lane",
    "Slot",
    "Waiter",
]

"""
Admission control: which requests go to a worker now, which wait, and which are refused.

Requests wait here, where the queue is fair and bounded, and not inside a worker, which serves them in order
of arrival.  Fails closed under load: a request that finds no room in the queue is refused.
"""

from appliance.gateway.admission.admission import AdmissionControl, AdmissionRequest, Slot
from appliance.gateway.admission.queue import FairQueue, Lane, QueueBounds, Waiter

__all__ = ["AdmissionControl", "AdmissionRequest", "FairQueue", "Lane", "QueueBounds", "Slot", "Waiter"]

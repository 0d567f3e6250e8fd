"""
Why a request needs a worker without a draft, and which parameters workers with a draft refuse.

Follows `SamplingParams._validate_spec_decode` in `vllm/sampling_params.py` (0.32), on the values as vLLM's
request models read them: numbers may be written as text.  Fails towards speculation: a value that is not
recognised here is left to the worker, which reports the error.
"""

from collections.abc import Mapping
from enum import StrEnum
from typing import Any

from appliance.infra.json_members import Member, value_of

EPSILON = 1e-5
"""VLLM's `_SAMPLING_EPS`: a temperature below it is greedy, a `min_p` up to it has no effect."""


class ForbiddenBy(StrEnum):
    """What forbids speculation for a request; also the audit field."""

    TENANT = "tenant"
    HEADER = "header"
    PARAMETER = "parameter"
    """A parameter that a worker with a draft would refuse."""


def refused_under_speculation(members: Mapping[str, Member]) -> str | None:
    """The parameter that makes a speculating worker refuse this request; None if there is none."""
    bias = value_of(members, "logit_bias")
    if isinstance(bias, dict) and bias:
        return "logit_bias"
    # Greedy sampling resets `min_p` before it is checked.
    temperature = _number(value_of(members, "temperature"))
    is_greedy = temperature is not None and temperature < EPSILON
    min_p = _number(value_of(members, "min_p"))
    if min_p is not None and min_p > EPSILON and not is_greedy:
        return "min_p"
    return None


def _number(value: Any) -> float | None:  # noqa: ANN401 - decoded JSON
    try:
        return float(value) if isinstance(value, int | float | str) else None
    except (ValueError, OverflowError):
        return None

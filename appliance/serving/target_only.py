"""
What keeps a request from workers with a draft, and which parameters such workers refuse.

Follows `SamplingParams._validate_spec_decode` in `vllm/sampling_params.py` (0.32), on the values as
vLLM's request models read them: numbers may be written as text.  It fails towards speculation: what
it does not recognise is left to the worker, which says what is wrong with it.
"""

from collections.abc import Mapping
from enum import StrEnum
from typing import Any

from appliance.infra.json_members import Member

EPSILON = 1e-5
"""vLLM's `_SAMPLING_EPS`: a temperature below it is greedy, a `min_p` up to it is none."""


class ForbiddenBy(StrEnum):
    """What forbids to speculate on a request; also the audit field."""

    TENANT = "tenant"
    HEADER = "header"
    PARAMETER = "parameter"
    """One that a worker with a draft would refuse."""


def refused_under_speculation(members: Mapping[str, Member]) -> str | None:
    """The parameter that makes a speculating worker refuse this request, or None when it would not."""
    bias = _value(members, "logit_bias")
    if isinstance(bias, dict) and bias:
        return "logit_bias"
    # Greedy sampling resets `min_p` before it is looked at.
    temperature = _number(_value(members, "temperature"))
    is_greedy = temperature is not None and temperature < EPSILON
    min_p = _number(_value(members, "min_p"))
    if min_p is not None and min_p > EPSILON and not is_greedy:
        return "min_p"
    return None


def _number(value: Any) -> float | None:  # noqa: ANN401 - decoded JSON
    try:
        return float(value) if isinstance(value, int | float | str) else None
    except (ValueError, OverflowError):
        return None


def _value(members: Mapping[str, Member], name: str) -> Any:  # noqa: ANN401 - decoded JSON
    return members[name].value if name in members else None

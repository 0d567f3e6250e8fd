"""Readings of a worker's plugin."""

from appliance.speculation.goodput import Costs, Estimate
from appliance.speculation.values import Energy, EngineReading, StepCounters


def reading(
    busy: float | None = 0.0,
    *,
    epoch: str = "one",
    steps: dict | None = None,
    energy: tuple[int, int] | None = None,
    controllable: bool = True,
) -> EngineReading:
    return EngineReading(
        controllable=controllable,
        epoch=epoch if controllable else "",
        busy_seconds=busy if controllable else None,
        steps=steps or {},
        energy=None if energy is None else Energy(gpus=energy[0], millijoules=energy[1]),
    )


def cell(*, steps: int, seconds: float, requests: int, tokens: int) -> StepCounters:
    return StepCounters(steps=steps, seconds=seconds, requests=requests, tokens=tokens)


def costs(**ratios: tuple[float, float]) -> Costs:
    """`k3=(mean, variance)` of log S(3)/S(0)."""
    return Costs(ratios={int(k[1:]): Estimate(mean=mean, variance=var) for k, (mean, var) in ratios.items()})

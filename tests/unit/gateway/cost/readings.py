"""Readings of a worker's plugin."""

from appliance.speculation.costs import CostModel
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


def costs(*measured: tuple[int, dict[int, float]], noise: float = 0.0) -> CostModel:
    """
    Costs from spans of a thousand steps: batch bucket, and seconds of a step by draft tokens.

    `noise` is the relative standard deviation of a step.
    """
    model = CostModel.unmeasured(4, (0, 1, 2, 3), spread=0.4, now=50.0)
    for bucket, seconds in measured:
        steps = {
            k: StepCounters(
                steps=1000,
                seconds=1000 * each,
                seconds_squared=1000 * each**2 * (1 + noise**2),
                requests=1000 * bucket,
                tokens=1000 * bucket,
            )
            for k, each in seconds.items()
        }
        model = model.measured(bucket, steps, 50.0)
    return model

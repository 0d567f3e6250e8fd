"""
Scenarios of hours of traffic for the monitor, as values: engines, texts, loads.

`share` is what must come out at least, of the tokens that the best fixed number of draft tokens
would give, known in hindsight and zero included.  Above 1.0 no fixed number can come.
"""

import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import chain
from pathlib import Path
from statistics import median

from appliance.speculation.state import MonitorPolicy
from appliance.speculation.values import bucket_of
from tests.simulated_worker import (
    Acceptance,
    Engine,
    Recorded,
    Run,
    Text,
    Traffic,
    controlled,
    fixed_tokens,
    length_of,
)

POLICY = MonitorPolicy(min_drafts=32, collapsed_below=1.25)
"""The default of `appliance.infra.settings`."""

CODE: Acceptance = (0.75, 0.67, 0.6)
HEX: Acceptance = (0.05, 0.02, 0.01)
WARM: Acceptance = (0.23, 0.25, 0.2)
"""Temperature 1: acceptance length 1.3."""


def _gpu_seconds(batch: int, k: int) -> float:
    # A draft token costs 12 % of a step, until there is no idle arithmetic left to hide it in.
    each = 0.12 + 0.48 * max(0, batch - 8) / 56
    return 0.030 * (1.0 + 0.004 * batch) * (1.0 + each * k)


def _cpu_seconds(batch: int, k: int) -> float:
    # K=0 includes the draft's own forward of a step, 5 % of the target's.
    return 0.0035 * 1.05 * (1.0 + 0.08 * (batch - 1)) * (1.0, 1.6, 1.8, 2.0)[k]


GPU = Engine(seconds=_gpu_seconds, noise=0.05, prompts=0.1, wander=0.05)
CPU = Engine(seconds=_cpu_seconds, noise=0.15, prompts=0.05, wander=0.05, largest_batch=8)
NOISY = Engine(
    seconds=_cpu_seconds,
    noise=0.4,
    stalls=((0.003, 6.0), (0.0005, 60.0)),
    prompts=0.1,
    wander=0.2,
    largest_batch=8,
)
SLOW = replace(CPU, seconds=lambda batch, k: 6.0 * _cpu_seconds(batch, k))
"""A second has so few steps that the price of exploration allows a probe every ten."""
ENGINES = {"gpu": GPU, "cpu": CPU}
RECORDING = Path(__file__).parent / "data" / "recorded-demo-pair.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """One traffic scenario on one engine."""

    name: str
    engine: Engine
    traffic: Traffic
    seconds: float
    share: float
    tick: float = 1.0

    def run(self, policy: MonitorPolicy = POLICY, *, seed: int = 1) -> Run:
        """The result with the monitor."""
        return controlled(self.engine, self.traffic, policy, self.seconds, tick=self.tick, seed=seed)

    def fixed(self) -> dict[int, float]:
        """Tokens with each fixed number of draft tokens."""
        return {k: fixed_tokens(self.engine, self.traffic, k, self.seconds) for k in self.engine.choices}


def recording(path: Path) -> tuple[Engine, dict[str, Recorded]]:
    """A recorded worker (`benchmarks.speculation.record`), and its texts by kind."""
    found = json.loads(path.read_text(encoding="utf-8"))
    steps = {(each["batch"], each["draft_tokens"]): each for each in found["steps"]}
    engine = Engine(
        seconds=lambda batch, k: steps[bucket_of(batch), k]["seconds"],
        choices=tuple(sorted({k for _batch, k in steps})),
        largest_batch=max(batch for batch, _k in steps),
        noise=median(each["deviation"] for each in steps.values()),
    )
    return engine, {kind: Recorded(tuple(answers)) for kind, answers in found["accepted"].items()}


def steady(value: Text) -> Callable[[float], Text]:
    """The same text throughout."""
    return lambda _now: value


def in_turn(*parts: tuple[float, Text]) -> Callable[[float], Text]:
    """One text until a second, then the next; the last one for good."""
    return lambda now: next((value for until, value in parts if now < until), parts[-1][1])


def load_in_turn(*parts: tuple[float, int]) -> Callable[[float], int]:
    """One batch size until a second, then the next; the last one for good."""
    return lambda now: next((batch for until, batch in parts if now < until), parts[-1][1])


def alternating(period: float, texts: Sequence[Text]) -> Callable[[float], Text]:
    """Texts in a cycle, each for a fixed time."""
    return lambda now: texts[int(now / period) % len(texts)]


def mixed(
    seed: int, weighted: Sequence[tuple[float, Acceptance]], seconds: float
) -> Callable[[float], Acceptance]:
    """A text drawn by weight for each request, of so many seconds on average."""
    draw = random.Random(seed)
    weights = [weight for weight, _text in weighted]
    drawn = draw.choices([text for _weight, text in weighted], weights, k=4096)
    return lambda now: drawn[int(now / seconds) % len(drawn)]


def decaying(seconds: float) -> Callable[[float], Acceptance]:
    """Acceptance length from 2.8 to 1.1, evenly."""
    return lambda now: at_length(2.8 - 1.7 * min(1.0, now / seconds))


@lru_cache(maxsize=2**15)
def at_length(length: float) -> Acceptance:
    """A text with this acceptance length at K=3, each position as likely as the one before."""
    low, high = 0.0, 1.0
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if length_of((middle,) * 3, 3) < length else (low, middle)
    return (low,) * 3


def at_payoff(engine: Engine, payoff: float, *, batch: int = 1) -> Acceptance:
    """A text for which the best number of draft tokens gives just so much more than none, such as 0.02."""
    low, high = 1.0, 4.0
    for _ in range(40):
        middle = (low + high) / 2
        best = max(
            length_of(at_length(middle), k) * engine.seconds(batch, 0) / engine.seconds(batch, k)
            for k in engine.choices
            if k
        )
        low, high = (middle, high) if best < 1.0 + payoff else (low, middle)
    return at_length(low)


def wandering_load(seed: int, largest: int) -> Callable[[float], int]:
    """A random walk of the batch size, one step every two seconds."""
    draw = random.Random(seed)
    level, levels = 0.5, []
    for _ in range(4096):
        level = min(1.0, max(0.0, level + draw.gauss(0, 0.12)))
        levels.append(max(1, round(largest**level)))
    return lambda now: levels[int(now / 2.0) % len(levels)]


def _on_both(name: str, seconds: float, share: float, traffic: Traffic) -> list[Scenario]:
    return [
        Scenario(name=f"{name}, {label}", engine=engine, traffic=traffic, seconds=seconds, share=share)
        for label, engine in ENGINES.items()
    ]


def _loads(first: float, second: float, third: float, acceptance: Acceptance) -> Traffic:
    """Batches of 1, then 64, then 1 again, for so many seconds each."""
    ends = (first, first + second, first + second + third)
    return Traffic(
        acceptance=steady(acceptance), batch=load_in_turn((ends[0], 1), (ends[1], 64), (ends[2], 1))
    )


SCENARIOS: tuple[Scenario, ...] = (
    *_on_both("steady code", 600, 0.97, Traffic(acceptance=steady(CODE))),
    *_on_both("steady hex", 600, 0.97, Traffic(acceptance=steady(HEX))),
    *_on_both("temperature 1", 600, 0.97, Traffic(acceptance=steady(WARM))),
    *_on_both("code, hex, code", 900, 1.0, Traffic(acceptance=in_turn((300, CODE), (600, HEX), (0, CODE)))),
    *_on_both("hex, code", 900, 1.0, Traffic(acceptance=in_turn((300, HEX), (0, CODE)))),
    *_on_both("temperature 1, code", 900, 1.0, Traffic(acceptance=in_turn((300, WARM), (0, CODE)))),
    *_on_both("mixed requests", 900, 0.95, Traffic(acceptance=mixed(5, ((3, CODE), (1, HEX)), 0.7))),
    *_on_both("mostly hex", 900, 0.95, Traffic(acceptance=mixed(5, ((1, CODE), (6, HEX)), 0.7))),
    *_on_both(
        "idle gaps",
        1800,
        0.95,
        Traffic(acceptance=in_turn((600, CODE), (1200, HEX), (0, CODE)), batch=lambda now: int(now % 45 < 4)),
    ),
    *_on_both("restart", 900, 0.97, Traffic(acceptance=steady(CODE), outages=((400, 430),))),
    Scenario(
        name="load 1, 64, 1; pays at 1",
        engine=GPU,
        traffic=_loads(900, 60, 900, (0.45, 0.35, 0.3)),
        seconds=1860,
        share=1.0,
    ),
    Scenario(
        name="load 1, 64, 1; mostly 64",
        engine=GPU,
        traffic=_loads(100, 600, 100, (0.45, 0.35, 0.3)),
        seconds=800,
        share=0.97,
    ),
    Scenario(
        name="load 1, 64, 1; pays at both",
        engine=GPU,
        traffic=_loads(900, 30, 900, (0.8, 0.7, 0.6)),
        seconds=1830,
        share=1.0,
    ),
    Scenario(
        name="load 64, 1; pays at 1",
        engine=GPU,
        traffic=_loads(0, 60, 900, (0.45, 0.35, 0.3)),
        seconds=960,
        share=1.0,
    ),
    Scenario(
        name="load wanders",
        engine=GPU,
        traffic=Traffic(acceptance=steady((0.6, 0.5, 0.4)), batch=wandering_load(3, 64)),
        seconds=900,
        share=0.97,
    ),
    *(
        Scenario(
            name=f"decay in 4 hours, {label}",
            engine=engine,
            traffic=Traffic(acceptance=decaying(14400), grain=6.0),
            seconds=14400,
            share=1.0,
            tick=6.0,
        )
        for label, engine in ENGINES.items()
    ),
    Scenario(
        name="noisy machine, code",
        engine=NOISY,
        traffic=Traffic(acceptance=steady(CODE)),
        seconds=900,
        share=0.95,
    ),
    Scenario(
        name="noisy machine, hex",
        engine=NOISY,
        traffic=Traffic(acceptance=steady(HEX)),
        seconds=900,
        share=0.95,
    ),
    # Traffic made against any control that learns from the past: it turns about as fast as a slow
    # engine can afford to probe.
    *_on_both("turns of 20 s", 900, 0.87, Traffic(acceptance=alternating(20, (CODE, HEX)))),
    *_on_both("turns of 5 s", 900, 0.9, Traffic(acceptance=alternating(5, (CODE, HEX)))),
)


def _replays() -> tuple[Scenario, ...]:
    engine, texts = recording(RECORDING)
    code, noise = texts["code"], texts["base64"]
    both = Recorded(tuple(chain.from_iterable(zip(code.answers, noise.answers, strict=True))))
    traffic = {
        f"{kind} at {batch}": Traffic(acceptance=steady(text), batch=load_in_turn((0, batch)))
        for kind, text in texts.items()
        for batch in (1, 8)
    }
    traffic["code, base64, chat"] = Traffic(acceptance=in_turn((200, code), (400, noise), (0, texts["chat"])))
    traffic["code and base64 at once"] = Traffic(acceptance=steady(both), batch=load_in_turn((0, 4)))
    traffic["code and base64 by turns of 20 s"] = Traffic(acceptance=alternating(20, (code, noise)))
    return tuple(
        Scenario(name=f"recorded {name}", engine=engine, traffic=each, seconds=600, share=0.97)
        for name, each in traffic.items()
    )


REPLAYS = _replays()
"""The demo pair's own drafts and steps, on two cores."""

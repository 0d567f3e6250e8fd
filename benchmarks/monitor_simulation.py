"""
What the monitor makes of hours of simulated traffic: `python -m benchmarks.monitor_simulation`.

Compared with the best fixed number of draft tokens, known in hindsight and zero included.  No worker
is started: the engines are arithmetic (`tests/simulated_worker.py`), so that figures are the same on
every machine and say how well is decided, not how fast anything is.

Prints two tables, and writes them and the timeline of one run to `--out`.
"""

import argparse
import csv
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from appliance.speculation.values import SpeculationMode
from tests.scenarios import (
    CODE,
    CPU,
    ENGINES,
    HEX,
    POLICY,
    SCENARIOS,
    Scenario,
    at_payoff,
    in_turn,
    steady,
)
from tests.simulated_worker import Run, Traffic

PAYOFFS = (-0.3, -0.2, -0.1, -0.05, -0.02, 0.0, 0.02, 0.05, 0.1, 0.2, 0.3)
COLOURS = {
    SpeculationMode.SPECULATIVE: "#2a7f5f",
    SpeculationMode.PROBING: "#d9a21b",
    SpeculationMode.TARGET_ONLY: "#8a8f98",
}


@dataclass(frozen=True, kw_only=True)
class Row:
    """One scenario over all seeds."""

    scenario: str
    best: int
    worst: float
    mean: float
    flips: int
    probed: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    options = parser.parse_args()
    print("adaptive tokens / tokens of the best fixed K known in hindsight; flips: most in one run\n")
    rows = list(table((scenario for scenario in SCENARIOS), options.seeds))
    print("\nten minutes of one text, by what the best K > 0 gives over K=0\n")
    rows += table(steady_texts(), options.seeds)
    with (options.out / "monitor_simulation.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(Row.__dataclass_fields__)
        for row in rows:
            shown = (
                row.scenario,
                row.best,
                f"{row.worst:.3f}",
                f"{row.mean:.3f}",
                row.flips,
                f"{row.probed:.4f}",
            )
            writer.writerow(shown)
    (options.out / "monitor_simulation.svg").write_text(timeline(example().run()), encoding="utf-8")


def steady_texts() -> Iterable[Scenario]:
    for label, engine in ENGINES.items():
        for payoff in PAYOFFS:
            traffic = Traffic(acceptance=steady(at_payoff(engine, payoff)))
            yield Scenario(
                name=f"{payoff:+.2f}, {label}", engine=engine, traffic=traffic, seconds=600, share=0.0
            )


def example() -> Scenario:
    """Code, then random hex, then code: what the drill does to a real worker."""
    traffic = Traffic(acceptance=in_turn((60, CODE), (150, HEX), (0, CODE)))
    return Scenario(name="example", engine=CPU, traffic=traffic, seconds=240, share=0.0)


def table(scenarios: Iterable[Scenario], seeds: int) -> Iterable[Row]:
    print(f"{'scenario':<30}{'best K':>7}{'worst':>8}{'mean':>8}{'flips':>7}{'probed':>9}")
    for scenario in scenarios:
        row = measured(scenario, seeds)
        print(
            f"{row.scenario:<30}{row.best:>7}{row.worst:>8.3f}{row.mean:>8.3f}{row.flips:>7}{row.probed:>9.2%}",
            flush=True,
        )
        yield row


def measured(scenario: Scenario, seeds: int) -> Row:
    fixed = scenario.fixed()
    best = max(fixed, key=fixed.__getitem__)
    runs = [scenario.run(POLICY, seed=seed) for seed in range(seeds)]
    shares = [run.tokens / fixed[best] for run in runs]
    return Row(
        scenario=scenario.name,
        best=best,
        worst=min(shares),
        mean=sum(shares) / seeds,
        flips=max(run.flips for run in runs),
        probed=max(run.state.probed_steps / run.steps for run in runs),
    )


def timeline(run: Run, width: int = 960, height: int = 240) -> str:
    """Draw tokens per second over time, on the colour of the mode."""
    polls, left, bottom = run.polls, 50, height - 30
    across = (width - left - 10) / polls[-1].at
    rates = [(later.tokens - earlier.tokens) / (later.at - earlier.at) for earlier, later in pairwise(polls)]
    up = (bottom - 30) / max(rates)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}">',
        "<style>text {font: 12px sans-serif}</style>",
        f'<rect width="{width}" height="{height}" fill="white"/>',
    ]
    for earlier, later in pairwise(polls):
        x, wide = left + earlier.at * across, (later.at - earlier.at) * across
        colour = COLOURS[earlier.state.mode]
        parts.append(
            f'<rect x="{x:.1f}" y="30" width="{wide + 0.5:.1f}" height="{bottom - 30}" '
            f'fill="{colour}" opacity="0.3"/>'
        )
    points = " ".join(
        f"{left + poll.at * across:.1f},{bottom - rate * up:.1f}"
        for poll, rate in zip(polls[1:], rates, strict=True)
    )
    parts.append(f'<polyline points="{points}" fill="none" stroke="#1b2a41" stroke-width="1.5"/>')
    parts += [
        f'<text x="{left + second * across:.1f}" y="{height - 12}" text-anchor="middle">{second} s</text>'
        for second in range(0, int(polls[-1].at) + 1, 30)
    ]
    for share in (0.5, 1.0):
        rate = max(rates) * share
        parts.append(
            f'<text x="{left - 6}" y="{bottom - rate * up + 4:.1f}" text-anchor="end">{rate:.0f}</text>'
        )
    x = left
    for mode, colour in COLOURS.items():
        parts.append(f'<rect x="{x}" y="10" width="12" height="12" fill="{colour}" opacity="0.5"/>')
        parts.append(f'<text x="{x + 18}" y="20">{mode}</text>')
        x += 120
    parts.append(f'<text x="{x}" y="20">line: tokens per second, simulated</text></svg>')
    return "\n".join(parts) + "\n"


if __name__ == "__main__":
    main()

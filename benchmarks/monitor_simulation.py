"""
What the monitor makes of hours of simulated traffic: `python -m benchmarks.monitor_simulation`.

Compared with the best fixed number of draft tokens, known in hindsight and zero included.  No worker
is started: the engines are arithmetic (`tests/simulated_worker.py`), so that figures are the same on
every machine and say how well is decided, not how fast anything is.

Prints three tables: tokens in all, tokens of steady texts, and how soon the right choice is made after a
change of traffic.  Writes them and the timeline of one run to `--out`.
"""

import argparse
import csv
import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

from appliance.speculation.values import SpeculationMode, bucket_of
from tests.scenarios import (
    CODE,
    CPU,
    ENGINES,
    GPU,
    HEX,
    NOISY,
    POLICY,
    REPLAYS,
    SCENARIOS,
    WARM,
    Scenario,
    at_payoff,
    in_turn,
    load_in_turn,
    steady,
)
from tests.simulated_worker import Acceptance, Engine, Run, Traffic, controlled, length_of

CHANGED, FOLLOWED = 60.0, 150.0
"""Seconds of the traffic before a change, and after it."""
PAYOFFS = (-0.3, -0.2, -0.1, -0.05, -0.02, 0.0, 0.02, 0.05, 0.1, 0.2, 0.3)
COLOURS = {
    SpeculationMode.SPECULATIVE: "#2a7f5f",
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
    lost: float


@dataclass(frozen=True, kw_only=True)
class Change:
    """A change of text or load, and what it is worth to follow it."""

    name: str
    engine: Engine
    text: tuple[Acceptance, Acceptance]
    batch: tuple[int, int] = (1, 1)

    def goodput(self, k: int, when: int) -> float:
        """Tokens per second with K draft tokens before (0) or after (1)."""
        batch = self.batch[when]
        return batch * length_of(self.text[when], k) / self.engine.seconds(batch, k)

    def best(self, when: int) -> int:
        return max(self.engine.choices, key=lambda k: self.goodput(k, when))

    def worth(self) -> float:
        """Gain of the best K after the change over the one that was best before."""
        return self.goodput(self.best(1), 1) / self.goodput(self.best(0), 1) - 1.0

    def reaction(self, seed: int) -> float:
        """Seconds until the choice is within 5 % of the best for 5 s; infinite if not within `FOLLOWED`."""
        traffic = Traffic(
            acceptance=in_turn((CHANGED, self.text[0]), (0, self.text[1])),
            batch=load_in_turn((CHANGED, self.batch[0]), (0, self.batch[1])),
        )
        run = controlled(self.engine, traffic, POLICY, CHANGED + FOLLOWED, seed=seed)
        bucket, limit = bucket_of(self.batch[1]), 0.95 * self.goodput(self.best(1), 1)
        after = [poll for poll in run.polls if poll.at > CHANGED]
        good = [self.goodput(poll.state.draft_tokens(bucket), 1) >= limit for poll in after]
        held = (at for at in range(len(good)) if all(good[at : at + 5]))
        found = next(held, None)
        return math.inf if found is None else after[found].at - CHANGED


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    print("adaptive tokens / tokens of the best fixed K known in hindsight; flips: most in one run;")
    print("lost: share of engine time that exploration cost by expectation\n")
    rows = list(table([*SCENARIOS, *REPLAYS], options.seeds))
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
                f"{row.lost:.4f}",
            )
            writer.writerow(shown)
    print("\nseconds from a change until the choice is within 5 % of the best\n")
    with (options.out / "monitor_reactions.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(("change", "worth", "from", "to", "median", "worst"))
        writer.writerows(reactions(options.seeds))
    (options.out / "monitor_simulation.svg").write_text(timeline(example().run()), encoding="utf-8")


def changes() -> Iterable[Change]:
    slow = replace(GPU, seconds=lambda batch, k: 3 * GPU.seconds(batch, k))
    for label, engine in (*ENGINES.items(), ("noisy machine", NOISY), ("10 steps a second", slow)):
        for name, before, after in (
            ("code to hex", CODE, HEX),
            ("code to temperature 1", CODE, WARM),
            ("code to -0.12", CODE, at_payoff(engine, -0.12)),
            ("hex to code", HEX, CODE),
            ("temperature 1 to code", WARM, CODE),
            ("hex to +0.50", HEX, at_payoff(engine, 0.5)),
            ("hex to +0.30", HEX, at_payoff(engine, 0.3)),
            ("hex to +0.12", HEX, at_payoff(engine, 0.12)),
        ):
            yield Change(name=f"{name}, {label}", engine=engine, text=(before, after))
        if engine.largest_batch > CPU.largest_batch:
            for batch in ((1, 64), (64, 1), (1, 32)):
                text = (0.45, 0.35, 0.3)
                name = f"load {batch[0]} to {batch[1]}, {label}"
                yield Change(name=name, engine=engine, text=(text, text), batch=batch)


def reactions(seeds: int) -> Iterable[tuple[str, str, int, int, str, str]]:
    print(f"{'change':<36}{'worth':>7}{'from':>6}{'to':>4}{'median':>8}{'worst':>7}")
    for change in changes():
        took = sorted(change.reaction(seed) for seed in range(seeds))
        ks, middle, worst = (change.best(0), change.best(1)), took[len(took) // 2], took[-1]
        print(
            f"{change.name:<36}{change.worth():>7.0%}{ks[0]:>6}{ks[1]:>4}{middle:>8.0f}{worst:>7.0f}",
            flush=True,
        )
        yield (change.name, f"{change.worth():.3f}", *ks, f"{middle:.0f}", f"{worst:.0f}")


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
            f"{row.scenario:<30}{row.best:>7}{row.worst:>8.3f}{row.mean:>8.3f}{row.flips:>7}{row.lost:>9.2%}",
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
        lost=max(run.state.figures.exploration_share for run in runs),
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

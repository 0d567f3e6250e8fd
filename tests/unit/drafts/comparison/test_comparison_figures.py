"""What is concluded from the rounds of a comparison, and how it is shown."""

import math
import random

import pytest

from appliance.drafts.comparison.figures import (
    ComparisonCell,
    MethodComparison,
    MethodFigures,
    RoundMeasurement,
    recommend,
    summarise,
)
from appliance.drafts.comparison.rendering import BAR, render_comparison
from appliance.drafts.evaluation.intervals import ConfidenceInterval

ROUNDS = 10


def measured(
    concurrency: int, draft_tokens: int, factor: float, noise: float = 0.01
) -> list[RoundMeasurement]:
    """Rounds whose machine is fast and slow by turns, by far more than `factor` says."""
    dice = random.Random(draft_tokens)
    return [
        RoundMeasurement(
            round=number,
            concurrency=concurrency,
            draft_tokens=draft_tokens,
            tokens=100,
            seconds=(1 + number % 3) / (factor * (1 + dice.uniform(-noise, noise))),
            drafts=50 if draft_tokens else 0,
            accepted_tokens=20 * draft_tokens,
        )
        for number in range(ROUNDS)
    ]


def cell(concurrency: int, draft_tokens: int, low: float, value: float, high: float) -> ComparisonCell:
    ratio = ConfidenceInterval(value=value, low=low, high=high)
    return ComparisonCell(
        concurrency=concurrency, draft_tokens=draft_tokens, tokens_per_second=100.0, ratio=ratio
    )


def method(name: str, *cells: ComparisonCell, draft: str | None = None, problem: str = "") -> MethodFigures:
    return MethodFigures(method=name, draft=draft, cells=cells, problem=problem)


def comparison(*methods: MethodFigures) -> MethodComparison:
    return MethodComparison(
        engine="vllm 0.32.0",
        target="/models/target",
        prompts=20,
        rounds=ROUNDS,
        max_tokens=64,
        methods=methods,
        recommendation=recommend(methods),
    )


def test_ratio_is_within_the_round():
    """Rounds differ by a factor of three, and the interval is narrow all the same."""
    rounds = [*measured(1, 2, 1.2), *measured(1, 0, 1.0), *measured(4, 0, 5.0), *measured(4, 2, 4.0)]
    random.Random(1).shuffle(rounds)
    cells = summarise(rounds)
    assert [(each.concurrency, each.draft_tokens) for each in cells] == [(1, 0), (1, 2), (4, 0), (4, 2)]
    assert [each.ratio is None for each in cells] == [True, False, True, False]
    assert [each.acceptance_length for each in cells] == [None, pytest.approx(1.8)] * 2
    one, four = cells[1].ratio, cells[3].ratio
    assert one.value == pytest.approx(1.2, rel=0.02)
    assert one.high - one.low < 0.1
    assert four.value == pytest.approx(0.8, rel=0.02)


def test_method_with_the_largest_gain_is_recommended():
    found = recommend(
        [
            method("ngram", cell(1, 1, 1.01, 1.1, 1.2), cell(8, 1, 1.01, 1.1, 1.2)),
            method("eagle3", cell(1, 3, 1.2, 1.5, 1.6), cell(8, 3, 0.7, 0.8, 0.9), draft="/models/head"),
            method("suffix", problem="a package is missing"),
        ]
    )
    # 1.5 times 1 is more than 1.1 times 1.1: at 8 the monitor stops.
    assert (found.method, found.draft, found.draft_tokens) == ("eagle3", "/models/head", 3)


def test_largest_number_that_is_best_at_a_concurrency_is_recommended():
    cells = [cell(1, 1, 1.1, 1.2, 1.3), cell(1, 3, 1.3, 1.4, 1.5), cell(8, 1, 1.1, 1.2, 1.3)]
    assert recommend([method("ngram", *cells, cell(8, 3, 0.9, 1.1, 1.3))]).draft_tokens == 3
    assert recommend([method("ngram", cells[0], cell(1, 3, 1.01, 1.1, 1.2))]).draft_tokens == 1


def test_what_is_not_shown_to_pay_is_not_recommended():
    unsure = recommend(
        [method("ngram", cell(1, 1, 0.99, 1.4, 1.9)), method("eagle3", cell(1, 1, 0.5, 0.6, 0.7))]
    )
    assert (unsure.method, unsure.draft_tokens, unsure.undecided) == ("none", None, True)
    assert recommend([method("ngram", cell(1, 1, 0.5, 0.6, 0.7))]).undecided is False


def test_the_best_of_many_that_do_nothing_is_not_recommended():
    """In two of five such comparisons one of twenty ratios is above 1 with its own interval."""
    alone = together = 0
    for seed in range(200):
        dice = random.Random(seed)
        values = [math.exp(0.05 * dice.gauss(0, 1)) for _ in range(20)]
        reach = math.exp(0.05 * 1.96)
        found = method("ngram", *(cell(1, k, at / reach, at, at * reach) for k, at in enumerate(values, 1)))
        alone += any(at / reach > 1 for at in values)
        together += recommend([found]).method != "none"
    assert alone >= 60
    assert together <= 12


def test_a_ratio_is_recommended_as_one_of_few_and_not_as_one_of_many():
    paying, useless = cell(1, 1, 1.02, 1.1, 1.2), [cell(1, k, 0.7, 0.8, 0.9) for k in range(2, 16)]
    assert recommend([method("ngram", paying)]).method == "ngram"
    many = recommend([method("ngram", paying, *useless)])
    assert (many.method, many.undecided) == ("none", True)


def test_without_a_measurement_there_is_no_recommendation():
    found = comparison(method("suffix", problem="a package is missing"))
    assert found.recommendation is None
    text = render_comparison(found)
    assert "suffix: not measured: a package is missing" in text
    assert text.endswith("No method could be measured.")


def test_table_bars_and_settings_are_shown():
    cells = summarise([*measured(1, 0, 1.0, 0.0), *measured(1, 1, 0.5, 0.0), *measured(1, 2, 2.0, 0.0)])
    text = render_comparison(
        comparison(method("eagle3", *cells, draft="/models/head"), method("mtp", problem="why"))
    )
    lines = text.splitlines()
    assert lines[:5] == [
        "method  concurrency  K  tokens/s  ratio (95 % interval)   acceptance length",
        "eagle3            1  0      50.0  1                       -",
        "eagle3            1  1      25.0  0.500 (0.500 to 0.500)  1.40",
        "eagle3            1  2     100.0  2.000 (2.000 to 2.000)  1.80",
        "mtp: not measured: why",
    ]
    assert "compare methods by their ratios, not by their tokens/s." in text
    bars = [line for line in lines if " at 1, K=" in line]
    assert bars == [
        f"eagle3 at 1, K=1  {'#' * (BAR // 4)}{' ' * (BAR // 4 - 1)}|{' ' * (BAR // 2)} 0.50",
        f"eagle3 at 1, K=2  {'#' * (BAR // 2 - 1)}|{'#' * (BAR // 2)} 2.00",
    ]
    assert lines[-4:] == ["worker:", "  method: eagle3", "  draft: /models/head", "  draft_tokens: 2"]


def test_two_drafts_of_one_method_are_told_apart():
    first, second = cell(1, 1, 0.5, 0.6, 0.7), cell(1, 1, 1.1, 1.2, 1.3)
    text = render_comparison(
        comparison(method("eagle3", first, draft="/a/head"), method("eagle3", second, draft="/b/head"))
    )
    for line in (
        "eagle3: draft /a/head",
        "eagle3 (2): draft /b/head",
        "  draft: /b/head",
        "  method: eagle3",
    ):
        assert line in text.splitlines()
    assert "eagle3 (2) at 1, K=1  " in text


def test_interval_and_doubt_are_shown():
    text = render_comparison(comparison(method("ngram", cell(1, 1, 0.5, 0.9, 1.5))))
    (bar,) = [line for line in text.splitlines() if "K=1" in line]
    assert bar.partition("  ")[2] == f"{'#' * 16}{'-' * 15}|{'-' * 16} 0.90"
    assert "though one may" in text
    assert text.endswith("worker:\n  method: none")

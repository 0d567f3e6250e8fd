"""What it plans, how it counts, and what it writes."""

import csv
import io
import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest
from hypothesis import given
from hypothesis import strategies as st

from appliance.speculation.values import EngineReading, SpecDecodeCounters, StepCounters
from benchmarks.speculation.appliances import follows, order
from benchmarks.speculation.charts import break_even_chart, speed_chart
from benchmarks.speculation.data import document, table
from benchmarks.speculation.figures import Figures, Trace, acceptance_length, figures_of
from benchmarks.speculation.load import BenchmarkError, completion_tokens, is_content
from benchmarks.speculation.options import parse
from benchmarks.speculation.plan import (
    ADAPTIVE,
    TARGET_ALONE,
    Cell,
    Control,
    Kind,
    Mode,
    Plan,
    is_code,
    modes_of,
)
from benchmarks.speculation.plot import Line, Panel, Style, svg, ticks
from benchmarks.speculation.provenance import Provenance
from benchmarks.speculation.report import markdown
from benchmarks.speculation.standstill import Standstill, tree
from benchmarks.speculation.summary import Learnt, Measured, parse_learnt, ratios, summarise, verdict
from benchmarks.speculation.traffic import (
    Prompt,
    fitted_characters,
    long_texts,
    prompts_of,
    traffic_of,
)
from demo.training.corpus import Corpus

CELL = Cell(kind=Kind.CODE, temperature=0.0, concurrency=4)
K0, K1, K3 = (Mode(control=Control.FIXED, draft_tokens=k) for k in (0, 1, 3))
CORPUS = Corpus(
    training=[],
    held_out=["".join(f"def f{n}():\n    return {n}\n" for n in range(at, at + 2000)) for at in (0, 5000)],
    dialogues=[],
)
PROVENANCE = Provenance(
    command="python -m benchmarks.speculation --quick",
    hardware="a <processor> & more",
    commit="abc1234",
    has_changes=True,
    engine="vllm 0.32.0",
    model="target",
    draft="draft",
    date="2026-01-02",
)
FIGURES = Figures(seconds=4.0, tokens=400.0, requests=4, ttft=0.05, tpot=0.01)


def plan(**changes: object) -> Plan:
    return replace(parse(["--quick"]).plan, **changes)


def segment(mode: Mode, tokens: float, number: int = 0, **figures: object) -> Measured:
    return Measured(cell=CELL, mode=mode, number=number, figures=replace(FIGURES, tokens=tokens, **figures))


def steps(bucket: int, k: int, seconds_each: float, count: int = 100, tokens_each: float = 1) -> dict:
    tokens = round(count * tokens_each)
    return {(bucket, k): StepCounters(steps=count, seconds=count * seconds_each, tokens=tokens)}


# The plan


@given(rounds=st.integers(1, 12), k=st.integers(1, 8))
def test_each_round_measures_every_mode_once(rounds: int, k: int):
    planned = plan(rounds=rounds, modes=modes_of(range(k + 1), separate_target=True))
    for number in range(rounds):
        assert sorted(mode.name for mode in planned.order(number)) == sorted(
            mode.name for mode in planned.modes
        )


def test_no_mode_always_comes_first_or_after_the_same_one():
    planned = plan(rounds=6)
    orders = [planned.order(number) for number in range(6)]
    assert {order[0] for order in orders} == set(planned.modes)
    after = [before for order in orders for before, mode in pairwise(order) if mode == ADAPTIVE]
    assert len(set(after)) > 1


def test_the_estimate_is_at_least_what_is_measured():
    planned = plan()
    segments = planned.rounds * len(planned.modes) * len(planned.cells)
    assert planned.estimate_seconds > segments * planned.seconds + len(planned.cells) * planned.learn


def test_each_start_of_the_processes_takes_as_long_again():
    assert plan(restarts=3).estimate_seconds == 3 * plan().estimate_seconds


def test_shifting_traffic_is_measured_through_each_of_its_phases():
    planned = plan(seconds=4.0, shift_seconds=8.0)
    assert (planned.window(Kind.SHIFT), planned.window(Kind.CODE)) == (16.0, 4.0)
    assert [is_code(elapsed, 8.0) for elapsed in (-0.5, 0.0, 7.9, 8.0, 15.9)] == [
        *(False, True, True, False, False)
    ]


# The command line


def test_the_quick_grid_can_be_changed_in_part():
    planned = parse(["--quick", "--concurrency", "2", "2", "1", "--no-separate-target"]).plan
    assert (planned.concurrency, planned.kinds, planned.seconds) == ((2, 1), (Kind.CODE, Kind.HEX), 4.0)
    assert TARGET_ALONE not in planned.modes


def test_the_fixed_modes_are_the_numbers_a_worker_is_prepared_for():
    modes = parse(["--draft-tokens", "5"]).plan.modes
    assert [mode.draft_tokens for mode in modes if mode.control is Control.FIXED] == [0, 1, 2, 3, 5]


@pytest.mark.parametrize(
    "arguments",
    [["--model", "somewhere"], ["--rounds", "0"], ["--seconds", "-1"], ["--kinds", "poetry"]],
)
def test_what_cannot_be_measured_is_refused(arguments: list[str], capsys: pytest.CaptureFixture):
    with pytest.raises(SystemExit) as refused:
        parse(arguments)
    assert refused.value.code == 2
    assert arguments[0] in capsys.readouterr().err


# Traffic


@pytest.mark.parametrize("kind", [Kind.CODE, Kind.CHAT, Kind.OWN_CHAT, Kind.HEX, Kind.MIXED])
def test_a_kind_of_traffic_is_the_same_whenever_it_is_made(kind: Kind):
    prompts = prompts_of(kind, CORPUS)
    assert prompts == prompts_of(kind, CORPUS)
    assert len(set(prompts)) == len(prompts) > 16


def test_mixed_traffic_has_all_sorts_in_turn():
    first = prompts_of(Kind.MIXED, CORPUS)[:4]
    assert (first[0], first[3]) == (prompts_of(Kind.CODE, CORPUS)[0], prompts_of(Kind.HEX, CORPUS)[0])
    assert len({prompt.text[:8] for prompt in first}) == 4


def test_shifting_traffic_is_hex_before_it_is_measured_and_code_first():
    traffic = traffic_of(Kind.SHIFT, CORPUS, shift_seconds=8.0)
    code, noise = prompts_of(Kind.CODE, CORPUS), prompts_of(Kind.HEX, CORPUS)
    assert [traffic.at(1, elapsed) for elapsed in (-1.0, 1.0, 9.0)] == [noise[1], code[1], noise[1]]


def test_no_request_finds_what_another_one_computed():
    bodies = [
        Prompt(text="x").body(model="m", max_tokens=8, temperature=0.0, salt=salt) for salt in ("a", "b")
    ]
    assert bodies[0]["cache_salt"] != bodies[1]["cache_salt"]
    assert all(body["ignore_eos"] and body["stream_options"]["include_usage"] for body in bodies)


def test_a_chat_leaves_the_template_to_the_worker():
    chat = Prompt(text="x", is_chat=True)
    assert chat.route == "/v1/chat/completions"
    assert "prompt" not in chat.body(model="m", max_tokens=8, temperature=0.0, salt="a")


@given(st.integers(1, 300_000))
def test_long_texts_are_as_long_as_asked(characters: int):
    texts = long_texts(CORPUS, characters, count=3)
    assert [len(text) for text in texts] == [characters] * 3


def test_a_fitted_text_fills_most_of_the_limit():
    assert fitted_characters(2200, 1000, 2000) == 2200 * 2 * 0.95


# What a stream says


def test_only_frames_with_tokens_count():
    lines = [
        b'data: {"id":"c","choices":[{"index":0,"delta":{"role":"assistant","content":""}}]}\n',
        b'data: {"id":"c","choices":[{"index":0,"delta":{"content":"\\"delta\\":{\\"role\\""}}]}\n',
        b'data: {"id":"c","choices":[{"index":0,"text":"\\"choices\\":[]"}]}\n',
        b": keep-alive\n",
        b"\n",
        b'data: {"id":"c","choices":[],"usage":{"completion_tokens":7}}\n',
        b"data: [DONE]\n",
    ]
    assert [is_content(line) for line in lines] == [False, True, True, False, False, False, False]
    assert [completion_tokens(line) for line in lines] == [None, None, None, None, None, 7, None]


def test_an_error_in_a_stream_ends_the_benchmark():
    with pytest.raises(BenchmarkError, match="worker died"):
        is_content(b'data: {"error":{"message":"worker died"}}\n')


# Counting


@st.composite
def traces(draw: st.DrawFn) -> Trace:
    sent = draw(st.floats(0, 20))
    gaps = draw(st.lists(st.floats(0.001, 1), min_size=1, max_size=8))
    frames = [sent + sum(gaps[: n + 1]) for n in range(len(gaps))]
    return Trace(sent=sent, frames=tuple(frames), tokens=draw(st.integers(len(gaps), 100)))


@given(traces(), st.lists(st.floats(0, 40), min_size=3, max_size=3))
def test_every_token_counts_in_one_of_two_neighbouring_spans(trace: Trace, cuts: list[float]):
    low, middle, high = sorted(cuts)
    parts = trace.tokens_between(low, middle) + trace.tokens_between(middle, high)
    assert parts == pytest.approx(trace.tokens_between(low, high))
    assert trace.tokens_between(-1, 100) == pytest.approx(trace.tokens)


def test_requests_across_the_edges_count_in_part():
    steady = [
        Trace(sent=at - 1.0, frames=tuple(at + n / 10 for n in range(10)), tokens=20) for at in (1, 2, 3, 4)
    ]
    figures = figures_of(steady, 2.45, 4.45)
    assert figures.tokens_per_second == pytest.approx(20)
    assert figures.requests == 2
    assert figures.tpot == pytest.approx(0.9 / 18)
    assert figures.ttft == pytest.approx(1.0)
    assert figures.tokens_per_second_per_user == pytest.approx(20)


def test_a_segment_in_which_nothing_arrived_is_no_figure():
    with pytest.raises(ValueError, match="--seconds"):
        figures_of([Trace(sent=0.0, frames=(1.0,), tokens=1)], 2.0, 3.0)


def reading(epoch: str, drafts: int, count: int) -> EngineReading:
    drafting = SpecDecodeCounters(
        drafts=drafts, draft_tokens=3 * drafts, accepted_tokens=2 * drafts, accepted_per_position=()
    )
    return EngineReading(controllable=True, epoch=epoch, drafting=drafting, steps=steps(4, 3, 0.01, count))


def test_the_worker_is_counted_from_edge_to_edge():
    trace = Trace(sent=0.0, frames=(1.0, 2.0), tokens=2)
    figures = figures_of([trace], 0.5, 2.5, reading("a", 100, 50), reading("a", 160, 90))
    assert (figures.drafts, figures.accepted_tokens, figures.steps[4, 3].steps) == (60, 120, 40)
    assert acceptance_length([figures]) == 3.0


def test_counts_of_a_worker_that_restarted_are_left_out():
    trace = Trace(sent=0.0, frames=(1.0, 2.0), tokens=2)
    figures = figures_of([trace], 0.5, 2.5, reading("a", 100, 50), reading("b", 160, 90))
    assert (figures.drafts, figures.steps, acceptance_length([figures])) == (0, {}, None)


# Summing up


def test_ratios_are_made_within_a_round_with_what_was_best_over_all_of_them():
    # The machine is twice as fast in the second round: across rounds nothing could be said.
    measured = [
        *(segment(K0, 100, 0), segment(K3, 120, 0), segment(TARGET_ALONE, 150, 0), segment(ADAPTIVE, 114, 0)),
        *(segment(K0, 200, 1), segment(K3, 230, 1), segment(TARGET_ALONE, 160, 1), segment(ADAPTIVE, 198, 1)),
    ]
    assert ratios(measured, fixed_only=True) == pytest.approx([114 / 120, 198 / 230])
    measured[6] = segment(TARGET_ALONE, 240, 1)
    assert ratios(measured, fixed_only=False) == pytest.approx([114 / 150, 198 / 240])


def test_a_round_that_was_interrupted_is_not_compared():
    measured = [segment(K0, 100), segment(ADAPTIVE, 90), segment(K3, 120, 1), segment(ADAPTIVE, 90, 1)]
    assert ratios(measured, fixed_only=True) == []


@given(st.lists(st.floats(1, 1000), min_size=3, max_size=3), st.integers(1, 4))
def test_a_monitor_that_is_as_fast_as_the_best_reaches_the_goal(speeds: list[float], rounds: int):
    measured = [
        segment(mode, speed, number)
        for number in range(rounds)
        for mode, speed in zip((K0, K3, ADAPTIVE), (*speeds[:2], max(speeds[:2])), strict=True)
    ]
    found = verdict(summarise(measured, {}))
    assert found is not None
    assert (found.cells, found.against_fixed, found.against_all) == (1, 1, 1)


def test_the_verdict_counts_cells_below_the_goal():
    found = verdict(summarise([segment(TARGET_ALONE, 130), segment(K0, 100), segment(ADAPTIVE, 96)], {}))
    assert found is not None
    assert (found.cells, found.against_fixed, found.against_all) == (1, 1, 0)


def by_steps(*adaptive: dict) -> float | None:
    """Where K=0 gives 400 tokens a second, and K=3 600."""
    chosen = {key: spent for each in adaptive for key, spent in each.items()}
    measured = [
        segment(K0, 100, steps=steps(4, 0, 0.010, tokens_each=4)),
        segment(K3, 100, steps=steps(4, 3, 0.020, tokens_each=12)),
        segment(ADAPTIVE, 100, steps=chosen),
    ]
    return summarise(measured, {})[0].by_steps


def test_by_steps_it_is_the_choice_that_counts_and_not_the_machine():
    """Steps count by what one with their K took elsewhere, however long they took themselves."""
    assert by_steps(steps(4, 3, 0.020, tokens_each=12)) == pytest.approx(1.0)
    assert by_steps(steps(4, 3, 0.060, tokens_each=12)) == pytest.approx(1.0)
    assert by_steps(steps(4, 0, 0.001, tokens_each=4)) == pytest.approx(4 / 6)
    both = by_steps(steps(4, 3, 0.020, tokens_each=12), steps(4, 0, 0.010, tokens_each=4))
    assert both == pytest.approx((1200 + 400) / (2.0 + 1.0) / 600)
    # A text that was harder counts: acceptance is what the choice was for.
    assert by_steps(steps(4, 3, 0.020, tokens_each=6)) == pytest.approx(0.5)


def test_by_steps_nothing_is_said_without_steps():
    """Of this batch size, and with a K that was timed by itself."""
    assert by_steps() is None
    assert by_steps(steps(2, 3, 0.020, tokens_each=12)) is None
    assert by_steps(steps(4, 1, 0.020, tokens_each=12)) is None
    assert by_steps(steps(4, 3, 0.020, count=7)) is None
    assert summarise([segment(ADAPTIVE, 100, steps=steps(4, 3, 0.020))], {})[0].by_steps is None


def test_the_verdict_counts_choices_by_steps():
    measured = [
        segment(K3, 100, steps=steps(4, 3, 0.020, tokens_each=12)),
        segment(ADAPTIVE, 60, steps=steps(4, 3, 0.040, tokens_each=12)),
    ]
    found = verdict(summarise(measured, {}))
    assert found is not None
    assert (found.cells, found.against_fixed, found.by_steps) == (1, 0, 1)
    assert "it is 1." in markdown(plan(), PROVENANCE, summarise(measured, {}))


def test_nothing_compared_is_no_verdict():
    assert verdict(summarise([segment(K0, 100)], {})) is None
    assert "No cell" in markdown(plan(), PROVENANCE, summarise([segment(K0, 100)], {}))


def test_break_even_is_the_cost_of_a_step_over_one_without_drafts():
    learnt = Learnt(bucket=4, draft_tokens=3, reason="healthy", break_even=1.4, break_evens={3: 1.4})
    (cell,) = summarise(
        [
            segment(K0, 100, steps=steps(4, 0, 0.010)),
            segment(K1, 100, drafts=10, accepted_tokens=5, steps=steps(2, 1, 0.010)),
            segment(K3, 100, drafts=10, accepted_tokens=12, steps=steps(4, 3, 0.015)),
        ],
        {CELL: (learnt,)},
    )
    one, three = cell.break_even
    assert (three.draft_tokens, three.acceptance_length, three.learnt) == (3, 2.2, 1.4)
    assert three.measured == pytest.approx(1.5)
    # Its steps were of another batch size, which would compare the sizes.
    assert one.measured is None


def test_speed_ups_are_over_the_target_alone_and_over_k0_without_one():
    slow, fast = segment(K0, 100, tpot=0.02), segment(K3, 100, tpot=0.01)
    (cell,) = summarise([slow, fast], {})
    assert cell.speed_up(K3) == pytest.approx(2.0)
    (cell,) = summarise([slow, fast, segment(TARGET_ALONE, 100, tpot=0.015)], {})
    assert cell.speed_up(K3) == pytest.approx(1.5)


def test_what_the_monitor_learnt_is_read_with_and_without_a_break_even_for_each_k():
    bucket = {"bucket": 4, "draft_tokens": 3, "reason": "healthy", "break_even": 1.5}
    assert parse_learnt({"buckets": [bucket]})[0].break_evens == {}
    found = parse_learnt({"buckets": [{**bucket, "break_evens": {"1": 1.2, "3": 1.5}}]})
    assert found[0].break_evens == {1: 1.2, 3: 1.5}


# Control


@pytest.mark.parametrize(
    ("mode", "wanted"),
    [
        (ADAPTIVE, {"mode": "auto"}),
        (K0, {"mode": "target_only"}),
        (K3, {"mode": "speculative", "draft_tokens": 3}),
    ],
)
def test_a_mode_is_ordered_as_the_admin_api_wants_it(mode: Mode, wanted: dict):
    body = order(mode)
    assert {name: body.get(name) for name in wanted} == wanted
    assert body["worker"] == "*"


@pytest.mark.parametrize(
    ("override", "reason", "spans", "done"),
    [
        ({}, "operator_override", [[1, 64, 3]], [K3]),
        ({}, "operator_override", [[1, 4, 3], [5, 64, 0]], []),
        ({}, "operator_override", [], []),
        (None, "operator_override", [[1, 64, 3]], []),
        (None, "healthy", [[1, 64, 3]], [ADAPTIVE]),
    ],
)
def test_a_worker_follows_when_its_whole_table_does(
    override: dict | None, reason: str, spans: list, done: list[Mode]
):
    order = None if override is None else {"mode": "speculative"}
    worker = {"override": order, "reason": reason, "table": spans}
    assert [mode for mode in (K0, K3, ADAPTIVE) if follows(worker, mode)] == done


def test_a_process_and_its_children_stand_still_and_go_on():
    """All of them, however deep, because any of them may keep a core busy."""
    script = "sleep 60 & echo $!; wait"
    child = subprocess.Popen(["sh", "-c", script], stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    grandchild = int(child.stdout.readline())
    standstill = Standstill(child.pid)
    try:
        assert tree(child.pid) == (child.pid, grandchild)
        standstill.begin()
        _pid, status = os.waitpid(child.pid, os.WUNTRACED)
        assert os.WIFSTOPPED(status)
        standstill.end()
        _pid, status = os.waitpid(child.pid, os.WCONTINUED)
        assert os.WIFCONTINUED(status)
    finally:
        os.kill(grandchild, signal.SIGKILL)
        child.kill()
        child.communicate()


def test_a_process_is_found_whatever_its_name(tmp_path: Path):
    for pid, name, parent in ((2, "a) S 9 (", 1), (3, "b", 2), (4, "c", 9)):
        (tmp_path / str(pid)).mkdir()
        (tmp_path / str(pid) / "stat").write_text(f"{pid} ({name}) S {parent} 0 0", encoding="utf-8")
    (tmp_path / "5").mkdir()
    assert tree(1, tmp_path) == (1, 2, 3)


# What is written


def cells(*, concurrency: tuple[int, ...] = (1, 4, 16)) -> list[Measured]:
    return [
        Measured(
            cell=Cell(kind=kind, temperature=0.0, concurrency=count),
            mode=mode,
            number=number,
            figures=replace(FIGURES, tokens=100.0 * count + number),
        )
        for kind in (Kind.CODE, Kind.HEX)
        for count in concurrency
        for number in range(2)
        for mode in (TARGET_ALONE, K0, K3, ADAPTIVE)
    ]


def test_every_file_says_what_it_was_measured_with():
    measured = cells()
    found = summarise(measured, {})
    written = json.loads(document(plan(), PROVENANCE, found, measured))
    assert written["provenance"]["command"] == PROVENANCE.command
    text = markdown(plan(), PROVENANCE, found)
    for part in (PROVENANCE.command, PROVENANCE.hardware, "abc1234", "vllm 0.32.0", "2026-01-02"):
        assert part in text
        assert part in "".join(" ".join(ET.fromstring(speed_chart(PROVENANCE, found)).itertext()).split("\n"))
    assert "uncommitted" in text


def test_the_table_holds_a_line_for_each_mode_of_each_cell():
    rows = list(csv.DictReader(io.StringIO(table(summarise(cells(), {})))))
    assert len(rows) == 2 * 3 * 4
    assert {row["mode"] for row in rows} == {"target alone", "K=0", "K=3", "adaptive"}
    row = next(row for row in rows if row["mode"] == "adaptive" and row["concurrency"] == "4")
    assert float(row["adaptive_over_best_fixed"]) == 1.0
    assert float(row["tokens_per_second"]) == pytest.approx(100.125)


def test_json_keeps_every_segment():
    measured = cells()
    written = json.loads(document(plan(), PROVENANCE, summarise(measured, {}), measured))
    assert len(written["segments"]) == len(measured)
    assert written["segments"][-1]["mode"] == "adaptive"


def test_markdown_tables_have_as_many_columns_as_headings():
    lines = markdown(plan(), PROVENANCE, summarise(cells(), {})).splitlines()
    heights = [line.count("|") for line in lines if line.startswith("|")]
    tables = "\n".join(line if line.startswith("|") else "" for line in lines).split("\n\n")
    for block in filter(None, (block.strip() for block in tables)):
        assert len({line.count("|") for line in block.splitlines()}) == 1
    assert heights


@pytest.mark.parametrize("chart", [speed_chart, break_even_chart])
def test_charts_of_little_or_of_one_concurrency_are_whole(chart):
    for measured in ([], cells(concurrency=(4,)), [segment(K0, 100)]):
        root = ET.fromstring(chart(PROVENANCE, summarise(measured, {})))
        assert root.tag.endswith("svg")


@given(
    st.lists(
        st.tuples(st.integers(0, 6), st.floats(0.01, 1e4)), min_size=1, max_size=8, unique_by=lambda p: p[0]
    )
)
def test_every_point_lies_on_its_panel(points: list[tuple[int, float]]):
    line = Line(
        name="K=1", style=Style(colour="#000"), points=tuple((2.0**x, y, y, y) for x, y in sorted(points))
    )
    drawn = svg("t", "s", [[Panel(title="p", x_label="x", y_label="y", lines=(line,))]])
    root = ET.fromstring(drawn)
    width, height = (float(size) for size in root.attrib["viewBox"].split()[2:])
    circles = [node for node in root.iter() if node.tag.endswith("circle")]
    assert len(circles) == len(points)
    assert all(0 < float(node.attrib["cx"]) < width for node in circles)
    assert all(0 < float(node.attrib["cy"]) < height for node in circles)


@given(st.floats(0, 1e5), st.floats(0, 1e5))
def test_ticks_enclose_what_they_measure(first: float, second: float):
    low, high = sorted((first, second))
    found = ticks(low, high)
    slack = 1e-6 * (high - low) + 1e-6
    assert found[0] <= low + slack
    assert found[-1] >= high - slack
    assert 2 <= len(found) <= 8
    assert list(found) == sorted(set(found))


def test_the_command_shows_its_options_without_starting_anything():
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.speculation", "--help"], capture_output=True, text=True, check=True
    )
    assert "--no-separate-target" in done.stdout

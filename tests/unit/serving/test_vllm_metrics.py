"""Reading a metrics page recorded from a real worker (vLLM 0.32.0, EAGLE 3.1 draft, K = 3)."""

from pathlib import Path

import pytest

from appliance.errors import WorkerFailedError
from appliance.serving.worker_metrics import parse_metrics

RECORDED = (Path(__file__).parents[2] / "data" / "vllm-0.32.0-metrics.txt").read_text(encoding="utf-8")
MINIMAL = """\
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0"} 2.0
vllm:num_requests_running{engine="1"} 1.0
# TYPE vllm:num_requests_waiting gauge
vllm:num_requests_waiting{engine="0"} 0.0
vllm:num_requests_waiting{engine="1"} 4.0
# TYPE vllm:kv_cache_usage_perc gauge
vllm:kv_cache_usage_perc{engine="0"} 0.25
vllm:kv_cache_usage_perc{engine="1"} 0.75
"""


def test_reads_the_recorded_page():
    """Every number we use is found under the name the real engine gives it."""
    metrics = parse_metrics(RECORDED)
    assert (metrics.running, metrics.waiting, metrics.kv_cache_usage) == (0, 0, 0.0)
    assert metrics.prompt_tokens_total > 0
    assert metrics.generation_tokens_total > 0
    assert metrics.preemptions_total == 0
    assert set(metrics.finished_requests_total) == {"stop", "length", "abort", "error", "repetition"}


def test_reads_speculation_from_the_recorded_page():
    """Three draft tokens per draft, and one counter per position."""
    metrics = parse_metrics(RECORDED)
    assert metrics.speculation.drafts > 0
    assert metrics.speculation.draft_tokens == 3 * metrics.speculation.drafts
    assert len(metrics.speculation.accepted_per_position) == 3
    assert sum(metrics.speculation.accepted_per_position) == metrics.speculation.accepted_tokens


def test_adds_up_the_engines_of_a_worker():
    """Requests add up; of the KV caches the fullest counts, because it preempts first."""
    metrics = parse_metrics(MINIMAL)
    assert (metrics.running, metrics.waiting, metrics.kv_cache_usage) == (3, 4, 0.75)


def test_distinguishes_no_speculation_from_no_drafts_yet():
    """A worker without a draft has no counters; one that has not drafted has zeros."""
    assert parse_metrics(MINIMAL).speculation is None
    page = MINIMAL + "# TYPE vllm:spec_decode_num_drafts counter\nvllm:spec_decode_num_drafts_total 0.0\n"
    assert parse_metrics(page).speculation.drafts == 0


def test_orders_positions_as_numbers():
    """Position 10 comes after position 2."""
    name = "vllm:spec_decode_num_accepted_tokens_per_pos"
    counters = "".join(f'{name}_total{{position="{position}"}} {100 - position}\n' for position in range(12))
    page = (
        f"{MINIMAL}# TYPE vllm:spec_decode_num_drafts counter\nvllm:spec_decode_num_drafts_total 100.0\n"
        f"# TYPE {name} counter\n{counters}"
    )
    assert parse_metrics(page).speculation.accepted_per_position == tuple(range(100, 88, -1))


@pytest.mark.parametrize(
    "page",
    [
        "",
        "<html>502 Bad Gateway</html>",
        "# TYPE up gauge\nup 1.0\n",
        MINIMAL.replace("0.25", "a quarter"),
        MINIMAL.replace("0.25", "NaN"),
        MINIMAL.replace("2.0", "+Inf"),
        MINIMAL[:-40],
        MINIMAL.replace('"} 2.0', " 2.0"),
    ],
)
def test_refuses_a_malformed_page(page):
    """Half a page or another program's page is a failed worker, never a set of zeros."""
    with pytest.raises(WorkerFailedError) as refusal:
        parse_metrics(page)
    assert "\n" not in str(refusal.value)

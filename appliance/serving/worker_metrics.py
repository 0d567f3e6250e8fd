"""
Parse a worker's metrics page; the only module that spells `vllm:`.

vLLM names its metrics in `vllm/v1/metrics/loggers.py` and `vllm/v1/spec_decode/metrics.py`.  A worker with
several engines reports each separately: counters are summed, and KV cache usage is the maximum, because the
fullest engine preempts first.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from appliance.errors import WorkerFailedError
from appliance.speculation.values import SpecDecodeCounters

PREFIX = "vllm:"
REQUIRED = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
READ = tuple(
    PREFIX + name
    for name in (
        *REQUIRED,
        "prompt_tokens_total",
        "generation_tokens_total",
        "num_preemptions_total",
        "request_success_total",
        "spec_decode_num_",
    )
)
"""Prefixes of the lines that are parsed: nine tenths of a page are other lines, mostly histograms."""
DRAFTS = "spec_decode_num_drafts_total"


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerMetrics:
    running: int
    waiting: int
    kv_cache_usage: float
    """Share of the KV cache in use in the fullest engine, 0..1."""
    prompt_tokens_total: int
    generation_tokens_total: int
    preemptions_total: int
    """Running requests preempted because the KV cache was full."""
    finished_requests_total: Mapping[str, int]
    """Finished requests by vLLM's reason, such as `stop`, `length`, `abort`, `error`."""
    speculation: SpecDecodeCounters | None
    """None if the worker was started without speculation."""


def parse_metrics(page: str) -> WorkerMetrics:
    """Parse a page in Prometheus text format; raises WorkerFailedError if it is not one of vLLM's."""
    if page and not page.endswith("\n"):
        raise WorkerFailedError("The worker's metrics page is cut off.")
    samples = _read(page)
    for name in REQUIRED:
        if name not in samples:
            raise WorkerFailedError(f"The worker's metrics page lacks {PREFIX}{name}; is it a vLLM worker?")
    return WorkerMetrics(
        running=_total(samples["num_requests_running"]),
        waiting=_total(samples["num_requests_waiting"]),
        kv_cache_usage=_finite(max(sample.value for sample in samples["kv_cache_usage_perc"])),
        prompt_tokens_total=_total(samples["prompt_tokens_total"]),
        generation_tokens_total=_total(samples["generation_tokens_total"]),
        preemptions_total=_total(samples["num_preemptions_total"]),
        finished_requests_total=_by_label(samples["request_success_total"], "finished_reason"),
        speculation=_speculation(samples) if DRAFTS in samples else None,
    )


def _read(page: str) -> defaultdict[str, list[Sample]]:
    samples: defaultdict[str, list[Sample]] = defaultdict(list)
    try:
        wanted = "\n".join(line for line in page.splitlines() if line.startswith(READ))
        families: Iterable[Metric] = text_string_to_metric_families(wanted)
        for family in families:
            for sample in family.samples:
                if sample.name.startswith(PREFIX):
                    samples[sample.name.removeprefix(PREFIX)].append(sample)
    except (ValueError, IndexError, KeyError) as error:
        # The parser raises what its string handling raises.
        raise WorkerFailedError("The worker's metrics page is not in Prometheus text format.") from error
    return samples


def _speculation(samples: Mapping[str, list[Sample]]) -> SpecDecodeCounters:
    accepted = _by_label(samples.get("spec_decode_num_accepted_tokens_per_pos_total", []), "position")
    try:
        positions = sorted(accepted, key=int)
    except ValueError as error:
        message = "The worker's metrics page contains a draft position that is not a number."
        raise WorkerFailedError(message) from error
    return SpecDecodeCounters(
        drafts=_total(samples[DRAFTS]),
        draft_tokens=_total(samples.get("spec_decode_num_draft_tokens_total", [])),
        accepted_tokens=_total(samples.get("spec_decode_num_accepted_tokens_total", [])),
        accepted_per_position=tuple(accepted[position] for position in positions),
    )


def _total(samples: Iterable[Sample]) -> int:
    return round(_finite(sum(sample.value for sample in samples)))


def _by_label(samples: Iterable[Sample], label: str) -> dict[str, int]:
    counts: defaultdict[str, float] = defaultdict(float)
    for sample in samples:
        counts[sample.labels.get(label, "")] += sample.value
    return {value: round(_finite(count)) for value, count in counts.items()}


def _finite(value: float) -> float:
    if not math.isfinite(value):
        raise WorkerFailedError("The worker's metrics page contains a value that is not a number.")
    return value

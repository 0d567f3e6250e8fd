"""
Each alert fires in its cases, is quiet in others, and resolves at the end.

Prometheus itself judges, through `promtool test rules`, on series written in its own notation: `0x4` is a
0 and four more, a minute apart; `1+2x4` adds 2 each time.
"""

import json
import subprocess
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from tests.deploy.monitoring_files import DASHBOARDS, RECORDING, RULES, alerts, groups, tool

HOUR = 60
"""In minutes."""
LONG, COARSE = 400, 10
"""Stories longer than this, in minutes, are evaluated at this interval only."""
GATEWAY = 'job="appliance-gateway",instance="g1:8080"'
WORKER = 'job="appliance-worker",instance="w1:8000"'
OTHER_RELEASE = 'namespace="b",job="other-gateway",instance="g9:8080"'
OURS, ANSWERED = "appliance_errors_total", "appliance_requests_total"


@dataclass(frozen=True, kw_only=True)
class Case:
    """Series and expectations of one alert; times are minutes from the start."""

    alert: str
    story: str
    series: dict[str, str]
    quiet: int
    """It is not firing yet, or never should."""
    fires: int | None = None
    resolved: int | None = None

    @property
    def name(self) -> str:
        return f"{self.alert}: {self.story}"

    @property
    def looks(self) -> dict[int, int]:
        """Number of firing alerts, at each evaluation."""
        seen = ((self.quiet, 0), (self.fires, 1), (self.resolved, 0))
        return {at: firing for at, firing in seen if at is not None}

    @property
    def is_long(self) -> bool:
        return max(self.looks) > LONG


def g(metric: str, **labels: str) -> str:
    """A series of the gateway."""
    return metric + "{" + ",".join([*(f'{name}="{value}"' for name, value in labels.items()), GATEWAY]) + "}"


def w(metric: str, **labels: str) -> str:
    """A series of a worker's own page."""
    return metric + "{" + ",".join([*(f'{name}="{value}"' for name, value in labels.items()), WORKER]) + "}"


def other(metric: str, **labels: str) -> str:
    """A series of a gateway of another release, which the same Prometheus reads."""
    named = [f'{name}="{value}"' for name, value in labels.items()]
    return metric + "{" + ",".join([*named, OTHER_RELEASE]) + "}"


def errors(bad: str, good: str, code: str = "worker_failed", of: Callable[..., str] = g) -> dict[str, str]:
    """Counters of requests that failed and that were answered."""
    labels = {"tenant": "acme", "model": "demo"}
    return {of(OURS, code=code): bad, of(ANSWERED, **labels, outcome="completed"): good}


W1 = {"worker": "w1"}
CASES: tuple[Case, ...] = (
    Case(
        alert="ApplianceAcceptanceCollapsed",
        story="a draft collapses and recovers",
        series={
            g("appliance_control_acting"): "1x30",
            g("appliance_speculation_collapsed", **W1): "0x4 1x10 0x10",
        },
        quiet=6, fires=9, resolved=17,
    ),
    Case(
        alert="ApplianceAcceptanceCollapsed",
        story="a collapse that is over at once does not page",
        series={
            g("appliance_control_acting"): "1x30",
            g("appliance_speculation_collapsed", **W1): "0x4 1 0x10",
        },
        quiet=8,
    ),
    Case(
        alert="ApplianceAcceptanceCollapsed",
        story="a gateway that no longer controls it does not report it",
        series={
            g("appliance_control_acting"): "0x30",
            g("appliance_speculation_collapsed", **W1): "1x30",
        },
        quiet=20,
    ),
    Case(
        alert="ApplianceSpeculationNotPaying",
        story="a gap in the series does not end it, drafting does",
        series={
            g("appliance_speculation_mode", **W1, mode="speculative"): "1x4 0x95 1x40",
            g("appliance_speculation_mode", **W1, mode="target_only"): "0x4 1x30 _ 1x63 0x40",
        },
        quiet=50, fires=80, resolved=110,
    ),
    Case(
        alert="ApplianceSpeculationNotPaying",
        story="an operator's decision is known",
        series={
            g("appliance_speculation_mode", **W1, mode="target_only"): "1x140",
            g("appliance_speculation_reason", **W1, reason="operator_override"): "1x140",
        },
        quiet=120,
    ),
    Case(
        alert="ApplianceSpeculationNotPaying",
        story="a collapse has its own alert",
        series={
            g("appliance_speculation_mode", **W1, mode="target_only"): "1x140",
            g("appliance_speculation_collapsed", **W1): "1x140",
        },
        quiet=120,
    ),
    Case(
        alert="ApplianceAcceptanceDecaying",
        story="it falls from 2.6 for nine hours, then the worker is recycled",
        series={g("appliance_acceptance_length", **W1): "2.6x300 2.6-0.0025x540 2.6x400"},
        quiet=5 * HOUR, fires=13 * HOUR, resolved=18 * HOUR,
    ),
    Case(
        alert="ApplianceAcceptanceDecaying",
        story="other traffic makes a step, and no slope",
        series={g("appliance_acceptance_length", **W1): "2.6x600 1.9x700"},
        quiet=10 * HOUR + 4 * HOUR + 30,
    ),
    Case(
        alert="ApplianceSpeculationNotControllable",
        story="a stock vLLM joins and is replaced",
        series={
            g("appliance_worker_capability", capability="control", **W1): "1x4 0x30 1x10",
            g("appliance_speculation_mode", **W1, mode="speculative"): "1x50",
            g("appliance_worker_up", **W1): "1x50",
        },
        quiet=15, fires=25, resolved=38,
    ),
    Case(
        alert="ApplianceSpeculationNotControllable",
        story="a worker without a draft has nothing to control",
        series={
            g("appliance_worker_capability", capability="control", **W1): "0x50",
            g("appliance_speculation_mode", **W1, mode="speculative"): "0x50",
            g("appliance_worker_up", **W1): "1x50",
        },
        quiet=40,
    ),
    Case(
        alert="ApplianceAnswersSuspect",
        story="two tenants get garbled answers",
        series={
            g("appliance_suspect_answers_total", **W1, model="demo", suspicion="low"): "0x30 1x2 2x60",
            g("appliance_suspect_answers_total", **W1, model="demo", suspicion="high"): "0x100",
        },
        quiet=30, fires=35, resolved=60,
    ),
    Case(
        alert="ApplianceGatewayDown",
        story="a gateway ends and comes back",
        series={w("up"): "1x30", g("up"): "1x4 0x10 1x10", g("appliance_build_info"): "1x4 _x10 1x10"},
        quiet=5, fires=10, resolved=17,
    ),
    Case(
        alert="ApplianceGatewayDown",
        story="a worker's page is not a gateway",
        series={w("up"): "0x30", g("up"): "1x30", g("appliance_build_info"): "1x30"},
        quiet=20,
    ),
    Case(
        alert="ApplianceMetricsMissing",
        story="nothing is read for a while",
        series={g("appliance_build_info"): "1x4 _x20 1x10"},
        quiet=10, fires=19, resolved=27,
    ),
    Case(
        alert="ApplianceNoWorker",
        story="all workers go, one comes back",
        series={
            g("appliance_worker_up", worker="w1"): "1x4 0x20",
            g("appliance_worker_up", worker="w2"): "1x8 0x6 1x10",
        },
        quiet=8, fires=12, resolved=17,
    ),
    Case(
        alert="ApplianceNoWorker",
        story="a gateway starts and finds none for a while",
        series={
            g("appliance_build_info"): "_x4 1x30",
            g("appliance_worker_up", worker="w1"): "_x14 1x20",
        },
        quiet=4, fires=10, resolved=17,
    ),
    Case(
        alert="ApplianceMetricsMissing",
        story="another release is read all the time",
        series={
            g("appliance_build_info"): "1x4 _x20 1x10",
            other("appliance_build_info"): "1x40",
        },
        quiet=10, fires=19, resolved=27,
    ),
    Case(
        alert="ApplianceMetricsMissing",
        story="one of two gateways is enough",
        series={
            g("appliance_build_info"): "1x4 _x30",
            'appliance_build_info{job="appliance-gateway",instance="g2:8080"}': "1x40",
        },
        quiet=25,
    ),
    Case(
        alert="ApplianceNoWorker",
        story="another release has workers",
        series={
            g("appliance_build_info"): "1x30",
            g("appliance_worker_up", worker="w1"): "1x4 0x10 1x10",
            other("appliance_build_info"): "1x30",
            other("appliance_worker_up", worker="w1"): "1x30",
        },
        quiet=4, fires=8, resolved=17,
    ),
    Case(
        alert="ApplianceNoWorker",
        story="a release without any next to one that has them",
        series={
            g("appliance_build_info"): "1x9 stale",
            other("appliance_build_info"): "1x30",
            other("appliance_worker_up", worker="w1"): "1x30",
        },
        quiet=0, fires=5, resolved=12,
    ),
    Case(
        alert="ApplianceWorkerDown",
        story="one of two goes and comes back",
        series={
            g("appliance_worker_up", worker="w1"): "1x4 0x10 1x10",
            g("appliance_worker_up", worker="w2"): "1x30",
        },
        quiet=6, fires=10, resolved=17,
    ),
    Case(
        alert="ApplianceWorkerDown",
        story="one gateway cannot reach it, another can",
        series={
            'appliance_worker_up{worker="w1",instance="g1"}': "0x30",
            'appliance_worker_up{worker="w1",instance="g2"}': "1x30",
        },
        quiet=20,
    ),
    Case(
        alert="ApplianceWorkerDown",
        story="a pod crashes and its address leaves the name, until it is ready again",
        series={
            g("appliance_worker_up", worker="w1"): "1x120",
            g("appliance_worker_up", worker="w2"): "1x20 stale _x38 1x60",
            g("appliance_workers_left_total", health="up"): "0x120",
            g("appliance_workers_left_total", health="down"): "0x20 1x100",
        },
        quiet=30, fires=40, resolved=66,
    ),
    Case(
        alert="ApplianceWorkerDown",
        story="a gateway of an earlier version does not say how workers left",
        series={
            g("appliance_worker_up", worker="w1"): "1x120",
            g("appliance_worker_up", worker="w2"): "1x20 stale",
        },
        quiet=30, fires=40, resolved=100,
    ),
    Case(
        alert="ApplianceWorkerDown",
        story="one that is taken away is not missed",
        series={
            g("appliance_worker_up", worker="w1"): "1x120",
            g("appliance_worker_up", worker="w2"): "1x20 stale",
            g("appliance_workers_left_total", health="up"): "0x20 1x100",
            g("appliance_workers_left_total", health="down"): "0x120",
        },
        quiet=45,
    ),
    Case(
        alert="ApplianceWorkerDown",
        story="one is taken away, and then another fails",
        series={
            g("appliance_worker_up", worker="w1"): "1x120",
            g("appliance_worker_up", worker="w2"): "1x20 stale",
            g("appliance_worker_up", worker="w3"): "1x40 stale",
            g("appliance_workers_left_total", health="up"): "0x20 1x100",
            g("appliance_workers_left_total", health="down"): "0x40 1x80",
        },
        quiet=39, fires=60, resolved=115,
    ),
    Case(
        alert="ApplianceWorkerDown",
        story="a rollout restarts every worker, one after the other",
        series={
            g("appliance_worker_up", worker="w1"): "1x20 stale",
            g("appliance_worker_up", worker="w2"): "1x26 stale",
            g("appliance_worker_up", worker="w3"): "_x24 1x100",
            g("appliance_worker_up", worker="w4"): "_x30 1x100",
            g("appliance_workers_left_total", health="up"): "0x20 1x5 2x100",
            g("appliance_workers_left_total", health="down"): "0x120",
        },
        quiet=60,
    ),
    Case(
        alert="ApplianceWorkerDown",
        story="workers of another release do not count, with any name",
        series={
            g("appliance_worker_up", worker="w1"): "1x4 0x10 1x10",
            other("appliance_worker_up", worker="w1"): "1x30",
            other("appliance_worker_up", worker="w2"): "_x4 1x30",
        },
        quiet=6, fires=10, resolved=17,
    ),
    Case(
        alert="ApplianceWorkerRestarting",
        story="the supervisor starts it three times",
        series={g("appliance_worker_restarts_total", **W1): "0x10 1x4 2x4 3x60"},
        quiet=12, fires=24, resolved=60,
    ),
    Case(
        alert="ApplianceWorkerRestarting",
        story="a worker elsewhere says when it began",
        series={
            w("process_start_time_seconds"): "100x10 700x8 1300x80",
            w("vllm:num_requests_running", engine="0", model_name="demo"): "1x100",
        },
        quiet=15, fires=25, resolved=60,
    ),
    Case(
        alert="ApplianceWorkerRestarting",
        story="one restart is no habit, and a gateway is no worker",
        series={
            g("appliance_worker_restarts_total", **W1): "0x10 1x60",
            g("process_start_time_seconds"): "100x10 700x8 1300x80",
        },
        quiet=30,
    ),
    Case(
        alert="ApplianceWorkerLeftOut",
        story="a recycled worker answers wrongly, and is put right",
        series={g("appliance_worker_left_out", **W1): "0x4 1x15 0x10"},
        quiet=8, fires=14, resolved=22,
    ),
    Case(
        alert="ApplianceKvCacheFull",
        story="long contexts fill it for a while",
        series={g("appliance_worker_kv_cache_usage_ratio", **W1): "0.6x4 0.99x20 0.6x10"},
        quiet=10, fires=20, resolved=28,
    ),
    Case(
        alert="ApplianceQueueGrowing",
        story="it grows for half an hour, then empties",
        series={g("appliance_queue_requests", priority="interactive"): "0x10 2+2x30 0x20"},
        quiet=12, fires=38, resolved=50,
    ),
    Case(
        alert="ApplianceQueueGrowing",
        story="it is long but shrinks, and batches may wait",
        series={
            g("appliance_queue_requests", priority="interactive"): "200-2x60",
            g("appliance_queue_requests", priority="batch"): "0+10x60",
        },
        quiet=45,
    ),
    Case(
        alert="ApplianceQueueGrowing",
        story="another release's queue shrinks by as much",
        series={
            g("appliance_queue_requests", priority="interactive"): "0x10 2+2x30 0x20",
            other("appliance_queue_requests", priority="interactive"): "80x10 78-2x30 0x20",
        },
        quiet=12, fires=38, resolved=50,
    ),
    Case(
        alert="ApplianceStreamsStall",
        story="one gap in twenty is long for a while",
        series={
            g("appliance_inter_token_seconds_count", model="demo"): "0+100x120",
            g("appliance_inter_token_seconds_bucket", model="demo", le="2.5"):
                "0+100x20 2095+95x39 5900+100x60",
        },
        quiet=22, fires=45, resolved=85,
    ),
    Case(
        alert="ApplianceStreamsStall",
        story="a few streams at night say little",
        series={
            g("appliance_inter_token_seconds_count", model="demo"): "0+10x120",
            g("appliance_inter_token_seconds_bucket", model="demo", le="2.5"): "0+5x120",
        },
        quiet=60,
    ),
    Case(
        alert="ApplianceLimitSaturated",
        story="a tenant asks for more than it has, and stops",
        series={
            g("appliance_limit_used_ratio", tenant="acme", limit="tokens_per_minute"): "0.5x10 1x40 0.2x30",
            g("appliance_limit_refusals_total", tenant="acme", limit="tokens_per_minute"):
                "0x10 0+5x40 200x30",
        },
        quiet=20, fires=40, resolved=60,
    ),
    Case(
        alert="ApplianceLimitSaturated",
        story="a month's budget that is used up and left alone",
        series={
            g("appliance_limit_used_ratio", tenant="acme", limit="tokens_per_month"): "1x80",
            g("appliance_limit_refusals_total", tenant="acme", limit="tokens_per_month"): "7x80",
        },
        quiet=60,
    ),
    Case(
        alert="ApplianceLimitsFailing",
        story="the database goes and comes back",
        series={g("appliance_limits_failing"): "0x4 1x10 0x10"},
        quiet=5, fires=9, resolved=17,
    ),
    Case(
        alert="ApplianceTenantsUnconfirmed",
        story="rows that no gateway wrote are refused until somebody seals them",
        series={g("appliance_tenants_age_seconds"): "0x4 60+60x10 0x10"},
        quiet=5, fires=9, resolved=18,
    ),
    Case(
        alert="ApplianceErrorBudgetBurnsFast",
        story="a third of the requests fail for an hour",
        series=errors("0x60 0+3x60 180x200", "0+6x330"),
        quiet=60, fires=80, resolved=170,
    ),
    Case(
        alert="ApplianceErrorBudgetBurnsFast",
        story="a busy release that is well does not hide one that fails",
        series={
            **errors("0x60 0+3x60 180x200", "0+6x330"),
            **errors("0x330", "0+6000x330", of=other),
        },
        quiet=60, fires=80, resolved=170,
    ),
    Case(
        alert="ApplianceErrorBudgetBurnsFast",
        story="mistakes of clients are theirs",
        series=errors("0+10x120", "0+6x120", code="invalid_request"),
        quiet=100,
    ),
    Case(
        alert="ApplianceErrorBudgetBurnsFast",
        story="nothing at all is answered from the start",
        series={g(OURS, code="no_worker_available"): "0+3x240"},
        quiet=2, fires=60,
    ),
    Case(
        alert="ApplianceErrorBudgetBurnsFast",
        story="one of three requests of a night fails",
        series=errors("0x60 1x120", "0x30 1x30 2x120"),
        quiet=70,
    ),
    Case(
        alert="ApplianceErrorBudgetBurnsSlowly",
        story="two in a hundred fail all day",
        series=errors("0x300 0+2x1500 3000x3000", "0+100x4800"),
        quiet=300, fires=1500, resolved=4790,
    ),
    Case(
        alert="ApplianceErrorBudgetBurnsSlowly",
        story="two in a hundred fail at one of two releases",
        series={
            **errors("0x300 0+2x1500 3000x3000", "0+100x4800"),
            **errors("0x4800", "0+10000x4800", of=other),
        },
        quiet=300, fires=1500, resolved=4790,
    ),
    Case(
        alert="ApplianceErrorBudgetBurnsSlowly",
        story="one in a thousand is within the budget",
        series=errors("0+1x4400", "0+1000x4400"),
        quiet=4300,
    ),
    Case(
        alert="ApplianceAuditFailing",
        story="the database goes and comes back",
        series={g("appliance_audit_failing"): "0x4 1x10 0x10"},
        quiet=4, fires=8, resolved=17,
    ),
    Case(
        alert="ApplianceAuditLagging",
        story="entries queue up and are written",
        series={g("appliance_audit_queue_entries"): "0x4 2000x15 0x10"},
        quiet=8, fires=14, resolved=22,
    ),
    Case(
        alert="ApplianceAuditLagging",
        story="signing fails for twenty minutes",
        series={
            g("appliance_audit_checkpoint_lag_entries"): "0x9 5x19 0x10",
            g("appliance_audit_checkpoint_timestamp_seconds"): "0+60x9 540x19 1740+60x10",
        },
        quiet=18, fires=27, resolved=34,
    ),
    Case(
        alert="ApplianceAuditEntriesDropped",
        story="the log has a gap, and admits it",
        series={
            g("appliance_audit_dropped_entries_total"): "0x4 3x100",
            g("appliance_audit_gap_entries"): "0x4 3x10 0x90",
        },
        quiet=4, fires=8, resolved=80,
    ),
    Case(
        alert="ApplianceAuditSpoolNotDraining",
        story="the spool stays full under a working database, then empties",
        series={
            g("appliance_audit_spool_entries"): "0x4 50x40 0x10",
            g("appliance_audit_failing"): "0x60",
        },
        quiet=15, fires=40, resolved=50,
    ),
    Case(
        alert="ApplianceAuditSpoolNotDraining",
        story="a spool that empties is at work",
        series={
            g("appliance_audit_spool_entries"): "500-5x90",
            g("appliance_audit_failing"): "0x90",
        },
        quiet=60,
    ),
    Case(
        alert="ApplianceAuditUnverified",
        story="no pass ends for two days, with a restart; then one does",
        series={
            g("appliance_audit_last_verification_timestamp_seconds"): "0x59 3600x2960 180000x60",
            g("process_start_time_seconds"): "0x1000 60000x2080",
        },
        quiet=2900, fires=2960, resolved=3070,
    ),
    Case(
        alert="ApplianceAuditUnverified",
        story="a new gateway has two days for its first pass",
        series={
            g("appliance_audit_last_verification_timestamp_seconds"): "0x3100",
            g("process_start_time_seconds"): "9000x3100",
        },
        quiet=3000, fires=3060,
    ),
    Case(
        alert="ApplianceAuditDamaged",
        story="the check finds damage; a restored database ends it",
        series={g("appliance_audit_damaged"): "0x4 1x10 0x10"},
        quiet=4, fires=6, resolved=16,
    ),
    Case(
        alert="ApplianceAuditUnwitnessed",
        story="the witness is away for more than a day",
        series={
            g("appliance_audit_witnesses", state="known"): "1x1700",
            g("appliance_audit_last_witness_timestamp_seconds"): "0+60x59 3540x1500 93600x139",
            g("process_start_time_seconds"): "0x1700",
        },
        quiet=1400, fires=1540, resolved=1570,
    ),
    Case(
        alert="ApplianceAuditUnwitnessed",
        story="a site without witnesses has decided so",
        series={
            g("appliance_audit_witnesses", state="known"): "0x1700",
            g("appliance_audit_last_witness_timestamp_seconds"): "0x1700",
            g("process_start_time_seconds"): "0x1700",
        },
        quiet=1600,
    ),
    Case(
        alert="ApplianceAuditUntimed",
        story="the time-stamp authority is away for hours while the log grows",
        series={
            g("appliance_audit_timestamp_interval_seconds"): "3600x400",
            g("appliance_audit_last_timestamp_seconds"): "0x299 18000x100",
            g("appliance_audit_timestamped_size"): "5x299 900x100",
            g("appliance_audit_checkpoint_size"): "10+1x400",
            g("process_start_time_seconds"): "0x400",
        },
        quiet=170, fires=210, resolved=301,
    ),
    Case(
        alert="ApplianceAuditUntimed",
        story="a log without new entries needs no new time stamp",
        series={
            g("appliance_audit_timestamp_interval_seconds"): "3600x400",
            g("appliance_audit_last_timestamp_seconds"): "0x400",
            g("appliance_audit_timestamped_size"): "5x400",
            g("appliance_audit_checkpoint_size"): "5x400",
            g("process_start_time_seconds"): "0x400",
        },
        quiet=390,
    ),
    Case(
        alert="ApplianceAuditUntimed",
        story="a site without a time-stamp authority has decided so",
        series={
            g("appliance_audit_timestamp_interval_seconds"): "0x400",
            g("appliance_audit_last_timestamp_seconds"): "0x400",
            g("appliance_audit_timestamped_size"): "0x400",
            g("appliance_audit_checkpoint_size"): "5x400",
            g("process_start_time_seconds"): "0x400",
        },
        quiet=390,
    ),
    Case(
        alert="ApplianceClockDiffers",
        story="a gateway's clock is two minutes ahead until it is set",
        series={g("appliance_audit_timestamp_clock_difference_seconds"): "0x10 -120x20 1x20"},
        quiet=12, fires=18, resolved=32,
    ),
    Case(
        alert="ApplianceAuditForwardLagging",
        story="the collector is away for twenty minutes, and takes everything afterwards",
        series={g("appliance_audit_forward_lag_seconds"): "1x10 60+60x20 0x20"},
        quiet=14, fires=28, resolved=36,
    ),
    Case(
        alert="ApplianceAuditForwardLagging",
        story="a site without a SIEM, and one that is a minute behind",
        series={
            g("appliance_audit_forward_lag_seconds"): "0x40",
            other("appliance_audit_forward_lag_seconds"): "60x40",
        },
        quiet=30,
    ),
    Case(
        alert="ApplianceCostNotWritten",
        story="the database takes nothing for forty minutes",
        series={g("appliance_cost_written_timestamp_seconds"): "0+60x30 1800x40 4260+60x30"},
        quiet=48, fires=55, resolved=76,
    ),
    Case(
        alert="ApplianceDiskLow",
        story="a disk runs low and is made larger",
        series={g("appliance_audit_disk_low", disk="database"): "0x4 1x15 0x10"},
        quiet=8, fires=14, resolved=22,
    ),
    Case(
        alert="ApplianceDiskFillsUp",
        story="a gigabyte in six hours, until an operator makes room",
        series={
            g("appliance_audit_disk_free_bytes", disk="database"):
                "10000000000x400 10000000000-3000000x700 50000000000x500"
        },
        quiet=400, fires=1000, resolved=1500,
    ),
    Case(
        alert="ApplianceDiskFillsUp",
        story="a disk without use",
        series={g("appliance_audit_disk_free_bytes", disk="database"): "10000000000x800"},
        quiet=700,
    ),
    Case(
        alert="ApplianceEgressReachable",
        story="a firewall is opened and closed",
        series={g("appliance_egress_verdict", verdict="open"): "0x4 1x10 0x10"},
        quiet=4, fires=6, resolved=16,
    ),
    Case(
        alert="ApplianceEgressUnproven",
        story="the enclave's own listener cannot be reached for a while",
        series={
            g("appliance_egress_verdict", verdict="inconclusive"): "0x4 1x30 0x10",
            g("appliance_egress_last_check_timestamp_seconds"): "0+60x60",
        },
        quiet=10, fires=20, resolved=38,
    ),
    Case(
        alert="ApplianceEgressUnproven",
        story="checks stop for a few hours",
        series={
            g("appliance_egress_verdict", verdict="inconclusive"): "0x300",
            g("appliance_egress_last_check_timestamp_seconds"): "600x240 14400x60",
        },
        quiet=150, fires=220, resolved=250,
    ),
    Case(
        alert="ApplianceEgressUnproven",
        story="a site without checks has decided so",
        series={
            g("appliance_egress_verdict", verdict="inconclusive"): "0x300",
            g("appliance_egress_last_check_timestamp_seconds"): "0x300",
        },
        quiet=250,
    ),
    Case(
        alert="ApplianceCertificateExpires",
        story="it is renewed two weeks before its end",
        series={
            g("appliance_tls_certificate_not_after_timestamp_seconds"): f"{22 * 86400}x10000 {90 * 86400}x100"
        },
        quiet=1200, fires=9000, resolved=10050,
    ),
    Case(
        alert="ApplianceCertificateExpires",
        story="without TLS there is none",
        series={g("appliance_tls_certificate_not_after_timestamp_seconds"): "0x100"},
        quiet=60,
    ),
    Case(
        alert="ApplianceCertificateExpired",
        story="it is renewed on the last day",
        series={
            g("appliance_tls_certificate_not_after_timestamp_seconds"): f"{2 * 86400}x2000 {90 * 86400}x100"
        },
        quiet=1200, fires=1900, resolved=2050,
    ),
    Case(
        alert="ApplianceApiKeyExpires",
        story="it is rotated five days before its end",
        series={g("appliance_keys_next_end_timestamp_seconds"): f"{8 * 86400}x4000 0x100"},
        quiet=1200, fires=3000, resolved=4050,
    ),
    Case(
        alert="ApplianceApiKeyExpires",
        story="keys of another release end later",
        series={
            g("appliance_keys_next_end_timestamp_seconds"): f"{8 * 86400}x4000 0x100",
            other("appliance_keys_next_end_timestamp_seconds"): f"{90 * 86400}x4100",
        },
        quiet=1200, fires=3000, resolved=4050,
    ),
    Case(
        alert="ApplianceSpeculationNotControllable",
        story="a worker of another release has the same name",
        series={
            g("appliance_worker_capability", capability="control", **W1): "1x4 0x30 1x10",
            g("appliance_speculation_mode", **W1, mode="speculative"): "1x50",
            g("appliance_worker_up", **W1): "1x50",
            other("appliance_worker_capability", capability="control", **W1): "1x50",
            other("appliance_speculation_mode", **W1, mode="speculative"): "1x50",
            other("appliance_worker_up", **W1): "1x50",
        },
        quiet=15, fires=25, resolved=38,
    ),
    Case(
        alert="ApplianceSigningKeyOld",
        story="it is rotated after a year and a day",
        series={
            g("appliance_audit_signing_key_file_timestamp_seconds"): f"-{365 * 86400 - 3600}x300 7200x100"
        },
        quiet=55, fires=200, resolved=320,
    ),
)  # fmt: skip
ONE = next(case for case in CASES if case.fires is not None and not case.is_long)
RECORDED = {rule["record"] for each in groups(RECORDING).values() for rule in each}


def judged(cases: Iterable[Case], directory: Path) -> tuple[int, str]:
    """Exit code and output of promtool for some cases; each is one of its tests."""
    files = []
    for rules in RULES:
        alerts_of_file = {rule.get("alert") for each in groups(rules).values() for rule in each}
        told = [case for case in cases if case.alert in alerts_of_file]
        for minutes, chosen in (
            (1, [case for case in told if not case.is_long]),
            (COARSE, [case for case in told if case.is_long]),
        ):
            if chosen:
                files.append(directory / f"{rules.stem}-every-{minutes}-minutes.yaml")
                files[-1].write_text(json.dumps(stories(chosen, minutes, rules)), encoding="utf-8")
    command = [tool("promtool"), "test", "rules", *map(str, files)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    return ended.returncode, ended.stdout + ended.stderr


def stories(cases: list[Case], minutes: int, rules: Path) -> dict[str, Any]:
    """The cases as promtool's test file, evaluated at a fixed interval."""
    assert not [case.name for case in cases for at in case.looks if at % minutes], "nothing is seen then"
    text = rules.read_text(encoding="utf-8")
    recorded = [RECORDING] if any(name in text for name in RECORDED) else []
    return {
        "rule_files": [str(file) for file in (*recorded, rules)],
        "evaluation_interval": f"{minutes}m",
        # What is recorded first: between two rounds more time passes here than a value is believed for.
        "group_eval_order": [name for file in (*recorded, rules) for name in groups(file)],
        "tests": [
            {
                "name": case.name,
                "interval": "1m",
                "input_series": [{"series": name, "values": values} for name, values in case.series.items()],
                "promql_expr_test": [_firing(case, *look) for look in case.looks.items()],
            }
            for case in cases
        ],
    }


def _firing(case: Case, at: int, expected: int) -> dict[str, Any]:
    firing = f'count(ALERTS{{alertname="{case.alert}",alertstate="firing"}}) or vector(0)'
    return {"expr": firing, "eval_time": f"{at}m", "exp_samples": [{"labels": "{}", "value": expected}]}


def test_alert_fires_and_resolves_as_its_cases_say(tmp_path: Path):
    """Quiet before, firing during, resolved after; quiet throughout for unrelated series."""
    code, told = judged(CASES, tmp_path)
    assert code == 0, told
    assert "FAILED" not in told, told


def test_alert_case_with_a_wrong_expectation_fails(tmp_path: Path):
    """And the output names its alert."""
    code, told = judged([replace(ONE, quiet=ONE.fires, fires=None, resolved=None)], tmp_path)
    assert code != 0
    assert f'alertname=\\"{ONE.alert}\\"' in told, told


def test_alert_case_that_promtool_cannot_parse_fails(tmp_path: Path):
    """A series that does not parse; the output names no alert then."""
    code, told = judged([ONE, replace(ONE, series={"appliance_control_acting": "1 to 30"})], tmp_path)
    assert code != 0, told


def test_every_alert_has_cases_firing_quiet_and_resolved():
    """A new alert needs its cases."""
    whole = {case.alert for case in CASES if case.fires is not None and case.resolved is not None}
    assert whole == set(alerts()) == {case.alert for case in CASES}


def test_promtool_accepts_the_rules():
    """The rules as files: syntax, templates, names given twice."""
    command = [tool("promtool"), "check", "rules", "--lint=all", "--lint-fatal", *map(str, RULES)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr


@pytest.mark.parametrize("name", sorted(alerts()))
def test_alert_has_severity_summary_description_and_links(name: str):
    """Severity, one line, an explanation, the page that helps, and the dashboard that shows it."""
    rule = alerts()[name]
    notes = rule["annotations"]
    assert rule["labels"]["severity"] in {"critical", "warning", "info"}
    assert notes["summary"].endswith(".")
    assert len(notes["description"]) > len("It is broken.")
    assert notes["runbook_url"] == f"{{{{ $externalLabels.appliance_docs }}}}/runbooks/alerts/{name}.html"
    label, uid = notes["dashboard_url"].split("/d/")
    assert label == "{{ $externalLabels.appliance_grafana }}"
    assert uid in {file.stem for file in DASHBOARDS}

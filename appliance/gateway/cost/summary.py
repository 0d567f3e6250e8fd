"""Makes a report from rows and prices.  Pure."""

from collections import defaultdict
from collections.abc import Iterable
from datetime import UTC, date, datetime, timedelta, tzinfo
from zoneinfo import ZoneInfo

from appliance.gateway.cost.prices import Money, Prices, capital_per_hour, per_million, prices_of
from appliance.gateway.cost.report import (
    Cost,
    CostLine,
    CostReport,
    Day,
    Missing,
    Rest,
    Saving,
    WorkerLine,
    find_gaps,
)
from appliance.gateway.cost.rows import (
    SLOT_SECONDS,
    Recorded,
    TenantUsage,
    WorkerKey,
    WorkerTime,
    begin_of,
    day_of,
)
from appliance.infra.settings import CostSettings

MICRO, MILLI = 1e6, 1e3
Times = dict[WorkerKey, WorkerTime]


def make_report(
    recorded: Recorded, *, first: date, end: date, settings: CostSettings, zone: ZoneInfo, now: float
) -> CostReport:
    """The report of the days from `first` to before `end`; `now` is Unix time."""
    times = _times(recorded)
    observed = sum(time.observed_us for time in times.values()) / MICRO
    prices = prices_of(settings, hours=_elapsed(times) / 3600, worker_hours=observed / 3600)
    lines = _lines(recorded, times, prices)
    workers = _workers(recorded, times, prices)
    idle = _rest(
        sum(_idle_us(time) for time in times.values()),
        sum(time.millijoules - time.busy_millijoules for time in times.values()),
        prices,
    )
    given_us = sum(share.engine_us for _start, _key, share in recorded.shares)
    given_mj = sum(share.millijoules for _start, _key, share in recorded.shares)
    unattributed = _rest(
        sum(time.busy_us for time in times.values()) - given_us,
        sum(time.busy_millijoules for time in times.values()) - given_mj,
        prices,
    )
    begin_at, end_at = begin_of(first, zone), begin_of(end, zone)
    gaps = find_gaps(recorded.periods, begin_at, end_at, int(now))
    return CostReport(
        begin=_moment(begin_at, zone),
        end=_moment(end_at, zone),
        time_zone=zone.key,
        currency=settings.currency,
        made_at=_moment(int(now), zone),
        observed_seconds=observed,
        busy_seconds=sum(time.busy_us for time in times.values()) / MICRO,
        lines=lines,
        idle=idle,
        unattributed=unattributed,
        total=_total(lines, idle, unattributed),
        saving=_all_savings([worker.saving for worker in workers]),
        workers=workers,
        days=_days(recorded, times, first, min(end, day_of(int(now), zone) + timedelta(days=1)), zone),
        missing=tuple(
            Missing(
                begin=_moment(gap.begin, UTC), end=_moment(gap.end, UTC), kind=gap.kind, gateway=gap.gateway
            )
            for gap in gaps
        ),
        prices={
            "capital_per_worker_hour": prices.capital_per_hour,
            "people_per_worker_hour": prices.people_per_hour,
            "power_per_kwh": prices.per_kwh,
            "pue": prices.pue,
        },
        notes=_notes(settings, times, unattributed),
    )


def _times(recorded: Recorded) -> Times:
    """
    Each worker's time in each slot, counted from one gateway at a time.

    Several gateways poll the same worker.  The one that observed most of the slot counts, and from the others
    only time outside its period.  Savings are recorded only by the controlling gateway, and added.
    """
    periods = {period.start: period for period in recorded.periods}
    seen: dict[WorkerKey, list[tuple[str, WorkerTime]]] = defaultdict(list)
    for start, key, time in recorded.workers:
        seen[key].append((start, time))
    times = {}
    for key, rows in seen.items():
        chosen, every = WorkerTime(), WorkerTime()
        covered: list[tuple[str, int, int]] = []
        for start, time in sorted(rows, key=lambda row: -row[1].observed_us):
            period = periods.get(start)
            begin = max(period.began_at, key.slot) if period else key.slot
            end = min(period.until, key.slot + SLOT_SECONDS) if period else key.slot + SLOT_SECONDS
            gateway = period.gateway if period else start
            others = [(first, last) for other, first, last in covered if other != gateway]
            chosen.add(time.part(_uncovered(begin, end, others)))
            covered.append((gateway, begin, end))
            every.add(time)
        chosen.draft_us, chosen.draft_tokens = every.draft_us, every.draft_tokens
        chosen.target_only_us = every.target_only_us
        chosen.target_only_low_us = every.target_only_low_us
        chosen.target_only_high_us = every.target_only_high_us
        times[key] = chosen
    return times


def _uncovered(begin: int, end: int, covered: Iterable[tuple[int, int]]) -> float:
    """The fraction of a period outside all others, 0..1; for an instant 0 or 1."""
    left, at = 0, begin
    for other_begin, other_end in sorted(covered):
        left += max(0, min(other_begin, end) - at)
        at = max(at, other_end)
    left += max(0, end - at)
    if end <= begin:
        return 0.0 if any(first <= begin <= last for first, last in covered) else 1.0
    return left / (end - begin)


def _elapsed(times: Times) -> float:
    by_slot: dict[int, int] = defaultdict(int)
    for key, time in times.items():
        by_slot[key.slot] = max(by_slot[key.slot], time.observed_us)
    return sum(by_slot.values()) / MICRO


def _idle_us(time: WorkerTime) -> int:
    """A step that began in the previous slot may make busy time exceed observed time."""
    return max(0, time.observed_us - time.busy_us)


def _rest(microseconds: int, millijoules: int, prices: Prices) -> Rest:
    seconds, joules = microseconds / MICRO, millijoules / MILLI
    return Rest(seconds=seconds, joules=joules, cost=Cost.of(prices.cost(seconds=seconds, joules=joules)))


def _lines(recorded: Recorded, times: Times, prices: Prices) -> tuple[CostLine, ...]:
    shares: dict[tuple[str, str], TenantUsage] = defaultdict(TenantUsage)
    gpu_seconds: dict[tuple[str, str], float] = defaultdict(float)
    for _start, key, share in recorded.shares:
        who = (key.tenant, key.model)
        shares[who].add(share)
        time = times.get(WorkerKey(key.slot, key.worker))
        if time is not None and time.busy_us:
            gpu_seconds[who] += share.engine_us * time.gpu_us / time.busy_us / MICRO
    lines = []
    for (tenant, model), share in shares.items():
        seconds, joules = share.engine_us / MICRO, share.millijoules / MILLI
        money = prices.cost(seconds=seconds, joules=joules)
        lines.append(
            CostLine(
                tenant=tenant,
                model=model,
                requests=share.requests,
                prompt_tokens=share.prompt_tokens,
                delivered_tokens=share.delivered_tokens,
                draft_tokens=share.draft_tokens,
                accepted_tokens=share.accepted_tokens,
                wasted_tokens=max(0, share.draft_tokens - share.accepted_tokens),
                engine_seconds=seconds,
                gpu_seconds=gpu_seconds[tenant, model],
                joules=joules,
                cost=Cost.of(money),
                cost_per_million=per_million(money.total, share.delivered_tokens),
            )
        )
    return tuple(sorted(lines, key=lambda line: (-line.engine_seconds, line.tenant, line.model)))


def _total(lines: tuple[CostLine, ...], idle: Rest, unattributed: Rest) -> CostLine:
    money = Money()
    for cost in (*(line.cost for line in lines), idle.cost, unattributed.cost):
        money += Money(capital=cost.capital, people=cost.people, energy=cost.energy)
    delivered = sum(line.delivered_tokens for line in lines)
    return CostLine(
        tenant="",
        model="",
        requests=sum(line.requests for line in lines),
        prompt_tokens=sum(line.prompt_tokens for line in lines),
        delivered_tokens=delivered,
        draft_tokens=sum(line.draft_tokens for line in lines),
        accepted_tokens=sum(line.accepted_tokens for line in lines),
        wasted_tokens=sum(line.wasted_tokens for line in lines),
        engine_seconds=sum(line.engine_seconds for line in lines) + unattributed.seconds + idle.seconds,
        gpu_seconds=sum(line.gpu_seconds for line in lines),
        joules=sum(line.joules for line in lines) + unattributed.joules + idle.joules,
        cost=Cost.of(money),
        cost_per_million=per_million(money.total, delivered),
    )


def _workers(recorded: Recorded, times: Times, prices: Prices) -> tuple[WorkerLine, ...]:
    workers: dict[str, WorkerTime] = defaultdict(WorkerTime)
    idle_us: dict[str, int] = defaultdict(int)
    for key, time in times.items():
        workers[key.worker].add(time)
        idle_us[key.worker] += _idle_us(time)
    given: dict[str, int] = defaultdict(int)
    for _start, share_key, share in recorded.shares:
        given[share_key.worker] += share.engine_us
    return tuple(
        WorkerLine(
            worker=worker,
            observed_seconds=time.observed_us / MICRO,
            busy_seconds=time.busy_us / MICRO,
            estimated_seconds=time.estimated_us / MICRO,
            attributed_seconds=given[worker] / MICRO,
            unattributed_seconds=(time.busy_us - given[worker]) / MICRO,
            joules=time.millijoules / MILLI,
            metered_seconds=time.metered_us / MICRO,
            unknown_power_seconds=time.unknown_power_us / MICRO,
            cost=Cost.of(
                prices.cost(seconds=(time.busy_us + idle_us[worker]) / MICRO, joules=time.millijoules / MILLI)
            ),
            saving=_saving(time, prices),
        )
        for worker, time in sorted(workers.items())
    )


def _saving(time: WorkerTime, prices: Prices) -> Saving:
    spent = time.draft_us / MICRO
    watts = time.busy_millijoules / MILLI / (time.busy_us / MICRO) if time.busy_us else 0.0

    def seconds(target_only_us: int) -> float:
        return target_only_us / MICRO - spent

    def tokens(target_only_us: int) -> float:
        # In draft_us without drafts, the engine would have given draft_us / target_only_us of the tokens.
        return time.draft_tokens * (1 - time.draft_us / target_only_us) if target_only_us else 0.0

    def money(target_only_us: int) -> float:
        saved = seconds(target_only_us)
        return prices.cost(seconds=saved, joules=saved * watts).total

    mean, low, high = time.target_only_us, time.target_only_low_us, time.target_only_high_us
    return Saving(
        compared_seconds=spent,
        compared_tokens=time.draft_tokens,
        seconds=seconds(mean),
        seconds_low=seconds(low),
        seconds_high=seconds(high),
        tokens=tokens(mean),
        tokens_low=tokens(low),
        tokens_high=tokens(high),
        money=money(mean),
        money_low=money(low),
        money_high=money(high),
    )


def _all_savings(savings: list[Saving]) -> Saving:
    names = list(Saving.model_fields)
    return Saving(**{name: sum(getattr(saving, name) for saving in savings) for name in names})


def _days(recorded: Recorded, times: Times, first: date, end: date, zone: ZoneInfo) -> tuple[Day, ...]:
    busy: dict[date, int] = defaultdict(int)
    idle: dict[date, int] = defaultdict(int)
    delivered: dict[date, int] = defaultdict(int)
    for key, time in times.items():
        day = day_of(key.slot, zone)
        busy[day] += time.busy_us
        idle[day] += _idle_us(time)
    for _start, share_key, share in recorded.shares:
        delivered[day_of(share_key.slot, zone)] += share.delivered_tokens
    return tuple(
        Day(
            day=day,
            busy_seconds=busy[day] / MICRO,
            idle_seconds=idle[day] / MICRO,
            delivered_tokens=delivered[day],
        )
        for day in (first + timedelta(days=number) for number in range((end - first).days))
    )


def _notes(settings: CostSettings, times: Times, unattributed: Rest) -> tuple[str, ...]:
    notes = []
    unpriced = [
        name
        for name, price in (
            ("capital (cost.worker_price or cost.worker_price_per_hour)", capital_per_hour(settings)),
            ("people (cost.people_per_month)", settings.people_per_month),
            ("power (cost.power_price_per_kwh)", settings.power_price_per_kwh),
        )
        if price is None
    ]
    if unpriced:
        notes.append(f"Not priced, and not included in any sum: {', '.join(unpriced)}.")
    if any(time.unknown_power_us for time in times.values()):
        notes.append(
            "Energy is unknown for part of the time: no GPU measured it (none does for a worker that spans "
            "several machines), and cost.watts_idle and cost.watts_busy were not set then."
        )
    if any(time.estimated_us for time in times.values()):
        notes.append(
            "Some workers do not measure their engine time (without a draft or without the plugin): the time "
            "with a request in flight was used instead."
        )
    if unattributed.seconds < 0:
        notes.append("Gateways that share workers claimed more engine time than was measured.")
    notes.append("Savings are real only if the time was used, or fewer workers were run.")
    return tuple(notes)


def _moment(time: int, zone: tzinfo) -> datetime:
    return datetime.fromtimestamp(time, UTC).astimezone(zone)

"""How far a log may be disposed of: whole tiles, up to the first entry that a rule keeps."""

import json
from dataclasses import replace

import pytest

from appliance.audit.disposal.plan import Facts, check_cutoff, latest_cutoff, make_plan
from appliance.audit.entry import format_time
from appliance.audit.entry_types import EntryType
from appliance.audit.stored import Leaf
from appliance.control.tenants.sealing import EVIDENCE
from appliance.errors import ControlRefusedError

DAY_MS = 86_400_000
BEFORE = format_time(2_000_000)
ALL = Facts(
    disposed=0,
    signed=5000,
    exported=5000,
    witnessed=None,
    forwarded=None,
    open_from=None,
    content_from=None,
)


def leaves(count, start=0, **entries):
    """Entries of increasing times; `entries` are others, by index."""
    for index in range(start, start + count):
        entry = {"type": "audit.read", "time": format_time(index * 1000)} | entries.get(f"at{index}", {})
        yield Leaf.of(index, json.dumps(entry, separators=(",", ":")).encode(), EntryType.AUDIT_READ)


def test_whole_tiles_of_old_entries_go():
    plan = make_plan(ALL, leaves(5000), BEFORE)
    assert (plan.previous, plan.below, plan.entries) == (0, 1792, 1792)  # 2000 entries are old: seven tiles
    assert plan.newest == format_time(1791 * 1000)
    assert plan.limits[0].size == 1999


def test_the_first_entry_that_stays_is_old_as_well():
    """Everyone can see it, so that no one has to believe how old the others were."""
    assert make_plan(ALL, leaves(5000), format_time(1792 * 1000)).below == 1536
    assert make_plan(ALL, leaves(5000), format_time(1793 * 1000)).below == 1792


def test_a_later_disposal_continues():
    plan = make_plan(replace(ALL, disposed=512), leaves(4488, 512), BEFORE)
    assert (plan.previous, plan.below, plan.entries) == (512, 1792, 1280)


@pytest.mark.parametrize(
    "fact", ["signed", "exported", "witnessed", "forwarded", "open_from", "content_from"]
)
@pytest.mark.parametrize("size", [0, 255, 256, 700])
def test_every_rule_keeps_entries(fact, size):
    plan = make_plan(replace(ALL, **{fact: size}), leaves(5000), BEFORE)
    assert plan.below == size // 256 * 256
    assert plan.limits[0].size == size


@pytest.mark.parametrize(
    "entry",
    [
        {"tenant": "acme"},
        {"type": "file.created", "file": "file-1"},
        {"type": "batch.created", "batch": "batch-1"},
        {"time": format_time(2_000_000)},
        {"time": None},
    ],
)
def test_an_entry_that_a_rule_keeps_keeps_all_behind_it(entry):
    """Of a tenant under a hold, of a stored file or batch, too young, or not to be read."""
    facts = replace(ALL, held={"acme"}, files={"file-1", "batch-1"})
    assert make_plan(facts, leaves(5000, at600=entry), BEFORE).below == 512


def test_an_entry_of_another_tenant_or_of_a_file_that_is_gone_keeps_nothing():
    facts = replace(ALL, held={"acme"}, files={"file-1"})
    others = {"at3": {"tenant": "other"}, "at4": {"type": "file.created", "file": "file-2"}}
    assert make_plan(facts, leaves(5000, **others), BEFORE).below == 1792


def test_nothing_goes_from_where_an_entry_is_missing_or_damaged():
    gap = [leaf for leaf in leaves(5000) if leaf.index != 300]
    assert make_plan(ALL, gap, BEFORE).below == 256
    damaged = [replace(leaf, leaf=b"{") if leaf.index == 300 else leaf for leaf in leaves(5000)]
    assert make_plan(ALL, damaged, BEFORE).below == 256


def test_a_hole_in_the_sequence_of_a_gateway_is_not_disposed_of():
    """It is evidence; what an earlier disposal has kept of the sequence counts."""

    def place(number):
        return {"writer": "g1", "epoch": 1, "sequence": number}

    whole = {"at5": place(7), "at600": place(8)}
    facts = replace(ALL, sequences={"g1": 6})
    assert make_plan(facts, leaves(5000, **whole), BEFORE).below == 1792
    plan = make_plan(facts, leaves(5000, **whole | {"at600": place(9)}), BEFORE)
    assert (plan.below, plan.limits[0].rule) == (512, "entry 600 is number 9 of g1, not 8")
    assert make_plan(ALL, leaves(5000, **whole), BEFORE).below == 0


def test_the_newest_time_is_of_what_goes_only():
    """A clock that was ahead for one entry counts; what stays does not."""
    plan = make_plan(ALL, leaves(5000, at5={"time": format_time(1_999_000)}), BEFORE)
    assert plan.newest == format_time(1_999_000)
    plan = make_plan(replace(ALL, signed=300), leaves(5000, at280={"time": format_time(1_999_000)}), BEFORE)
    assert plan.newest == format_time(255 * 1000)


def test_every_entry_is_kept_for_183_days():
    now = 1000 * DAY_MS
    assert latest_cutoff(now, []) == 817 * DAY_MS
    check_cutoff(format_time(817 * DAY_MS), format_time(latest_cutoff(now, [])))
    with pytest.raises(ControlRefusedError, match="183 days"):
        check_cutoff(format_time(817 * DAY_MS + 1), format_time(latest_cutoff(now, [])))


def test_a_clock_that_is_ahead_disposes_of_nothing_early():
    """The oldest of the clocks decides: this machine's, the witnesses', the time-stamp authority's."""
    assert latest_cutoff(1000 * DAY_MS, [900 * DAY_MS, 2000 * DAY_MS]) == 717 * DAY_MS


def test_what_tenants_and_keys_are_checked_against_outlives_disposal():
    assert all(each.outlives_disposal for each in EVIDENCE)

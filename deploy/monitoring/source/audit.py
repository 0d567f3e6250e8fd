"""
Whether the log is complete and unaltered, and egress is closed.
"""

from deploy.monitoring.source.common import (
    AUDIT_LOG,
    DAY,
    EGRESS,
    INSTALLATION,
    JOB,
    NONE,
    quantiles,
    since,
    until,
)
from deploy.monitoring.source.panels import PER_SECOND, Dashboard, Panel, Query, Row

STATE = Row(
    title="Now",
    panels=(
        AUDIT_LOG,
        Panel(
            title="Stored entries",
            text="Result of the log's own check of stored entries. If altered, this is an incident: keep the database.",
            queries=(Query(expr=f"max(appliance_audit_damaged{{{JOB}}})"),),
            kind="stat", width=3, height=4, mappings={"0": ("unaltered", "green"), "1": ("ALTERED", "red")},
        ),
        Panel(
            title="Entries lost",
            text="Acknowledged entries that were lost, since the gateways started: unreadable in the spool, or refused.",
            queries=(Query(expr=f"sum(appliance_audit_dropped_entries_total{{{JOB}}})"),),
            kind="stat", width=3, height=4, thresholds=((1, "red"),),
        ),
        Panel(
            title="Entries",
            text="Size of the log. It never falls.",
            queries=(Query(expr=f"max(appliance_audit_tree_size{{{JOB}}})"),),
            kind="stat", width=3, height=4,
        ),
        Panel(
            title="Last checked",
            text="Time since the check of stored entries last read the whole log, which takes it less than a day.",
            queries=(Query(expr=since("appliance_audit_last_verification_timestamp_seconds")),),
            unit="s", kind="stat", width=3, height=4, mappings={"-1": ("not yet", "orange")},
            thresholds=((DAY, "orange"), (2 * DAY, "red")),
        ),
        Panel(
            title="Last witnessed",
            text="Time since a witness last cosigned the log. If it is long, no other party holds a recent head.",
            queries=(Query(expr=since("appliance_audit_last_witness_timestamp_seconds")),),
            unit="s", kind="stat", width=3, height=4, mappings={"-1": ("never", "orange")}, thresholds=((DAY, "red"),),
        ),
        Panel(
            title="Last time-stamped",
            text="Time since the newest time stamp, by the authority's clock. An idle log needs no newer one.",
            queries=(Query(expr=since("appliance_audit_last_timestamp_seconds")),),
            unit="s", kind="stat", width=3, height=4, mappings={"-1": ("never", "orange")},
        ),
        EGRESS,
    ),
)  # fmt: skip
LOG = Row(
    title="Activity of the log",
    panels=(
        Panel(
            title="Entries written",
            text="Per second, by type; the ten most frequent. Each request has an intent and an outcome.",
            queries=(
                Query(
                    expr=f"topk(10, sum by (type) (rate(appliance_audit_entries_total{{{JOB}}}[$__rate_interval])) > 0)",
                    legend="{{type}}",
                ),
            ),
            unit=PER_SECOND, stacked=True, absent=NONE,
        ),
        Panel(
            title="Commit duration",
            text="Each answer waits for two commits. If it grows, check the disk of the database.",
            queries=quantiles("appliance_audit_commit_seconds", JOB),
            unit="s",
        ),
        Panel(
            title="Pending entries",
            text="`waiting` for a commit, `not signed`: no checkpoint covers them yet, `in the spool`: on the "
            "gateway's disk until the database is back, `missing`: lost, and without an `audit.gap` entry yet.",
            queries=(
                Query(expr=f"sum(appliance_audit_queue_entries{{{JOB}}})", legend="waiting"),
                Query(expr=f"max(appliance_audit_checkpoint_lag_entries{{{JOB}}})", legend="not signed"),
                Query(expr=f"sum(appliance_audit_spool_entries{{{JOB}}})", legend="in the spool"),
                Query(expr=f"sum(appliance_audit_gap_entries{{{JOB}}})", legend="missing"),
            ),
        ),
        Panel(
            title="Refused and spooled entries",
            text="Entries that the database refused, and entries that went to the spool instead, per second.",
            queries=(
                Query(
                    expr=f"sum(rate(appliance_audit_refused_entries_total{{{JOB}}}[$__rate_interval]))",
                    legend="refused",
                ),
                Query(
                    expr=f"sum(rate(appliance_audit_spooled_entries_total{{{JOB}}}[$__rate_interval]))",
                    legend="spooled",
                ),
            ),
            unit=PER_SECOND, maximum=1,
        ),
        Panel(
            title="Signed, checked and witnessed entries",
            text="Entries in the log, entries covered by a signed checkpoint, checked entries, and entries that a "
            "witness has cosigned. The lines should be close together.",
            queries=(
                Query(expr=f"max(appliance_audit_tree_size{{{JOB}}})", legend="entries"),
                Query(expr=f"max(appliance_audit_checkpoint_size{{{JOB}}})", legend="signed"),
                Query(expr=f"max(appliance_audit_verified_size{{{JOB}}})", legend="checked"),
                Query(expr=f"max(appliance_audit_witnessed_size{{{JOB}}})", legend="witnessed"),
                Query(expr=f"max(appliance_audit_timestamped_size{{{JOB}}})", legend="time-stamped"),
            ),
        ),
        Panel(
            title="Requests without an outcome",
            text="Intents without an outcome yet: requests in flight. Falls to 0 when there is no traffic.",
            queries=(Query(expr=f"max(appliance_audit_open_requests{{{JOB}}})", legend="open"),),
        ),
    ),
)  # fmt: skip
ENDS = Row(
    title="Disk space, certificates and keys",
    panels=(
        Panel(
            title="Free space",
            text="On the disks of the log's database, its spool and the data directory. At 0 requests are refused.",
            queries=(
                Query(
                    expr=f"min by (instance, disk) (appliance_audit_disk_free_bytes{{{JOB}}})",
                    legend="{{instance}}: {{disk}}",
                ),
            ),
            unit="bytes", width=6,
        ),
        Panel(
            title="Certificate expires in",
            text="The earliest expiry of a certificate in force. Replace its file before; the gateway reloads it.",
            queries=(Query(expr=until("appliance_tls_certificate_not_after_timestamp_seconds")),),
            unit="s", kind="stat", height=8, width=4, mappings={"-1": ("no TLS", "blue")},
            base="red", thresholds=((3 * DAY, "orange"), (21 * DAY, "green")),
        ),
        Panel(
            title="Age of the signing key",
            text="Age of the file of the key that signs the log. The key does not expire; rotate it as your rules say.",
            queries=(Query(expr=since("appliance_audit_signing_key_file_timestamp_seconds")),),
            unit="s", kind="stat", height=8, width=4, thresholds=((365 * DAY, "orange"),),
        ),
        Panel(
            title="Egress checks",
            text="Checks in the time range, by verdict: only `closed` proves that nothing outside can be reached.",
            queries=(
                Query(
                    expr=f"sum by (verdict) (increase(appliance_egress_checks_total{{{JOB}}}[$__range])) ",
                    legend="{{verdict}}",
                ),
            ),
            kind="stat", width=4,
            absent=NONE,
        ),
        Panel(
            title="Last egress check",
            text="Time since the last egress check of a gateway.",
            queries=(Query(expr=since("appliance_egress_last_check_timestamp_seconds")),),
            unit="s", kind="stat", width=3, height=8, mappings={"-1": ("never", "orange")},
            thresholds=((DAY, "orange"), (2 * DAY, "red")),
        ),
        Panel(
            title="Wall (Landlock)",
            text="Whether the kernel allows gateways to connect to configured ports only. `no wall`: the kernel has no "
            "support, or the wall is off; docs/explanation/no-egress.md says which layers remain.",
            queries=(Query(expr=f"min(appliance_wall_up{{{JOB}}})"),),
            kind="stat", width=3, height=8, mappings={"0": ("no wall", "orange"), "1": ("up", "green")},
        ),
    ),
)  # fmt: skip

AUDIT = Dashboard(
    uid="appliance-audit",
    title="Appliance: audit and sovereignty",
    text="Whether the log is complete and unaltered, and egress is closed.",
    variables=INSTALLATION,
    events=(),
    rows=(STATE, LOG, ENDS),
)

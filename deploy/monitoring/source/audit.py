"""
Whether everything is recorded, the record is whole, and nothing gets out.
"""

from deploy.monitoring.source.common import AUDIT_LOG, DAY, EGRESS, JOB, JOBS, quantiles, since, until
from deploy.monitoring.source.panels import Dashboard, Panel, Query, Row

STATE = Row(
    title="Now",
    panels=(
        AUDIT_LOG,
        Panel(
            title="Stored entries",
            text="Whether the log's own check found stored entries as they were written. Altered: an incident, keep "
            "the database.",
            queries=(Query(expr=f"max(appliance_audit_damaged{{{JOB}}})"),),
            kind="stat", width=3, height=4, words={"0": ("whole", "green"), "1": ("ALTERED", "red")},
        ),
        Panel(
            title="Entries lost",
            text="Entries that were recorded nowhere, since the gateways started. Stays 0 in `strict` and `spool`.",
            queries=(Query(expr=f"sum(appliance_audit_dropped_entries_total{{{JOB}}})"),),
            kind="stat", width=3, height=4, steps=((1, "red"),),
        ),
        Panel(
            title="Entries",
            text="Size of the log. It never falls.",
            queries=(Query(expr=f"max(appliance_audit_tree_size{{{JOB}}})"),),
            kind="stat", width=3, height=4,
        ),
        Panel(
            title="Last checked",
            text="How long ago the check of what is stored last ended; it runs every `audit.verify_seconds`.",
            queries=(Query(expr=since("appliance_audit_last_verification_timestamp_seconds")),),
            unit="s", kind="stat", width=3, height=4, words={"-1": ("not yet", "orange")},
            steps=((2 * 3600, "orange"), (3 * 3600, "red")),
        ),
        Panel(
            title="Last witnessed",
            text="How long ago a witness last cosigned the log. Long ago: nobody outside holds a recent head.",
            queries=(Query(expr=since("appliance_audit_last_witness_timestamp_seconds")),),
            unit="s", kind="stat", width=3, height=4, words={"-1": ("never", "orange")}, steps=((DAY, "red"),),
        ),
        EGRESS,
        Panel(
            title="Way out last tried",
            text="How long ago a gateway last checked that it cannot get out.",
            queries=(Query(expr=since("appliance_egress_last_check_timestamp_seconds")),),
            unit="s", kind="stat", width=3, height=4, words={"-1": ("never", "orange")},
            steps=((2 * 3600, "orange"), (3 * 3600, "red")),
        ),
    ),
)  # fmt: skip
LOG = Row(
    title="The log at work",
    panels=(
        Panel(
            title="Entries written",
            text="Per second, by type; the ten most frequent. Each request makes an intent and an outcome.",
            queries=(
                Query(
                    expr=f"topk(10, sum by (type) (rate(appliance_audit_entries_total{{{JOB}}}[$__rate_interval])))",
                    legend="{{type}}",
                ),
            ),
            stacked=True,
        ),
        Panel(
            title="Time of a commit",
            text="Answers wait for two of them. Growing: look at the disk of the database.",
            queries=quantiles("appliance_audit_commit_seconds", JOB, 0.5, 0.99),
            unit="s",
        ),
        Panel(
            title="Entries on their way",
            text="`waiting` for a commit, `not signed`: no checkpoint covers them yet, `in the spool`: on the "
            "gateway's disk until the database is back, `missing`: recorded nowhere and not admitted yet.",
            queries=(
                Query(expr=f"sum(appliance_audit_queue_entries{{{JOB}}})", legend="waiting"),
                Query(expr=f"max(appliance_audit_checkpoint_lag_entries{{{JOB}}})", legend="not signed"),
                Query(expr=f"sum(appliance_audit_spool_entries{{{JOB}}})", legend="in the spool"),
                Query(expr=f"sum(appliance_audit_gap_entries{{{JOB}}})", legend="missing"),
            ),
        ),
        Panel(
            title="Not taken at once",
            text="Entries that the database refused, and those that went to the spool for it, per second.",
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
        ),
        Panel(
            title="Covered by others",
            text="Entries in the log, those a signed checkpoint covers, those that were checked, and those a witness "
            "has cosigned. The lines should run together.",
            queries=(
                Query(expr=f"max(appliance_audit_tree_size{{{JOB}}})", legend="entries"),
                Query(expr=f"max(appliance_audit_checkpoint_size{{{JOB}}})", legend="signed"),
                Query(expr=f"max(appliance_audit_verified_size{{{JOB}}})", legend="checked"),
                Query(expr=f"max(appliance_audit_witnessed_size{{{JOB}}})", legend="witnessed"),
            ),
        ),
        Panel(
            title="Requests without an outcome",
            text="Intents whose outcome is not written yet: requests under way. Should fall to 0 when nobody asks.",
            queries=(Query(expr=f"max(appliance_audit_open_requests{{{JOB}}})", legend="open"),),
        ),
    ),
)  # fmt: skip
ENDS = Row(
    title="What runs out",
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
            unit="bytes",
        ),
        Panel(
            title="Certificate ends in",
            text="The soonest end of a certificate in force. Renew its file before: it is taken over.",
            queries=(Query(expr=until("appliance_tls_certificate_not_after_timestamp_seconds")),),
            unit="s", kind="stat", height=8, width=4, words={"-1": ("no TLS", "blue")},
            base="red", steps=((3 * DAY, "orange"), (21 * DAY, "green")),
        ),
        Panel(
            title="Age of the signing key",
            text="How long ago the file of the key that signs the log was written. It works for ever; rotate it as "
            "your rules say.",
            queries=(Query(expr=since("appliance_audit_signing_key_file_timestamp_seconds")),),
            unit="s", kind="stat", height=8, width=4, steps=((365 * DAY, "orange"),),
        ),
        Panel(
            title="Egress checks",
            text="Checks in the time shown, by what they showed: only `closed` proves that nothing gets out.",
            queries=(
                Query(
                    expr=f"sum by (verdict) (increase(appliance_egress_checks_total{{{JOB}}}[$__range])) "
                    "or on() vector(0)",
                    legend="{{verdict}}",
                ),
            ),
            kind="stat", width=4,
        ),
        Panel(
            title="Wall",
            text="Whether the kernel lets gateways connect to configured ports only. `no wall`: its kernel cannot, or "
            "it was told not to; docs/explanation/no-egress.md says what then still holds.",
            queries=(Query(expr=f"min(appliance_wall_up{{{JOB}}})"),),
            kind="stat", width=4, height=8, words={"0": ("no wall", "orange"), "1": ("up", "green")},
        ),
    ),
)  # fmt: skip

AUDIT = Dashboard(
    uid="appliance-audit",
    title="Appliance: audit and sovereignty",
    text="Is everything recorded, is the record whole, and does nothing get out?",
    variables=(JOBS,),
    events=(),
    rows=(STATE, LOG, ENDS),
)

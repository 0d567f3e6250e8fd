"""All checks, in the order of the report."""

from collections.abc import Callable, Iterable, Iterator

from appliance.cli.preflight.accelerator import check_gpus, check_kernels
from appliance.cli.preflight.audit_database import check_database
from appliance.cli.preflight.certificate import check_tls
from appliance.cli.preflight.check import Check, CheckFamily, Inquiry, Subject
from appliance.cli.preflight.clock import check_clock
from appliance.cli.preflight.digests import check_weights
from appliance.cli.preflight.disk import check_disk
from appliance.cli.preflight.draft_fit import check_pair
from appliance.cli.preflight.engine import check_engine
from appliance.cli.preflight.kernel import check_kernel
from appliance.cli.preflight.log_integrity import check_log
from appliance.cli.preflight.network import check_egress, check_ports
from appliance.cli.preflight.processor import check_cpu
from appliance.cli.preflight.secret_files import check_files
from appliance.errors import ApplianceError

FAMILIES = (
    *(check_files, check_engine, check_gpus, check_kernels, check_cpu, check_disk, check_kernel, check_ports),
    *(check_clock, check_egress, check_weights, check_pair, check_database, check_tls, check_log),
)
SUBJECTS = tuple(subject for family in FAMILIES for subject in family.subjects)


def run_checks(
    inquiry: Inquiry,
    *,
    skip: frozenset[str] = frozenset(),
    families: Iterable[CheckFamily] = FAMILIES,
    report: Callable[[str], None] = lambda _: None,
) -> Iterator[Check]:
    """
    Run all checks; an error in a check is reported as a failure and stops no other check.

    `skip` are ids of checks or families; `report` receives the title of the next family.
    """
    for family in families:
        if all(_is_skipped(subject, skip) for subject in family.subjects):
            yield from (subject.skipped("skipped with --skip") for subject in family.subjects)
            continue
        report(family.subjects[0].title)
        answers = family(inquiry)
        for subject in family.subjects:
            try:
                answer = next(answers)
            except (ApplianceError, OSError) as error:
                # The generator has ended, so that the rest of the family is skipped below.
                seen = f"the check failed: {error}"
                answer = subject.fail(seen, "correct this, then run preflight again")
            except StopIteration:
                answer = subject.skipped("a check that it depends on failed")
            yield subject.skipped("skipped with --skip") if _is_skipped(subject, skip) else answer


def _is_skipped(subject: Subject, skip: frozenset[str]) -> bool:
    return subject.id in skip or subject.id.partition(".")[0] in skip

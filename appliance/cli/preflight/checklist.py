"""All checks, in the order of the report."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from appliance.cli.preflight import (
    accelerator,
    audit_database,
    audit_log,
    certificate,
    clock,
    digests,
    disk,
    draft_fit,
    kernel,
    kernels,
    listening,
    no_egress,
    processor,
    secret_files,
)
from appliance.cli.preflight.check import Check, Subject
from appliance.cli.preflight.inquiry import Inquiry
from appliance.errors import ApplianceError


@dataclass(frozen=True, slots=True)
class CheckFamily:
    """Checks of one part of the machine."""

    look: Callable[[Inquiry], Iterable[Check]]
    """Yields one check per subject, in their order."""
    subjects: tuple[Subject, ...]


FAMILIES = (
    CheckFamily(secret_files.check_files, secret_files.SUBJECTS),
    CheckFamily(accelerator.check_gpus, accelerator.SUBJECTS),
    CheckFamily(kernels.check_kernels, kernels.SUBJECTS),
    CheckFamily(processor.check_cpu, processor.SUBJECTS),
    CheckFamily(disk.check_disk, disk.SUBJECTS),
    CheckFamily(kernel.check_kernel, kernel.SUBJECTS),
    CheckFamily(listening.check_ports, listening.SUBJECTS),
    CheckFamily(clock.check_clock, clock.SUBJECTS),
    CheckFamily(no_egress.check_egress, no_egress.SUBJECTS),
    CheckFamily(digests.check_weights, digests.SUBJECTS),
    CheckFamily(draft_fit.check_pair, draft_fit.SUBJECTS),
    CheckFamily(audit_database.check_database, audit_database.SUBJECTS),
    CheckFamily(certificate.check_tls, certificate.SUBJECTS),
    CheckFamily(audit_log.check_log, audit_log.SUBJECTS),
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
        answers = iter(family.look(inquiry))
        for subject in family.subjects:
            try:
                answer = next(answers)
            except (ApplianceError, OSError) as error:
                seen = f"the check failed: {error}"
                answer = subject.fail(seen, "correct this, then run preflight again")
                answers = iter(())
            except StopIteration:
                answer = subject.skipped("a check that it depends on failed")
            yield subject.skipped("skipped with --skip") if _is_skipped(subject, skip) else answer


def _is_skipped(subject: Subject, skip: frozenset[str]) -> bool:
    return subject.id in skip or subject.id.partition(".")[0] in skip

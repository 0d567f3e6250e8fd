"""
All the checks, in the order an installer reads them.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from appliance.cli.preflight import (
    accelerator,
    certificate,
    clock,
    database,
    digests,
    disk,
    egress,
    kernel,
    kernels,
    listening,
    log,
    pair,
    processor,
    secret_files,
)
from appliance.cli.preflight.check import Check, Subject
from appliance.cli.preflight.inquiry import Inquiry
from appliance.errors import ApplianceError


@dataclass(frozen=True, slots=True)
class Family:
    """Checks that look at one part of the machine."""

    look: Callable[[Inquiry], Iterable[Check]]
    """Answers every subject once, in their order."""
    subjects: tuple[Subject, ...]


FAMILIES = (
    Family(secret_files.check_files, secret_files.SUBJECTS),
    Family(accelerator.check_gpus, accelerator.SUBJECTS),
    Family(kernels.check_kernels, kernels.SUBJECTS),
    Family(processor.check_cpu, processor.SUBJECTS),
    Family(disk.check_disk, disk.SUBJECTS),
    Family(kernel.check_kernel, kernel.SUBJECTS),
    Family(listening.check_ports, listening.SUBJECTS),
    Family(clock.check_clock, clock.SUBJECTS),
    Family(egress.check_egress, egress.SUBJECTS),
    Family(digests.check_weights, digests.SUBJECTS),
    Family(pair.check_pair, pair.SUBJECTS),
    Family(database.check_database, database.SUBJECTS),
    Family(certificate.check_tls, certificate.SUBJECTS),
    Family(log.check_log, log.SUBJECTS),
)
SUBJECTS = tuple(subject for family in FAMILIES for subject in family.subjects)


def run_checks(
    inquiry: Inquiry,
    *,
    skip: frozenset[str] = frozenset(),
    families: Iterable[Family] = FAMILIES,
    report: Callable[[str], None] = lambda _: None,
) -> Iterator[Check]:
    """
    Ask everything; a question that cannot be answered is a failure of its own and stops no other.

    Args:
        inquiry: what to ask about.
        skip: ids that are left out, or what stands before their dot.
        families: what is asked; the default is everything.
        report: called with the title of what is looked at next.
    """
    for family in families:
        if all(_is_skipped(subject, skip) for subject in family.subjects):
            yield from (subject.skipped("left out with --skip") for subject in family.subjects)
            continue
        report(family.subjects[0].title)
        answers = iter(family.look(inquiry))
        for subject in family.subjects:
            try:
                answer = next(answers)
            except (ApplianceError, OSError) as error:
                seen = f"it cannot be looked at: {error}"
                answer = subject.fail(seen, "put that right, then ask again")
                answers = iter(())
            except StopIteration:
                answer = subject.skipped("what it needs could not be looked at")
            yield subject.skipped("left out with --skip") if _is_skipped(subject, skip) else answer


def _is_skipped(subject: Subject, skip: frozenset[str]) -> bool:
    return subject.id in skip or subject.id.partition(".")[0] in skip

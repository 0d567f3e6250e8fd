"""
Attacks by the owner of the database, or more: exactly the observers in the catalogue detect them.
"""

import pytest
from sqlalchemy.exc import DatabaseError

from tests.attacks import attackers
from tests.attacks.catalogue import ATTACKS, REFUSED, Observer
from tests.attacks.observers import (
    accepting_gateway,
    auditor,
    outside_observers,
    running_gateway,
    starting_gateway,
)
from tests.attacks.scene import Past
from tests.postgres import private_postgres

REFUSAL = "write-once"


@pytest.fixture(scope="module")
def postgres():
    with private_postgres() as server:
        yield server


@pytest.fixture(scope="module", params=["sqlite", pytest.param("postgresql", marks=pytest.mark.slow)])
def originals(request, tmp_path_factory):
    """Logs with a history, the second with disposed entries, each with its server, if any, and URL."""
    server = request.getfixturevalue("postgres") if request.param == "postgresql" else None
    made = []
    for number, make in enumerate((Past, Past.with_disposed_entries)):
        url = server.new_database() if server else None
        made.append((make(tmp_path_factory.mktemp(f"original{number}") / "past", url), server, url))
        made[-1][0].scene.close()
    return made


@pytest.fixture
def past(originals, tmp_path):
    """Make copies of one of these logs, to be attacked by the owner of its database."""
    made = []

    def past_(name, *, has_disposed=False):
        first, server, url = originals[has_disposed]
        copied = None
        if server:
            copied = server.url_of(f"{tmp_path.name}_{name}".lower())
            names = [each.rpartition("/")[2] for each in (copied, url)]
            server.execute(f'CREATE DATABASE "{names[0]}" TEMPLATE "{names[1]}"')
        made.append(first.copy(tmp_path / name, copied))
        return made[-1]

    yield past_
    for one in made:
        one.scene.close()


def _attempt(attack, past):
    """Try it with the triggers in place; drop them if they are in the way."""
    try:
        attack(past)
    except DatabaseError as error:
        if REFUSAL not in str(error):
            raise
        past.scene.drop_triggers()
        attack(past)
        return REFUSED
    return None


def _of(*, accepted):
    chosen = [attack for attack in ATTACKS if attack.is_accepted == accepted]
    return pytest.mark.parametrize("attack", chosen, ids=lambda attack: attack.name)


@_of(accepted=True)
@pytest.mark.parametrize("originals", ["postgresql"], indirect=True)
def test_an_attack_on_accepted_entries_is_detected_by_exactly_the_observers_in_the_catalogue(attack, past):
    """The auditor looks after the gateway has started again: before, the entries are not in the log."""
    carry_out = getattr(attackers, attack.name)
    before = past("before", has_disposed=attack.has_disposed)
    before.scene.accept(4)
    found = {Observer.DATABASE: _attempt(carry_out, before)}
    found[Observer.START] = starting_gateway(before.scene)
    found |= outside_observers(before)
    during = past("during", has_disposed=attack.has_disposed)
    found |= accepting_gateway(during, lambda past: _attempt(carry_out, past))
    assert {observer: said for observer, said in found.items() if said is not None} == dict(attack.noticed)


@pytest.mark.parametrize("originals", ["postgresql"], indirect=True)
@pytest.mark.parametrize("has_disposed", [False, True])
def test_unattacked_accepted_entries_of_a_killed_gateway_come_into_the_log(past, has_disposed):
    quiet = past("quiet", has_disposed=has_disposed)
    size = len(quiet.scene.rows("SELECT idx FROM audit_leaves"))
    quiet.scene.accept(4)
    assert starting_gateway(quiet.scene) is None
    assert set(outside_observers(quiet).values()) == {None}
    assert len(quiet.scene.rows("SELECT idx FROM audit_leaves")) == size + 5


@_of(accepted=False)
def test_an_attack_is_detected_by_exactly_the_observers_in_the_catalogue(attack, past):
    """No other observer, and with exactly this report."""
    carry_out = getattr(attackers, attack.name)
    before = past("before", has_disposed=attack.has_disposed)
    found = {Observer.DATABASE: _attempt(carry_out, before), **outside_observers(before)}
    found[Observer.START] = starting_gateway(before.scene)
    during = past("during", has_disposed=attack.has_disposed)
    found |= running_gateway(during, lambda past: _attempt(carry_out, past))
    noticed = {observer: said for observer, said in found.items() if said is not None}
    assert noticed == dict(attack.noticed)


@pytest.mark.parametrize("has_disposed", [False, True])
def test_no_observer_reports_an_unattacked_log(past, has_disposed):
    """The observers report no false positive."""
    quiet = past("quiet", has_disposed=has_disposed)
    assert set(outside_observers(quiet).values()) == {None}
    assert starting_gateway(quiet.scene) is None
    assert set(running_gateway(quiet, lambda _past: None).values()) == {None}


def test_a_key_that_no_entry_created_is_reported_once_it_has_acted(past):
    """Also if the thief has the MAC key, so that gateways accept it."""
    robbed = past("robbed")
    attackers.act_with_a_key_of_a_forged_mac(robbed)
    assert starting_gateway(robbed.scene) is None
    assert auditor(robbed.scene, "afterwards") == "unknown_keys"


def test_a_disposal_of_young_entries_is_reported_once_it_is_signed(past):
    """By every auditor: the first entry that stays is younger than what may go."""
    young = past("young")
    attackers.dispose_of_young_entries(young)
    assert starting_gateway(young.scene) is None
    assert auditor(young.scene, "afterwards") == "invalid"


def test_every_log_forged_with_the_stolen_key_is_valid_by_itself(past):
    """It verifies, starts and continues: ONLY a checkpoint held elsewhere, or a witness, shows it."""
    forged = past("forged")
    _attempt(attackers.rebuild_everything, forged)
    assert auditor(forged.scene, "alone") is None
    assert starting_gateway(forged.scene) is None
    forged.scene.serve("wednesday-1")
    assert auditor(forged.scene, "later") is None
    assert auditor(forged.scene, "with-checkpoint", forged.held) == "diverged"
    assert not forged.scene.have_cosigned(forged.witness)


def test_each_of_two_histories_is_valid_for_the_auditor_who_sees_it(past):
    """Both continue what both saw on Monday; what one of them saw on Tuesday contradicts the other."""
    split = past("split")
    assert auditor(split.scene, "first-view", split.held_on_monday) is None
    _attempt(attackers.show_two_histories, split)
    assert auditor(split.scene, "second-view", split.held_on_monday) is None
    assert auditor(split.scene, "compared", split.held) == "diverged"
    # Two witnesses can be shown one history each; it takes one that both histories have to pass.
    assert split.scene.have_cosigned(split.witness_of_monday)
    assert not split.scene.have_cosigned(split.witness)

"""
Attacks by whoever owns the database, or more: who notices is what the catalogue says, and no one else.
"""

import pytest
from sqlalchemy.exc import DatabaseError

from tests.attacks import attackers
from tests.attacks.catalogue import ATTACKS, REFUSED, Loot, Observer
from tests.attacks.observers import auditor, outside_observers, running_gateway, starting_gateway
from tests.attacks.scene import Past
from tests.postgres import private_postgres

pytestmark = pytest.mark.chance

REFUSAL = "write-once"


@pytest.fixture(scope="module")
def postgres():
    with private_postgres() as server:
        yield server


@pytest.fixture(params=["sqlite", "postgresql"])
def past(request, tmp_path):
    """Make logs with a past; the database's owner is who attacks."""
    server = request.getfixturevalue("postgres") if request.param == "postgresql" else None
    made = []

    def past_(name):
        made.append(Past(tmp_path / name, server.new_database() if server else None))
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


@pytest.mark.parametrize("attack", ATTACKS, ids=lambda attack: attack.name)
def test_an_attack_is_noticed_by_exactly_those_the_catalogue_names(attack, past):
    """Nobody else, and saying just that."""
    carry_out = getattr(attackers, attack.name)
    before = past("before")
    found = {Observer.DATABASE: _attempt(carry_out, before), **outside_observers(before)}
    found[Observer.START] = starting_gateway(before.scene)
    during = past("during")
    found |= running_gateway(during, lambda past: _attempt(carry_out, past))
    noticed = {observer: said for observer, said in found.items() if said is not None}
    assert noticed == dict(attack.noticed)


def test_without_an_attack_nobody_notices_anything(past):
    """The observers can be silent."""
    quiet = past("quiet")
    assert set(outside_observers(quiet).values()) == {None}
    assert starting_gateway(quiet.scene) is None
    assert set(running_gateway(quiet, lambda _past: None).values()) == {None}


def test_every_log_forged_with_the_stolen_key_is_valid_by_itself(past):
    """It verifies, starts and goes on: ONLY a checkpoint held elsewhere, or a witness, shows it."""
    forged = past("forged")
    _attempt(attackers.rebuild_everything, forged)
    assert auditor(forged.scene, "alone") is None
    assert starting_gateway(forged.scene) is None
    forged.scene.serve("wednesday-1")
    assert auditor(forged.scene, "later") is None
    assert auditor(forged.scene, "with-checkpoint", forged.held) == "diverged"
    assert not forged.scene.have_cosigned(forged.witness)


def test_of_two_histories_each_looks_right_to_the_auditor_it_is_shown_to(past):
    """Both continue what both saw on Monday; what one of them saw on Tuesday contradicts the other."""
    split = past("split")
    assert auditor(split.scene, "first-view", split.held_on_monday) is None
    _attempt(attackers.show_two_histories, split)
    assert auditor(split.scene, "second-view", split.held_on_monday) is None
    assert auditor(split.scene, "compared", split.held) == "diverged"
    # Two witnesses can be shown one history each; it takes one that both histories have to pass.
    assert split.scene.have_cosigned(split.witness_of_monday)
    assert not split.scene.have_cosigned(split.witness)


def test_whatever_needs_only_the_database_is_noticed_by_somebody_but_additions(past):
    """The honest exception: who may write while no gateway runs may add."""
    quiet = [
        attack.name
        for attack in ATTACKS
        if attack.loot == (Loot.DATABASE,)
        and not (set(attack.noticed) - {Observer.DATABASE, Observer.RUNNING, Observer.SELF_CHECK})
    ]
    assert quiet == ["drop_the_triggers", "append_an_entry"]


def test_what_takes_the_key_and_the_sealed_head_is_noticed_from_outside_or_not_at_all():
    """Nothing on a machine can contradict whoever owns all of it."""
    inside = {Observer.DATABASE, Observer.RUNNING, Observer.SELF_CHECK}
    for attack in ATTACKS:
        if {Loot.SIGNING_KEY, Loot.SEALED_HEAD} <= set(attack.loot):
            assert set(attack.noticed) - inside <= {Observer.HELD, Observer.WITNESS}

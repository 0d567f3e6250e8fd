"""The order of a batch's states, and which batch is next."""

import pytest

from appliance.gateway.batch.batch import ENDED, FOLLOWS, OPEN, Batch, Status, before, pick_next


def batch(tenant, number):
    return Batch(
        batch_id=f"batch_{number:026d}",
        tenant=tenant,
        key_id="abcdefgh",
        gateway="g",
        client="loopback",
        endpoint="/v1/completions",
        completion_window="24h",
        input_file_id="file-1",
        sealed=False,
        status=Status.VALIDATING,
        output_seconds=3600,
        created_at=1,
        expires_at=2,
    )


def test_every_state_can_be_reached_and_every_open_one_can_end():
    """No state is a dead end or unreachable."""
    reached, frontier = {Status.VALIDATING}, [Status.VALIDATING]
    while frontier:
        new = FOLLOWS[frontier.pop()] - reached
        reached |= new
        frontier += new
    assert reached == set(Status)
    assert {Status.COMPLETED, Status.FAILED, Status.EXPIRED, Status.CANCELLED} == ENDED
    assert all(FOLLOWS[status] for status in OPEN)


@pytest.mark.parametrize("status", sorted(ENDED))
def test_ended_states_are_final(status):
    assert not FOLLOWS[status]
    assert all(status not in before(other) for other in Status)


def test_completed_follows_finalizing_only():
    """`completed` is entered from `finalizing` alone, which a cancelled batch never enters."""
    assert before(Status.COMPLETED) == {Status.FINALIZING}
    assert before(Status.FINALIZING) == {Status.IN_PROGRESS}
    assert before(Status.CANCELLING) == {Status.VALIDATING, Status.IN_PROGRESS}


def test_tenant_with_fewest_running_batches_is_next():
    """The tenant with the fewest running ones; of its batches the oldest."""
    waiting = [batch("greedy", number) for number in (1, 2, 3)] + [batch("modest", 9), batch("modest", 8)]
    assert pick_next(waiting, {"greedy": 1}).batch_id == batch("modest", 8).batch_id
    assert pick_next(waiting, {}).batch_id == batch("greedy", 1).batch_id
    assert pick_next([], {"greedy": 1}) is None

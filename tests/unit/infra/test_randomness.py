"""No two calls have the same bytes, whoever makes them."""

import os
from concurrent.futures import ThreadPoolExecutor

from appliance.infra.randomness import CALLS, random_bytes


def test_no_bytes_are_given_twice():
    """Also from several threads, and over several reads of the kernel."""
    with ThreadPoolExecutor(8) as threads:
        made = list(threads.map(lambda _: random_bytes(10), range(20 * CALLS)))
    assert {len(each) for each in made} == {10}
    assert len(set(made)) == len(made)
    assert len(random_bytes(16)) == 16


def test_a_forked_process_has_bytes_of_its_own():
    random_bytes(12)
    reading, writing = os.pipe()
    if child := os.fork():
        os.close(writing)
        with os.fdopen(reading, "rb") as pipe:
            theirs = pipe.read()
        os.waitpid(child, 0)
        assert len(theirs) == 24
        assert {theirs[:12], theirs[12:]}.isdisjoint([random_bytes(12) for _ in range(CALLS)])
    else:
        os.write(writing, random_bytes(12) + random_bytes(12))
        os._exit(0)

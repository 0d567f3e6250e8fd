"""
What a client's tests are given.  They run in the client's own environment, which has nothing of ours.

Where to and with which key is in the variables that the clients themselves read; nothing else is set.
"""

import os
import sys

import pytest

from tests.wall import stay_here

sys.addaudithook(stay_here)


@pytest.fixture(scope="session")
def model() -> str:
    """A model that chats."""
    return os.environ["CHAT_MODEL"]


@pytest.fixture(scope="session")
def embedder() -> str:
    """A model that embeds."""
    return os.environ["EMBEDDING_MODEL"]

"""A workshop with a key, and a bundle of one of everything."""

from pathlib import Path

import pytest

from tests.bundles import Workshop


@pytest.fixture
def workshop(tmp_path: Path) -> Workshop:
    return Workshop.open(tmp_path / "workshop")


@pytest.fixture
def bundle(workshop: Workshop) -> Path:
    return workshop.build()

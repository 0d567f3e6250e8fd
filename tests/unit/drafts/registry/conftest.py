"""A site without any draft yet."""

from pathlib import Path

import pytest

from tests.unit.drafts.registry.site import Site


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return Site.open(tmp_path / "site")

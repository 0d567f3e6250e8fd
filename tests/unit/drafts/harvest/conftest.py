"""What the suites about harvesting share."""

import pytest

from tests.unit.drafts.harvest.harvest_site import close_site, open_site


@pytest.fixture
def site(tmp_path):
    """A site with nothing kept yet."""
    site = open_site(tmp_path / "data")
    yield site
    close_site(site)

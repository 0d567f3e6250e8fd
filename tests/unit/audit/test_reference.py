"""The reference page says what the code does."""

from pathlib import Path

from appliance.audit.reference import reference
from appliance.audit.registry import REGISTRY

PAGE = Path(__file__).resolve().parents[3] / "docs" / "reference" / "audit-format.md"


def test_the_page_is_what_the_registry_says():
    """A changed type, field or exit code without a changed page fails here."""
    assert PAGE.read_text(encoding="utf-8") == reference()


def test_every_type_and_field_is_on_the_page():
    """Nothing is recorded that an auditor could not look up."""
    page = reference()
    for entry_type, schema in REGISTRY.items():
        assert f"### `{entry_type}`" in page
        assert all(f"| `{name}` |" in page for name in schema.fields)

"""The documentation matches the checks, settings and recipes."""

import re
from pathlib import Path

import pytest
import yaml

from appliance.audit.entry_types import EntryType
from appliance.cli.preflight.checklist import SUBJECTS
from appliance.infra.settings import load_settings
from appliance.sovereignty.bundle.recipe import BundleRecipe

HOW_TO = Path(__file__).parents[4] / "docs" / "how-to"
RUNBOOKS = HOW_TO.parent / "runbooks"


def test_the_page_lists_every_check_in_order():
    """With its id, which programs and `--skip` use."""
    listed = re.findall(r"^\| `([a-z]+\.[a-z_]+)` \|", (HOW_TO / "preflight.md").read_text(), re.MULTILINE)
    assert listed == [subject.id for subject in SUBJECTS]


def test_the_recipe_and_the_settings_of_the_installation_are_valid(tmp_path):
    """Operators copy both."""
    recipe, settings = re.findall(
        r"```yaml\n(.*?)```", (HOW_TO / "install-air-gapped.md").read_text(), re.DOTALL
    )
    assert {model.name for model in BundleRecipe.model_validate(yaml.safe_load(recipe)).models} == {
        "demo-coder",
        "demo-coder-eagle31",
    }
    (tmp_path / "appliance.yaml").write_text(settings)
    assert load_settings(tmp_path / "appliance.yaml", environment={}).egress.mode == "strict"


def test_the_recipe_carries_or_leaves_out_every_image_of_the_chart():
    """A bundle that lacks one is not built."""
    recipe = BundleRecipe.model_validate(
        yaml.safe_load(
            re.findall(r"```yaml\n(.*?)```", (HOW_TO / "install-air-gapped.md").read_text(), re.DOTALL)[0]
        )
    )
    (chart,) = recipe.charts
    about = yaml.safe_load((HOW_TO.parents[1] / "deploy" / "helm" / "Chart.yaml").read_text())
    listed = yaml.safe_load(about["annotations"]["artifacthub.io/images"])
    carried = {image.reference for image in recipe.images}
    assert {image["image"] for image in listed} == carried | set(chart.unused)


@pytest.mark.parametrize("page", sorted(RUNBOOKS.glob("*.md")), ids=lambda page: page.name)
def test_runbooks_name_checks_that_exist(page):
    """A check that was renamed would mislead operators during an incident."""
    families = {subject.id.partition(".")[0] for subject in SUBJECTS}
    settings = {
        f"{section}.{field}" for section, model in load_settings(environment={}) for field in dict(model)
    }
    known = {subject.id for subject in SUBJECTS} | settings
    for name in re.findall(r"`([a-z]+\.[a-z_]+)`", page.read_text()):
        others = {"audit.db", "audit.head", *EntryType}
        assert name.partition(".")[0] not in families or name in known | others, name

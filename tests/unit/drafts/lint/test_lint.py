"""Every rule has a broken draft; a good draft has no findings."""

import re
from importlib.util import find_spec
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from appliance.drafts.lint.lint import lint_pair, refuse_errors
from appliance.drafts.lint.rules import Rule, Severity
from appliance.errors import ConfigurationError
from appliance.infra.settings import DEMO_DRAFT, DEMO_TARGET
from appliance.serving.weights import TensorInfo, Weights, inspect_weights
from tests.unit.drafts.lint.builder import HIDDEN, RECORD, VOCABULARY, eagle31, plain, write
from tests.unit.drafts.lint.catalogue import BROKEN, GOOD, changed, lengthen, recorded
from tests.unit.drafts.lint.test_methods import BROKEN_METHODS

FACTS = yaml.safe_load((Path(__file__).parents[4] / "docs" / "draft_lint.yaml").read_text(encoding="utf-8"))


@pytest.mark.parametrize("name", GOOD)
def test_draft_that_fits_has_no_findings(tmp_path, name):
    assert lint_pair(*write(GOOD[name](), tmp_path)) == ()


@pytest.mark.parametrize(("rule", "make"), BROKEN, ids=[str(rule) for rule, _ in BROKEN])
def test_broken_draft_has_exactly_its_finding(tmp_path, rule, make):
    draft = make()
    findings = lint_pair(*write(draft, tmp_path), context=draft.context)
    assert [finding.rule for finding in findings] == [rule], findings
    assert findings[0].message.isprintable()


def test_every_rule_has_a_draft_that_breaks_it():
    """A rule without a fixture could be dead code."""
    assert {rule for rule, *_ in (*BROKEN, *BROKEN_METHODS)} == set(Rule)


def test_committed_pair_fits():
    target, draft = inspect_weights(DEMO_TARGET), inspect_weights(DEMO_DRAFT)
    assert lint_pair(target, draft) == ()
    assert set(draft.training) == set(RECORD)


def test_sliding_window_is_not_warned_of_long_contexts(tmp_path):
    """Such a plain draft never sees more than its window."""
    draft = plain()
    lengthen(draft, 8192)
    draft.config["layer_types"] = ["sliding_attention"]
    assert lint_pair(*write(draft, tmp_path)) == ()


def test_training_record_confirms_a_draft_without_norm_output(tmp_path):
    draft = recorded(norm_output=False)
    del draft.config["norm_output"]
    assert lint_pair(*write(draft, tmp_path)) == ()


def test_several_tensors_of_one_kind_are_one_finding(tmp_path):
    draft = eagle31()
    for part in "qkv":
        draft.tensors[f"midlayer.self_attn.{part}_proj.weight"] = (4, HIDDEN)
    (finding,) = lint_pair(*write(draft, tmp_path))
    assert finding.message.endswith(", and 2 more")


def test_raises_the_first_error_and_counts_the_others(tmp_path):
    draft = changed(vocab_size=2 * VOCABULARY)()
    draft.drop("fc.weight")
    pair = write(draft, tmp_path)
    with pytest.raises(
        ConfigurationError, match=r"does not fit: its vocab_size .* \(and 1 more\)"
    ) as refusal:
        refuse_errors(lint_pair(*pair), pair[1].path)
    assert "\n" not in str(refusal.value)


def test_warnings_refuse_nothing(tmp_path):
    pair = write(changed(norm_output=None)(), tmp_path)
    findings = lint_pair(*pair)
    refuse_errors(findings, pair[1].path)
    assert [finding.rule for finding in findings] == [Rule.NORM_OUTPUT_UNSET]
    assert findings[0].severity is Severity.WARNING


@pytest.mark.parametrize("rule", Rule)
def test_every_rule_is_explained_with_a_file_of_vllm(rule):
    facts = FACTS[rule]
    named = re.findall(r"`([\w/]+/(?:[\w]+\.py)?)`", facts["why"])
    assert named
    assert facts["finds"].endswith(".")
    assert not rule.advice.endswith(".")
    spec = find_spec("vllm")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("vllm is not installed")
    root = Path(spec.submodule_search_locations[0])
    assert [name for name in named if not (root / name).exists()] == []


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 40) | st.floats(allow_nan=False) | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)
SHAPES = st.lists(st.integers(0, 40), max_size=3).map(tuple)


@given(data=st.data())
def test_foreign_configs_give_findings_and_never_an_exception(data):
    make = data.draw(st.sampled_from([*GOOD.values()]))
    draft = make()
    for fields in (draft.config, draft.target, draft.config.get("transformer_layer_config", {})):
        if isinstance(fields, dict) and fields:
            fields.update(data.draw(st.dictionaries(st.sampled_from(sorted(fields)), JSON, max_size=3)))
    shapes = data.draw(st.dictionaries(st.sampled_from(sorted(draft.tensors)), SHAPES, max_size=3))
    tensors = {
        name: TensorInfo(shape=shape, dtype=draft.dtypes.get(name, "BF16"))
        for name, shape in (draft.tensors | shapes).items()
    }
    training = data.draw(st.dictionaries(st.sampled_from(sorted(RECORD)), JSON, max_size=3))
    target = Weights(path=Path("/target"), config=draft.target, tensors={})
    weights = Weights(path=Path("/draft"), config=draft.config, tensors=tensors, training=training)
    for finding in lint_pair(target, weights, context=data.draw(st.none() | st.integers(1, 5000))):
        assert finding.rule in Rule

"""The same requests as vLLM refuses under speculation."""

import json

import pytest

from appliance.infra.json_members import parse_members
from appliance.serving.target_only import refused_under_speculation


@pytest.mark.parametrize(
    ("body", "parameter"),
    [
        ('{"min_p": 0.1}', "min_p"),
        ('{"min_p": 1}', "min_p"),
        ('{"min_p": "0.1"}', "min_p"),
        ('{"min_p": 0.00002}', "min_p"),
        ('{"min_p": 0.1, "temperature": 0.5}', "min_p"),
        ('{"min_p": 0.1, "temperature": null}', "min_p"),
        ('{"logit_bias": {"5": 1}}', "logit_bias"),
        ('{"logit_bias": {"5": 0}, "temperature": 0}', "logit_bias"),
        ('{"logit_bias": {"5": 1}, "min_p": 0.1}', "logit_bias"),
    ],
)
def test_parameters_refused_under_speculation_are_recognised(body: str, parameter: str):
    """`min_p` that has an effect, and any bias."""
    assert refused_under_speculation(parse_members(body)) == parameter


@pytest.mark.parametrize(
    "body",
    [
        {}, {"min_p": None}, {"min_p": 0}, {"min_p": 0.0}, {"min_p": 1e-5}, {"logit_bias": None},
        {"logit_bias": {}}, {"min_p": 0.1, "temperature": 0}, {"min_p": 0.1, "temperature": 1e-6},
        {"min_p": 0.1, "temperature": "0"}, {"top_p": 0.5, "seed": 1, "bad_words": ["x"]},
    ],
)  # fmt: skip
def test_other_parameters_may_go_to_a_speculating_worker(body: dict):
    """Without effect is without harm: greedy sampling never looks at `min_p`."""
    assert refused_under_speculation(parse_members(json.dumps(body))) is None


@pytest.mark.parametrize("value", ["x", [0.1], {"a": 1}, "nan", -1, True])
def test_value_of_the_wrong_type_is_left_to_the_worker(value: object):
    """Every worker reports such an error itself; nothing fails here."""
    members = parse_members(json.dumps({"min_p": value, "logit_bias": value if value != {"a": 1} else 5}))
    assert refused_under_speculation(members) == ("min_p" if value is True else None)


def test_number_too_large_for_a_float_is_ignored():
    """A client controls every digit."""
    assert refused_under_speculation(parse_members('{"min_p": 1' + "0" * 400 + "}")) is None

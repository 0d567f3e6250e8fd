"""Validation errors of files that people write, in words for who does not know Python."""

import re

from pydantic_core import ErrorDetails

LIST = "should be a list"
SECTION = "should be a section with named values"
EXPECTED = {
    "tuple_type": LIST,
    "list_type": LIST,
    "set_type": LIST,
    "frozen_set_type": LIST,
    "dict_type": SECTION,
    "mapping_type": SECTION,
    "model_type": SECTION,
    "model_attributes_type": SECTION,
    "string_type": "should be text",
    "bool_type": "should be true or false",
    "bool_parsing": "should be true or false",
    "int_type": "should be a whole number",
    "int_parsing": "should be a whole number",
    "int_from_float": "should be a whole number",
    "float_type": "should be a number",
    "float_parsing": "should be a number",
    "path_type": "should be a path",
    "missing": "is missing",
}
"""By pydantic's type of error."""
SUBJECT = re.compile(r"^(?:Value error, |(?:Input|String|Tuple|List|Dictionary) (?=should ))")


def what_is_expected(problem: ErrorDetails) -> str:
    """One line, to follow the name of the value."""
    if (words := EXPECTED.get(problem["type"])) is not None:
        return words
    # Some messages hold the value, which may have line ends.
    return SUBJECT.sub("", " ".join(str(problem["msg"]).replace(" after validation", "").split()))

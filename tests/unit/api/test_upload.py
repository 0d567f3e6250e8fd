"""Upload forms are parsed in pieces of any size, and malformed ones refused."""

import pytest

from appliance.api.upload import MAX_FIELD_BYTES, MAX_PARTS, UploadForm
from appliance.errors import InvalidRequestError

TYPE = "multipart/form-data; boundary=cut"
CONTENT = b'{"a": 1}\r\n--cu\r\n--cutter\n' + bytes(range(256))


def part(name, value, filename=None):
    named = f'; filename="{filename}"' if filename is not None else ""
    head = f'--cut\r\nContent-Disposition: form-data; name="{name}"{named}\r\nContent-Type: x/y\r\n\r\n'
    return head.encode() + value + b"\r\n"


def form(*parts):
    return b"".join(parts) + b"--cut--\r\n"


def read(body, step=1_000_000, content_type=TYPE):
    upload = UploadForm(content_type)
    found = b"".join(upload.feed(body[start : start + step]) for start in range(0, len(body), step))
    upload.end()
    return upload, found


WHOLE = form(part("purpose", b"batch"), part("file", CONTENT, "in.jsonl"), part("later", b"x"))


@pytest.mark.parametrize("step", [1, 2, 7, 64, 10_000])
def test_a_file_is_read_byte_for_byte(step):
    """Also if it contains what looks like the end of a part."""
    upload, found = read(WHOLE, step)
    assert found == CONTENT
    assert upload.filename == "in.jsonl"
    assert upload.fields == {"purpose": "batch", "later": "x"}


def test_an_empty_file_is_accepted():
    """Its reader reports the error."""
    upload, found = read(form(part("file", b"", "x")))
    assert (upload.filename, found) == ("x", b"")


@pytest.mark.parametrize("end", range(1, len(WHOLE) - 4, 23))
def test_a_truncated_form_is_refused(end):
    """Half a file must not pass for a whole one."""
    with pytest.raises(InvalidRequestError):
        read(WHOLE[:end])


@pytest.mark.parametrize(
    ("body", "param"),
    [
        (form(part("purpose", b"batch")), "file"),
        (form(part("file", b"not a file")), "file"),
        (form(part("file", b"a", "a"), part("file", b"b", "b")), "file"),
        (form(part("file", b"a", "a"), part("purpose", b"x" * (MAX_FIELD_BYTES + 1))), None),
        (form(*(part(str(number), b"") for number in range(MAX_PARTS + 1))), None),
        (form(b"--cut\r\n" + b"X-Long: " + b"x" * 100_000 + b"\r\n\r\n\r\n"), None),
        (b"no form at all", None),
    ],
)
def test_a_malformed_or_oversized_form_is_refused(body, param):
    """Parts, fields and headers are bounded; there is exactly one file."""
    with pytest.raises(InvalidRequestError) as caught:
        read(body)
    assert caught.value.param == param


@pytest.mark.parametrize(
    "content_type",
    ["", "application/json", "multipart/form-data", "multipart/form-data; boundary=" + "x" * 300],
)
def test_another_content_type_is_refused_before_the_body_is_read(content_type):
    with pytest.raises(InvalidRequestError):
        UploadForm(content_type)

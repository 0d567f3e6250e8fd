"""
A form with one file (multipart/form-data, RFC 7578), read as it comes: the file is never whole in memory.
"""

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

from appliance.errors import InvalidRequestError

LONGEST_FIELD = 1024
"""Bytes of a field that is not the file."""
MOST_PARTS = 16
FILE = "file"


class UploadForm:
    """
    The form, piece by piece: what `feed` returns is of the file, fields are collected.

    Every method raises InvalidRequestError at a form that is malformed or larger than it may be.
    """

    def __init__(self, content_type: str) -> None:
        kind, options = parse_options_header(content_type)
        if kind != b"multipart/form-data" or b"boundary" not in options:
            raise InvalidRequestError("Send the file as multipart/form-data.", code="invalid_form")
        self.fields: dict[str, str] = {}
        self.filename: str | None = None
        """Name of the file as the client gave it; None until its part has come."""
        self._name = ""
        self._header = b""
        self._value = b""
        self._disposition = b""
        self._parts = 0
        self._field = bytearray()
        self._file: list[bytes] = []
        self._is_whole = False
        try:
            self._parser = MultipartParser(
                options[b"boundary"],
                {
                    "on_part_begin": self._begin_part,
                    "on_part_data": self._see_data,
                    "on_part_end": self._end_part,
                    "on_header_field": self._see_header,
                    "on_header_value": self._see_value,
                    "on_header_end": self._end_header,
                    "on_headers_finished": self._end_headers,
                    "on_end": self._end_form,
                },
            )
        except FormParserError as error:
            raise _malformed() from error

    def feed(self, data: bytes) -> bytes:
        """Read part of the body; return the bytes of the file in it."""
        try:
            self._parser.write(data)
        except FormParserError as error:
            raise _malformed() from error
        found, self._file = b"".join(self._file), []
        return found

    def end(self) -> None:
        """Check that the form was whole, and had a file."""
        if not self._is_whole:
            raise _malformed()
        if self.filename is None:
            raise InvalidRequestError(
                "`file` is missing, or is no file.", param=FILE, code="missing_required_parameter"
            )

    def _begin_part(self) -> None:
        self._parts += 1
        if self._parts > MOST_PARTS:
            raise _malformed()
        self._name, self._disposition = "", b""
        self._field.clear()

    def _see_header(self, data: bytes, start: int, end: int) -> None:
        self._header += data[start:end]

    def _see_value(self, data: bytes, start: int, end: int) -> None:
        self._value += data[start:end]

    def _end_header(self) -> None:
        if self._header.lower() == b"content-disposition":
            self._disposition = self._value
        self._header = self._value = b""

    def _end_headers(self) -> None:
        _, options = parse_options_header(self._disposition)
        self._name = options.get(b"name", b"").decode("utf-8", "replace")
        if self._name == FILE:
            if self.filename is not None or b"filename" not in options:
                raise InvalidRequestError("`file` must be one file.", param=FILE, code="invalid_form")
            self.filename = options[b"filename"].decode("utf-8", "replace")

    def _see_data(self, data: bytes, start: int, end: int) -> None:
        if self._name == FILE:
            self._file.append(data[start:end])
            return
        self._field += data[start:end]
        if len(self._field) > LONGEST_FIELD:
            message = f"A field of the form has more than {LONGEST_FIELD} bytes."
            raise InvalidRequestError(message, code="invalid_form")

    def _end_part(self) -> None:
        if self._name != FILE:
            self.fields[self._name] = self._field.decode("utf-8", "replace")

    def _end_form(self) -> None:
        self._is_whole = True


def _malformed() -> InvalidRequestError:
    message = "The form is not multipart/form-data, was cut off, or has too many parts."
    return InvalidRequestError(message, code="invalid_form")

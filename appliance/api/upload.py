"""Parses a form with one file (multipart/form-data, RFC 7578) without holding the file in memory."""

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

from appliance.errors import InvalidRequestError

MAX_FIELD_BYTES = 1024
"""Of a field that is not the file."""
MAX_PARTS = 16
FILE = "file"


class UploadForm:
    """The parser of one form; every method raises InvalidRequestError if it is malformed or too large."""

    def __init__(self, content_type: str) -> None:
        kind, options = parse_options_header(content_type)
        if kind != b"multipart/form-data" or b"boundary" not in options:
            raise InvalidRequestError("Send the file as multipart/form-data.", code="invalid_form")
        self.fields: dict[str, str] = {}
        self.filename: str | None = None
        """The client's name of the file; None until its part has arrived."""
        self._name = ""
        self._header = b""
        self._value = b""
        self._disposition = b""
        self._parts = 0
        self._field = bytearray()
        self._file: list[bytes] = []
        self._is_complete = False
        try:
            self._parser = MultipartParser(
                options[b"boundary"],
                {
                    "on_part_begin": self._begin_part,
                    "on_part_data": self._on_data,
                    "on_part_end": self._end_part,
                    "on_header_field": self._on_header_name,
                    "on_header_value": self._on_header_value,
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
        """Check that the form is complete and has a file."""
        if not self._is_complete:
            raise _malformed()
        if self.filename is None:
            raise InvalidRequestError(
                "`file` is missing or is not a file.", param=FILE, code="missing_required_parameter"
            )

    def _begin_part(self) -> None:
        self._parts += 1
        if self._parts > MAX_PARTS:
            raise _malformed()
        self._name, self._disposition = "", b""
        self._field.clear()

    def _on_header_name(self, data: bytes, start: int, end: int) -> None:
        self._header += data[start:end]

    def _on_header_value(self, data: bytes, start: int, end: int) -> None:
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

    def _on_data(self, data: bytes, start: int, end: int) -> None:
        if self._name == FILE:
            self._file.append(data[start:end])
            return
        self._field += data[start:end]
        if len(self._field) > MAX_FIELD_BYTES:
            message = f"A field of the form has more than {MAX_FIELD_BYTES} bytes."
            raise InvalidRequestError(message, code="invalid_form")

    def _end_part(self) -> None:
        if self._name != FILE:
            self.fields[self._name] = self._field.decode("utf-8", "replace")

    def _end_form(self) -> None:
        self._is_complete = True


def _malformed() -> InvalidRequestError:
    message = "The form is not multipart/form-data, is incomplete, or has too many parts."
    return InvalidRequestError(message, code="invalid_form")

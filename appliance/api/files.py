"""OpenAI's files API, for the input and output files of batches."""

import asyncio
from collections.abc import AsyncIterator
from typing import Annotated, Any

from fastapi import APIRouter, Depends
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from appliance.api.auth import TenantCaller
from appliance.api.paging import page, parse_window
from appliance.api.services import Services
from appliance.api.upload import UploadForm
from appliance.errors import InvalidRequestError, RequestTooSlowError, RouteNotFoundError
from appliance.gateway.batch.batch import FilePurpose, StoredFile, clean_filename
from appliance.gateway.batch.files import TenantFiles, Upload
from appliance.gateway.batch.request import parse_expiry
from appliance.tenancy import Caller

PATH = "/v1/files"
MOST_FILES, USUAL_FILES = 10_000, 10_000

router = APIRouter()


async def storage_caller(request: Request, caller: TenantCaller) -> AsyncIterator[Caller]:
    """The tenant's caller, in one of the tenant's slots until the answer is sent; raises AtCapacityError."""
    services: Services = request.app.state.services
    with services.storage_slots.taken(caller.tenant.name):
        yield caller


StorageCaller = Annotated[Caller, Depends(storage_caller)]


@router.post(PATH)
async def upload(request: Request, caller: StorageCaller) -> Response:
    """Upload a file."""
    files = _files(request)
    form = UploadForm(request.headers.get("content-type", ""))
    length = request.headers.get("content-length", "")
    body_bytes = int(length) if length.isascii() and length.isdigit() else None  # `BodyLimit` bounds it
    async with files.receive(caller, body_bytes) as incoming:
        try:
            async with asyncio.timeout(files.upload_seconds):
                async for data in request.stream():
                    if found := form.feed(data):
                        await incoming.write(found)
        except TimeoutError as error:
            most = f"{files.upload_seconds:g} seconds"
            raise RequestTooSlowError(f"An upload may take {most}. Send a smaller file.") from error
        form.end()
        return JSONResponse(show_file(await files.keep(incoming, _read_upload(form))))


@router.get(PATH)
async def list_files(request: Request, caller: StorageCaller) -> Response:
    """The tenant's files, newest first by default."""
    window = parse_window(request, usual=USUAL_FILES, most=MOST_FILES)
    purpose = request.query_params.get("purpose")
    return page(await _files(request).list(caller.tenant.name, window, purpose), window, show_file)


@router.get(f"{PATH}/{{file_id}}")
async def get_file(request: Request, file_id: str, caller: StorageCaller) -> Response:
    """One file."""
    return JSONResponse(show_file(await _files(request).get(caller.tenant.name, file_id)))


@router.get(f"{PATH}/{{file_id}}/content")
async def get_content(request: Request, file_id: str, caller: StorageCaller) -> Response:
    """The content of a file."""
    files = _files(request)
    stored = await files.get(caller.tenant.name, file_id)
    pieces = files.read(stored)
    # An unreadable file fails at its first piece, while the status can still carry the error.
    first = await anext(pieces, b"")

    async def content() -> AsyncIterator[bytes]:
        yield first
        async for piece in pieces:
            yield piece

    headers = {"content-length": str(stored.size), "cache-control": "no-store"}
    return StreamingResponse(content(), media_type="application/octet-stream", headers=headers)


@router.delete(f"{PATH}/{{file_id}}")
async def delete_file(request: Request, file_id: str, caller: StorageCaller) -> Response:
    """Delete a file."""
    await _files(request).delete(caller, file_id)
    return JSONResponse({"id": file_id, "object": "file", "deleted": True})


def show_file(stored: StoredFile) -> dict[str, Any]:
    return {
        "id": stored.file_id,
        "object": "file",
        "bytes": stored.size,
        "created_at": stored.created_at,
        "expires_at": stored.expires_at,
        "filename": stored.filename,
        "purpose": str(stored.purpose),
        "status": "processed",
        "status_details": None,
    }


def _read_upload(form: UploadForm) -> Upload:
    if form.fields.get("purpose") != FilePurpose.BATCH:
        raise InvalidRequestError(
            "`purpose` must be `batch`: this gateway stores no other files.", param="purpose"
        )
    anchor = form.fields.get("expires_after[anchor]")
    seconds = form.fields.get("expires_after[seconds]")
    expiry = None
    if anchor is not None or seconds is not None:
        number = int(seconds) if seconds and seconds.isascii() and seconds.isdigit() else seconds
        expiry = {"anchor": anchor, "seconds": number}
    return Upload(
        filename=clean_filename(form.filename or ""),
        purpose=FilePurpose.BATCH,
        kept_seconds=parse_expiry(expiry, "expires_after"),
    )


def _files(request: Request) -> TenantFiles:
    services: Services = request.app.state.services
    if services.files is None:
        raise RouteNotFoundError("This gateway stores no files.")
    return services.files

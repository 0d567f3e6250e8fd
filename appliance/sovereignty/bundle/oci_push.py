"""
Push the images and charts of a bundle to a container registry, by the OCI distribution API.

Blobs that the registry has are not sent again, so an interrupted push resumes.  The registry checks every
digest; the digest of a tag is read back afterwards.

Source: github.com/opencontainers/distribution-spec v1.1.
"""

import asyncio
import base64
import ssl
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from http import HTTPStatus
from urllib.parse import urljoin

import aiohttp
from yarl import URL

from appliance.errors import BundleStorageError
from appliance.sovereignty.bundle.bundle_verifier import Bundle
from appliance.sovereignty.bundle.manifest import BundleFile
from appliance.sovereignty.bundle.references import repository_of
from appliance.sovereignty.bundle.source import CountBytes
from appliance.sovereignty.bundle.tree import ItemTree

PATIENCE_SECONDS = 600.0
"""Maximum silence of a registry; a layer may take any time."""
DIGEST_HEADER = "Docker-Content-Digest"


@dataclass(frozen=True, slots=True, kw_only=True)
class Registry:
    url: str
    """`https://registry.example:5000/prefix`; everything is pushed below the prefix."""
    credentials: tuple[str, str] | None
    """User name and password."""
    tls: ssl.SSLContext | None
    """Verifies its certificate; None for plain HTTP."""

    def push(self, tree: ItemTree, bundle: Bundle, counted: CountBytes) -> bool:
        """Push one item unless it is present under its tag, and say whether; raises BundleStorageError."""
        try:
            return asyncio.run(self._push(tree, bundle, counted))
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            reason = str(error) or type(error).__name__
            raise BundleStorageError(f"cannot push {tree.item.label} to {self.url}: {reason}") from error

    async def _push(self, tree: ItemTree, bundle: Bundle, counted: CountBytes) -> bool:
        repository, tag = repository_of(tree.item)
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=PATIENCE_SECONDS, sock_read=PATIENCE_SECONDS)
        headers = {} if self.credentials is None else {"Authorization": _basic(*self.credentials)}
        connector = aiohttp.TCPConnector(ssl=True if self.tls is None else self.tls)
        # Proxies of the environment are not used: the registry is on the site.
        async with aiohttp.ClientSession(
            headers=headers, timeout=timeout, connector=connector, trust_env=False
        ) as session:
            sender = _Sender(session, self._repository(repository), bundle, counted)
            root = tree.documents[-1]
            if await sender.found(tag, root) == tree.item.digest:
                return False
            for file in tree.blobs:
                await sender.blob(file)
            for file in tree.documents[:-1]:
                await sender.document(file, f"sha256:{file.sha256}")
            await sender.document(root, tag)
            if (found := await sender.found(tag, root)) != tree.item.digest:
                raise BundleStorageError(
                    f"the registry has {found} as {tree.item.label}, and was sent {tree.item.digest}"
                )
            return True

    def _repository(self, name: str) -> str:
        base = URL(self.url)
        prefix = base.path.strip("/")
        path = f"/v2/{prefix}/{name}/" if prefix else f"/v2/{name}/"
        return str(base.with_path(path))


class _Sender:
    """One repository of a registry."""

    def __init__(
        self, session: aiohttp.ClientSession, base: str, bundle: Bundle, counted: CountBytes
    ) -> None:
        self._session = session
        self._base = base
        self._bundle, self._counted = bundle, counted

    async def blob(self, file: BundleFile) -> None:
        digest = f"sha256:{file.sha256}"
        async with self._session.head(f"{self._base}blobs/{digest}", allow_redirects=False) as answer:
            if answer.status == HTTPStatus.OK:
                return
        async with self._session.post(
            f"{self._base}blobs/uploads/", data=b"", allow_redirects=False
        ) as answer:
            await _expect(answer, HTTPStatus.ACCEPTED, f"an upload of {digest}")
            location = _upload(answer)
        target = location.update_query(digest=digest)
        headers = {"Content-Length": str(file.size), "Content-Type": "application/octet-stream"}
        body = _flow(self._counted(self._bundle.chunks(file))) if file.size else b""
        async with self._session.put(target, data=body, headers=headers, allow_redirects=False) as answer:
            await _expect(answer, HTTPStatus.CREATED, digest)

    async def document(self, file: BundleFile, name: str) -> None:
        content = self._bundle.read(file)
        headers = {"Content-Type": file.media_type}
        async with self._session.put(
            f"{self._base}manifests/{name}", data=content, headers=headers, allow_redirects=False
        ) as answer:
            await _expect(answer, HTTPStatus.CREATED, f"the manifest {file.sha256}")

    async def found(self, tag: str, file: BundleFile) -> str | None:
        """Digest of a tag; None if there is no such tag."""
        # A registry may convert the manifest unless this media type is requested.
        headers = {"Accept": file.media_type}
        async with self._session.head(
            f"{self._base}manifests/{tag}", headers=headers, allow_redirects=False
        ) as answer:
            if answer.status == HTTPStatus.UNAUTHORIZED:
                raise BundleStorageError(
                    f"the registry at {answer.url.origin()} requires a user name and password"
                )
            return answer.headers.get(DIGEST_HEADER) if answer.status == HTTPStatus.OK else None


def _basic(name: str, password: str) -> str:
    """The header of RFC 7617."""
    return f"Basic {base64.b64encode(f'{name}:{password}'.encode()).decode()}"


async def _flow(chunks: Iterator[bytes]) -> AsyncIterator[bytes]:
    for chunk in chunks:
        yield chunk


def _upload(answer: aiohttp.ClientResponse) -> URL:
    """The upload URL that a registry returned for a blob."""
    home, header = answer.url.origin(), answer.headers.get("Location", "")
    try:
        location = URL(urljoin(str(answer.url), header), encoded=True)
        target = location.origin()
    except ValueError as error:
        raise BundleStorageError(f"the registry at {home} returned no upload URL") from error
    if not header:
        raise BundleStorageError(f"the registry at {home} returned no upload URL")
    if target != home:
        # The credentials of this registry must not be sent to another host.
        raise BundleStorageError(f"the registry at {home} redirects uploads to {target}")
    return location


async def _expect(answer: aiohttp.ClientResponse, status: HTTPStatus, what: str) -> None:
    if answer.status != status:
        text = " ".join((await answer.text())[:200].split())
        raise BundleStorageError(f"the registry refused {what}: {answer.status} {text}")

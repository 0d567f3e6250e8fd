"""
Images and charts of a bundle into a container registry, by the OCI distribution API.

Blobs that the registry has are not sent again, so a push that was cut off goes on.  The registry
checks every digest it is sent; what a tag points to is asked for afterwards.

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
from appliance.sovereignty.bundle.manifest import BundleFile
from appliance.sovereignty.bundle.references import repository_of
from appliance.sovereignty.bundle.tree import Tree
from appliance.sovereignty.bundle.verify import Bundle

PATIENCE_SECONDS = 600.0
"""How long a registry may be silent; a layer of any size may take as long as it takes."""
DIGEST_HEADER = "Docker-Content-Digest"


@dataclass(frozen=True, slots=True, kw_only=True)
class Registry:
    """A registry to push to."""

    url: str
    """`https://registry.example:5000/prefix`; everything goes below the prefix."""
    credentials: tuple[str, str] | None
    """Name and password."""
    tls: ssl.SSLContext | None
    """What its certificate is checked with; None for plain HTTP."""

    def push(self, tree: Tree, bundle: Bundle) -> bool:
        """
        Push one item under its own name and tag unless it is there, and return whether it had to be.

        Raises:
            BundleStorageError: the registry cannot be reached, or refuses it.
        """
        try:
            return asyncio.run(self._push(tree, bundle))
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            reason = str(error) or type(error).__name__
            raise BundleStorageError(f"cannot push {tree.item.label} to {self.url}: {reason}") from error

    async def _push(self, tree: Tree, bundle: Bundle) -> bool:
        repository, tag = repository_of(tree.item)
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=PATIENCE_SECONDS, sock_read=PATIENCE_SECONDS)
        headers = {} if self.credentials is None else {"Authorization": _basic(*self.credentials)}
        connector = aiohttp.TCPConnector(ssl=True if self.tls is None else self.tls)
        # Proxies of the environment are not asked: the registry is in the building.
        async with aiohttp.ClientSession(
            headers=headers, timeout=timeout, connector=connector, trust_env=False
        ) as session:
            sender = _Sender(session, self._repository(repository), bundle)
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
                    f"the registry has {found} as {tree.item.label}, and was given {tree.item.digest}"
                )
            return True

    def _repository(self, name: str) -> str:
        base = URL(self.url)
        prefix = base.path.strip("/")
        path = f"/v2/{prefix}/{name}/" if prefix else f"/v2/{name}/"
        return str(base.with_path(path))


class _Sender:
    """One repository of a registry."""

    def __init__(self, session: aiohttp.ClientSession, base: str, bundle: Bundle) -> None:
        self._session = session
        self._base = base
        self._bundle = bundle

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
        body = _flow(self._bundle.chunks(file)) if file.size else b""
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
        """Digest of what a tag points to; None where there is no such tag."""
        # A registry answers with another form of the manifest unless asked for this one.
        headers = {"Accept": file.media_type}
        async with self._session.head(
            f"{self._base}manifests/{tag}", headers=headers, allow_redirects=False
        ) as answer:
            if answer.status == HTTPStatus.UNAUTHORIZED:
                raise BundleStorageError(
                    f"the registry at {answer.url.origin()} asks for a name and password"
                )
            return answer.headers.get(DIGEST_HEADER) if answer.status == HTTPStatus.OK else None


def _basic(name: str, password: str) -> str:
    """The header of RFC 7617."""
    return f"Basic {base64.b64encode(f'{name}:{password}'.encode()).decode()}"


async def _flow(chunks: Iterator[bytes]) -> AsyncIterator[bytes]:
    for chunk in chunks:
        yield chunk


def _upload(answer: aiohttp.ClientResponse) -> URL:
    """Where a registry wants a blob to be sent."""
    home, said = answer.url.origin(), answer.headers.get("Location", "")
    try:
        location = URL(urljoin(str(answer.url), said), encoded=True)
        elsewhere = location.origin()
    except ValueError as error:
        raise BundleStorageError(f"the registry at {home} does not say where uploads go") from error
    if not said:
        raise BundleStorageError(f"the registry at {home} does not say where uploads go")
    if elsewhere != home:
        # The name and password of this registry are for this registry.
        raise BundleStorageError(f"the registry at {home} sends uploads to {elsewhere}")
    return location


async def _expect(answer: aiohttp.ClientResponse, status: HTTPStatus, what: str) -> None:
    if answer.status != status:
        said = " ".join((await answer.text())[:200].split())
        raise BundleStorageError(f"the registry did not take {what}: {answer.status} {said}")

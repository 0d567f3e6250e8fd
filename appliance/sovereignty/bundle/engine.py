"""Load images into a container engine, by `docker load` of a `docker save` stream made from the blobs."""

import json
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

from appliance.errors import BundleStorageError
from appliance.infra.canonical_json import canonical
from appliance.sovereignty.bundle.archive import END, padding, tar_header
from appliance.sovereignty.bundle.bundle_verifier import Bundle
from appliance.sovereignty.bundle.manifest import BundleFile
from appliance.sovereignty.bundle.oci import parse_image_config
from appliance.sovereignty.bundle.source import CountBytes
from appliance.sovereignty.bundle.tree import ItemTree, PlatformImage

ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}
"""OCI's architecture names by the kernel's."""
RUN = ("Cmd", "Entrypoint", "Env", "User", "WorkingDir")
"""Members of an image's configuration, besides its layers, that every engine reports unchanged."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Engine:
    command: Sequence[str]
    """`docker`, or a command with the same arguments."""
    machine: str
    """The kernel's name of this machine's architecture."""

    def load(self, tree: ItemTree, bundle: Bundle, counted: CountBytes) -> bool:
        """Load one image unless it is present, and say whether; raises BundleStorageError."""
        reference = tree.item.reference or tree.item.label
        image = self.choose(tree)
        layers, config = parse_image_config(bundle.read(image.config), reference)
        # Not compared by the image's id: some engines assign their own.
        if self._found(reference) == (layers, _run(config)):
            return False
        self._feed(reference, counted(saved_form(image, reference, bundle)))
        if self._found(reference)[0] != layers:
            raise BundleStorageError(f"{self.command[0]} has a different image as {reference} after the load")
        return True

    def choose(self, tree: ItemTree) -> PlatformImage:
        """The image for this machine; raises BundleStorageError if there is none."""
        wanted = ARCHITECTURES.get(self.machine, self.machine)
        for image in tree.images:
            if image.platform is None or image.platform.architecture in {"", wanted}:
                return image
        raise BundleStorageError(f"{tree.item.label} is not for this machine ({wanted})")

    def _feed(self, reference: str, pieces: Iterator[bytes]) -> None:
        try:
            process = subprocess.Popen(  # noqa: S603 - the operator's own command
                [*self.command, "load"],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
            )
        except OSError as error:
            raise BundleStorageError(f"cannot run {self.command[0]}: {error.strerror}") from error
        with process:
            assert process.stdin is not None  # noqa: S101 - asked for above
            assert process.stderr is not None  # noqa: S101 - asked for above
            try:
                # An engine that fails closes the pipe; the reason is on its standard error.
                with suppress(BrokenPipeError):
                    for piece in pieces:
                        process.stdin.write(piece)
                with suppress(BrokenPipeError):
                    process.stdin.close()
            except BaseException:
                process.kill()
                raise
            complaint = process.stderr.read().decode(errors="replace")
        if process.returncode:
            raise BundleStorageError(f"{self.command[0]} did not load {reference}: {_last_line(complaint)}")

    def _found(self, reference: str) -> tuple[object, object]:
        """Layers and run configuration of an image in the engine; (None, None) if it has no such image."""
        form = "[{{json .RootFS.Layers}},{{json .Config}}]"
        try:
            found = subprocess.run(  # noqa: S603 - the operator's own command
                [*self.command, "image", "inspect", "--format", form, reference],
                capture_output=True,
                check=False,
            )
            if found.returncode != 0:
                return None, None
            layers, config = json.loads(found.stdout)
            return layers, _run(config or {})
        except (OSError, ValueError) as error:
            raise BundleStorageError(f"cannot list the images of {self.command[0]}: {error}") from error


def saved_form(image: PlatformImage, reference: str, bundle: Bundle) -> Iterator[bytes]:
    """
    Yield an image in the format of `docker save`, which every engine reads.

    Layers are read from the medium again, and the engine compares them with the configuration; the
    configuration is compared with the manifest here, since the medium may have changed.
    """
    layers = {file.path: file for file in image.layers}
    config = f"{image.config.sha256}.json"
    listed = [{"Config": config, "RepoTags": [reference], "Layers": [_layer(file) for file in image.layers]}]
    for name, content in (("manifest.json", canonical(listed)), (config, bundle.read(image.config))):
        yield tar_header(name, len(content)) + content + padding(len(content))
    for file in layers.values():
        yield tar_header(_layer(file), file.size)
        yield from bundle.chunks(file)
        yield padding(file.size)
    yield END


def _run(config: Mapping[str, object]) -> dict[str, object]:
    """The run configuration; empty and absent members are equal."""
    return {name: config.get(name) or None for name in RUN}


def _layer(file: BundleFile) -> str:
    return f"{file.sha256}/layer.tar"


def _last_line(text: str) -> str:
    return (text.strip().splitlines() or ["no message"])[-1]

"""
The drafts a site may put into service: found by digest, checked before they are used.

Fails closed: a draft whose signature or bytes are wrong is none, and the message says which of the two.
One that is damaged does not keep the others from being used.
"""

from collections.abc import Callable
from pathlib import Path

from appliance.audit.checkpoint import NoteSigner
from appliance.audit.entry import format_time
from appliance.drafts.registry.origin import Origin
from appliance.drafts.registry.revision import REVISION, SIGNATURE, SIGNED, Revision, Source
from appliance.drafts.registry.shelf import ORIGIN, ORIGIN_SIGNATURE, Shelf
from appliance.drafts.registry.source import DraftSource, read_source
from appliance.errors import (
    BundleRefusedError,
    ConfigurationError,
    DraftNotFoundError,
    DraftRefusedError,
)
from appliance.serving.weights import digest_weights
from appliance.sovereignty.bundle.trust import TrustedKey

SHORT = 12
"""Hex digits that people are shown of a digest."""

Clock = Callable[[], float]
"""Seconds since the epoch."""


class DraftRegistry:
    """The drafts below one directory."""

    def __init__(self, directory: Path, *, trusted: tuple[TrustedKey, ...], clock: Clock) -> None:
        """
        Prepare; nothing is read or made yet.

        Args:
            directory: of the life of drafts; revisions lie below it.
            trusted: whose word on a draft counts.
            clock: tells whether a key still counts.
        """
        self.directory = directory
        """Of the life of drafts: data sets, training runs and evaluations lie below it as well."""
        self.trusted = trusted
        """Whose word on a draft counts."""
        self._shelf = Shelf(directory)
        self._clock = clock

    def revisions(self) -> tuple[Revision, ...]:
        """
        Return every registered draft whose signature is right, oldest first.

        Raises:
            DraftStorageError: the directory cannot be read.
        """
        found, _complaints = self.survey()
        return found

    def survey(self) -> tuple[tuple[Revision, ...], tuple[str, ...]]:
        """
        Return the drafts whose signature is right, oldest first, and a line for each that is not.

        The weights themselves are not read.

        Raises:
            DraftStorageError: the directory cannot be read.
        """
        found: list[Revision] = []
        complaints: list[str] = []
        for name in self._shelf.names():
            try:
                found.append(self._read(name))
            except DraftRefusedError as error:
                complaints.append(str(error))
        return tuple(sorted(found, key=lambda each: (each.made, each.digest))), tuple(complaints)

    def find(self, name: str) -> Revision:
        """
        Return the draft with a digest, or with the only one that begins so.

        Args:
            name: `sha256:` and hex digits or the digits alone; as many as tell it from the others.

        Raises:
            DraftNotFoundError: there is none, or several.
            DraftRefusedError: its signature is wrong.
            DraftStorageError: the directory cannot be read.
        """
        digits = name.strip().lower().removeprefix("sha256:")
        names = [known for known in self._shelf.names() if digits and known.startswith(digits)]
        if not names:
            raise DraftNotFoundError(f"no draft {name!r} is registered: `appliance draft list` shows all")
        if len(names) > 1:
            raise DraftNotFoundError(f"{len(names)} drafts begin with {name!r}: give more of its digits")
        return self._read(names[0])

    def weights(self, revision: Revision) -> Path:
        """
        Return the directory of a draft's weights, after all of them have been read and found right.

        Raises:
            DraftRefusedError: they are not what was registered.
        """
        path = self._shelf.weights(revision.hex)
        try:
            digest = digest_weights(path)
        except (ConfigurationError, OSError, UnicodeError) as error:
            raise DraftRefusedError(
                f"the draft in {path} cannot be read ({error}): import it again"
            ) from error
        if digest != revision.digest:
            raise DraftRefusedError(
                f"the draft in {path} is not what was registered (its files digest to {digest}): import it "
                "again"
            )
        return path

    def add(self, source: Path, *, target: str, how: Source, signer: NoteSigner) -> Revision:
        """
        Register the draft in a directory, by copying it; it is linted nowhere here.

        The same draft is registered once: adding it again changes nothing, but puts right what a disk lost.
        Killed at any point it leaves the registry as it was, and adding it again goes on from there.

        Args:
            source: directory with config, weights and, if there is one, `training.json`.
            target: digest of the target it is for.
            how: whether it was made here.
            signer: the site's key; it is trusted by this registry from now on.

        Raises:
            DraftNotFoundError: there is no such directory.
            DraftRefusedError: it holds no whole draft, or one that is for another target.
            DraftStorageError: it cannot be written.
        """
        return self.register(read_source(source), target=target, how=how, signer=signer)

    def register(
        self,
        source: DraftSource,
        *,
        target: str,
        how: Source,
        signer: NoteSigner,
        origin: Origin | None = None,
    ) -> Revision:
        """
        Register a draft that has been read; see `add`.

        Args:
            source: the draft as it was found.
            target: digest of the target it is for.
            how: whether it was made here.
            signer: the site's key; it is trusted by this registry from now on.
            origin: what somebody else had said of it and signed; kept beside it.

        Raises:
            DraftRefusedError: it is for another target, or changed while it was copied.
            DraftStorageError: it cannot be written.
        """
        self._trust(signer)
        revision = self._describe(source, target=target, how=how, origin=origin)
        page = revision.encode()
        pages = {REVISION: page, SIGNATURE: SIGNED.sign(page, signer)}
        if origin is not None:
            pages |= {ORIGIN: origin.page, ORIGIN_SIGNATURE: origin.note}
        with self._shelf.alone():
            known = self._known(revision)
            if known is not None:
                if self._is_whole(known):
                    return known
                # Only files were lost: what was said of it, and when, stays.
                revision, pages = known, self._shelf.pages(known.hex)
            self._shelf.put(source, pages)
        return revision

    def registered(self, source: DraftSource, *, target: str) -> Revision | None:
        """
        Return the revision of a draft that is registered and undamaged; None where `register` would write.

        Raises:
            DraftRefusedError: it is registered for another target, or was made for another one.
            DraftStorageError: there is no room to bring it in.
        """
        wanted = self._describe(source, target=target, how="imported", origin=None)
        wanted.encode()
        known = self._known(wanted)
        if known is not None and self._is_whole(known):
            return known
        self._shelf.check_room(source)
        return None

    def _describe(self, source: DraftSource, *, target: str, how: Source, origin: Origin | None) -> Revision:
        """What is to be said of a draft, unless it was made for another target."""
        made_for = source.record.target
        if made_for is not None and made_for != target:
            raise DraftRefusedError(
                f"the draft in {source.home} was trained for the target {made_for}, and this target is "
                f"{target}: name the right one, or train the draft anew"
            )
        return Revision(
            digest=source.digest,
            target=target,
            record=source.record,
            parent=source.record.parent,
            dataset=source.record.dataset,
            source=how,
            made=format_time(int(self._clock() * 1000)),
            origin=None if origin is None else origin.signer,
        )

    def _known(self, wanted: Revision) -> Revision | None:
        """What is registered under the same digest, if anybody trusted vouches for it."""
        try:
            known = self._read(wanted.hex)
        except DraftRefusedError:
            return None
        if known.target != wanted.target:
            raise DraftRefusedError(
                f"the draft {known.hex[:SHORT]} is registered for the target {known.target}, and cannot be "
                f"for {wanted.target} as well: a draft has one target"
            )
        return known

    def _is_whole(self, revision: Revision) -> bool:
        try:
            self.weights(revision)
        except DraftRefusedError:
            return False
        return True

    def _read(self, name: str) -> Revision:
        try:
            page = self._shelf.page(name, REVISION)
            SIGNED.verify(page, self._shelf.page(name, SIGNATURE), self.trusted, self._clock())
            revision = Revision.decode(page)
        except (BundleRefusedError, DraftRefusedError) as error:
            raise DraftRefusedError(f"the draft {name[:SHORT]} cannot be used: {error}") from error
        if revision.hex != name:
            raise DraftRefusedError(
                f"the draft {name[:SHORT]} cannot be used: its {REVISION} is that of {revision.digest}"
            )
        return revision

    def _trust(self, signer: NoteSigner) -> None:
        """Take the word of whoever may write here, also where the key was made just now."""
        if signer.verifier_key not in {key.verifier_key for key in self.trusted}:
            self.trusted = (*self.trusted, TrustedKey(verifier_key=signer.verifier_key))

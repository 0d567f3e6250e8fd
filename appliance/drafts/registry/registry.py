"""
The drafts a site may serve, found by digest and verified before use.

Fails closed: a draft with a wrong signature or wrong bytes is refused, and the message says which.  A
damaged draft does not affect the others.
"""

from collections.abc import Callable
from pathlib import Path

from appliance.audit.checkpoint import NoteSigner
from appliance.audit.entry import format_time
from appliance.drafts.registry.draft_source import DraftSource
from appliance.drafts.registry.revision import REVISION, SIGNATURE, SIGNED, Revision, Source
from appliance.drafts.registry.signed_origin import SignedOrigin
from appliance.drafts.registry.store import ORIGIN, ORIGIN_SIGNATURE, RevisionStore
from appliance.errors import (
    BundleRefusedError,
    ConfigurationError,
    DraftNotFoundError,
    DraftRefusedError,
)
from appliance.serving.weights import digest_weights
from appliance.sovereignty.bundle.signature import TrustedKey

SHORT = 12
"""Hex digits of a digest in output."""

Clock = Callable[[], float]
"""Seconds since the epoch."""


class DraftRegistry:
    def __init__(self, directory: Path, *, trusted: tuple[TrustedKey, ...], clock: Clock) -> None:
        self.directory = directory
        """Directory of all draft data: data sets, training runs and evaluations too."""
        self.trusted = trusted
        self._store = RevisionStore(directory)
        self._clock = clock

    def revisions(self) -> tuple[Revision, ...]:
        """Registered drafts with a valid signature, oldest first."""
        return self.survey()[0]

    def survey(self) -> tuple[tuple[Revision, ...], tuple[str, ...]]:
        """As `revisions`, and a line per draft with an invalid signature; reads no weights."""
        found: list[Revision] = []
        warnings: list[str] = []
        for name in self._store.names():
            try:
                found.append(self._read(name))
            except DraftRefusedError as error:
                warnings.append(str(error))
        return tuple(sorted(found, key=lambda each: (each.made, each.digest))), tuple(warnings)

    def find(self, name: str) -> Revision:
        """Find a draft by its digest or a unique prefix of it, with or without `sha256:`."""
        digits = name.strip().lower().removeprefix("sha256:")
        names = [known for known in self._store.names() if digits and known.startswith(digits)]
        if not names:
            raise DraftNotFoundError(f"no draft {name!r} is registered: `appliance draft list` shows all")
        if len(names) > 1:
            raise DraftNotFoundError(f"{len(names)} drafts begin with {name!r}: give more of its digits")
        return self._read(names[0])

    def weights(self, revision: Revision) -> Path:
        """Directory of a draft's weights; DraftRefusedError if they differ from what was registered."""
        path = self._store.weights(revision.hex)
        try:
            digest = digest_weights(path)
        except (ConfigurationError, OSError, UnicodeError) as error:
            raise DraftRefusedError(
                f"the draft in {path} cannot be read ({error}): import it again"
            ) from error
        if digest != revision.digest:
            raise DraftRefusedError(
                f"the draft in {path} differs from what was registered (its digest is {digest}): import it "
                "again"
            )
        return path

    def register(
        self,
        source: DraftSource,
        *,
        target: str,
        how: Source,
        signer: NoteSigner,
        origin: SignedOrigin | None = None,
    ) -> Revision:
        """
        Register a draft by copying it, without lint.

        Registering it again changes nothing but repairs lost files.  After a crash, registering it again
        resumes.  The signer, the site's key, becomes trusted.  `origin` is kept with the draft.
        """
        self._trust(signer)
        revision = self._describe(source, target=target, how=how, origin=origin)
        page = revision.encode()
        pages = {REVISION: page, SIGNATURE: SIGNED.sign(page, signer)}
        if origin is not None:
            pages |= {ORIGIN: origin.page, ORIGIN_SIGNATURE: origin.note}
        with self._store.locked():
            known = self._known(revision)
            if known is not None:
                if self._is_intact(known):
                    return known
                # Only files were lost: the revision stays.
                revision, pages = known, self._store.pages(known.hex)
            self._store.put(source, pages)
        return revision

    def registered(self, source: DraftSource, *, target: str) -> Revision | None:
        """The revision of a registered, undamaged draft; None if `register` would write, and has room."""
        wanted = self._describe(source, target=target, how="imported", origin=None)
        wanted.encode()
        known = self._known(wanted)
        if known is not None and self._is_intact(known):
            return known
        self._store.check_room(source)
        return None

    def _describe(
        self, source: DraftSource, *, target: str, how: Source, origin: SignedOrigin | None
    ) -> Revision:
        made_for = source.record.target
        if made_for is not None and made_for != target:
            raise DraftRefusedError(
                f"the draft in {source.home} was trained for the target {made_for}, and this target is "
                f"{target}: give the right one, or train the draft again"
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
        """The revision under the same digest, if its signature is trusted."""
        try:
            known = self._read(wanted.hex)
        except DraftRefusedError:
            return None
        if known.target != wanted.target:
            raise DraftRefusedError(
                f"the draft {known.hex[:SHORT]} is registered for the target {known.target}, so it "
                f"cannot be registered for {wanted.target}"
            )
        return known

    def _is_intact(self, revision: Revision) -> bool:
        try:
            self.weights(revision)
        except DraftRefusedError:
            return False
        return True

    def _read(self, name: str) -> Revision:
        try:
            page = self._store.page(name, REVISION)
            SIGNED.verify(page, self._store.page(name, SIGNATURE), self.trusted, self._clock())
            revision = Revision.decode(page)
        except (BundleRefusedError, DraftRefusedError) as error:
            raise DraftRefusedError(f"the draft {name[:SHORT]} cannot be used: {error}") from error
        if revision.hex != name:
            raise DraftRefusedError(
                f"the draft {name[:SHORT]} cannot be used: its {REVISION} belongs to {revision.digest}"
            )
        return revision

    def _trust(self, signer: NoteSigner) -> None:
        if signer.verifier_key not in {key.verifier_key for key in self.trusted}:
            self.trusted = (*self.trusted, TrustedKey(verifier_key=signer.verifier_key))

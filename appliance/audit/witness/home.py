"""
A witness's directory: its keys, its name, the logs it knows, and what it has cosigned.

| File | Content |
|---|---|
| `name` | what it signs as, such as `auditor.example/witness` |
| `witness.key`, `witness-mldsa.key` | its private keys, mode 0600; the second one only if asked for |
| `logs` | verifier keys of the logs it knows, one a line; edited by hand |
| `witness.db` | the newest checkpoint of each log it cosigned: never restore this from a backup |
"""

from collections.abc import Callable, Sequence
from pathlib import Path

from appliance.audit.checkpoint import VerifierKey, parse_verifier_keys
from appliance.audit.cosignature import TIMESTAMPED
from appliance.audit.mldsa import require_mldsa
from appliance.audit.signing_keys import (
    Signer,
    create_mldsa_key,
    create_signing_key,
    load_witness_keys,
)
from appliance.audit.witness.witness import Witness
from appliance.audit.witness.witness_state import WitnessState
from appliance.errors import AuditKeyError, ConfigurationError
from appliance.infra.key_location import mldsa_path


class WitnessHome:
    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.name, self.logs = directory / "name", directory / "logs"
        self.key, self.state = directory / "witness.key", directory / "witness.db"

    def create(self, name: str, log_keys: Sequence[VerifierKey], *, post_quantum: bool) -> Signer:
        """
        Make a new witness and return its keys.

        Raises AuditKeyError if there is one already, or a key cannot be made, and ConfigurationError if the
        directory cannot be written.
        """
        if post_quantum:
            require_mldsa()
        try:
            self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            create_signing_key(self.key)
            if post_quantum:
                create_mldsa_key(mldsa_path(self.key))
            self.logs.write_text("".join(f"{key.encode()}\n" for key in log_keys), encoding="utf-8")
            # Last: a crash before leaves no witness that could be opened.
            self.name.write_text(f"{name}\n", encoding="utf-8")
        except OSError as error:
            raise ConfigurationError(f"cannot write to {self.directory}: {error.strerror}") from error
        return load_witness_keys(self.key, name)

    def signer(self) -> Signer:
        """Raises AuditKeyError if a key cannot be used, ConfigurationError without a witness."""
        return load_witness_keys(self.key, _read(self.name).strip())

    def open(self, clock: Callable[[], float]) -> Witness:
        """Raises AuditKeyError if its key or a log's cannot be used, ConfigurationError without a witness."""
        log_keys = parse_verifier_keys(_read(self.logs))
        return Witness(state=WitnessState(self.state), signer=self.signer(), log_keys=log_keys, clock=clock)


def load_verifier_keys(text: str) -> tuple[VerifierKey, ...]:
    """
    Read verifier keys that are given as text or as the path of a file with one a line.

    Raises AuditKeyError if one is malformed, and ConfigurationError if the file cannot be read.
    """
    return parse_verifier_keys(text if "+" in text else _read(Path(text)))


def load_cosigner_keys(name: str, text: str) -> tuple[VerifierKey, ...]:
    """As `load_verifier_keys`; also AuditKeyError if a key is of another name, or no witness's."""
    keys = load_verifier_keys(text)
    for key in keys:
        if key.name != name or key.kind not in TIMESTAMPED:
            raise AuditKeyError(
                f"the key of the witness {name} must bear that name and be of type 04 or 06: "
                "`appliance audit witness key` prints it"
            )
    return keys


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        message = f"cannot read {path} ({error}): `appliance audit witness init` makes a witness"
        raise ConfigurationError(message) from error

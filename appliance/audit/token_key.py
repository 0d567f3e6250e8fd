"""
Signs with an Ed25519 key that does not leave its PKCS#11 token.

Every signature is verified with the public key before it is used.  A session that broke, because the token
was removed or restarted, is reopened once per signature.  A token locks after a few wrong PINs, so a refused
one is not tried again: not by this process until the PIN file changes, nor by any process while the token
reports a wrong PIN since its last login.

Calls into the module block; the caller chooses the thread.
"""

import ctypes
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol, cast

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from appliance.errors import AuditError, AuditKeyError, AuditUnavailableError
from appliance.infra.key_location import TokenKey

if TYPE_CHECKING:
    import pkcs11

PROBE = b"appliance: does this key belong to its public half?\n"
"""Signed once at the start; no checkpoint reads like this, having three lines."""
POINT_LENGTHS = (32, 34)
"""Of a raw point, and of one in a DER octet string: modules differ."""
_MODULES = threading.Lock()
"""Held for each use: modules are initialised for one thread at a time."""


class _PrivateKey(Protocol):
    def sign(self, data: bytes, *, mechanism: object) -> bytes: ...


class TokenSigningKey:
    """One key pair and the open session that uses it."""

    def __init__(self, key: TokenKey, read_pin: Callable[[], str]) -> None:
        """Log in and sign once; raises AuditKeyError.  `read_pin` is called at each login."""
        self._key, self._read_pin = key, read_pin
        self._refused_pin: str | None = None
        self._is_broken = False
        with _MODULES:
            self._private: _PrivateKey | None
            self._public, self._private = self._find_pair()
            self._sign(PROBE)

    def public_key(self) -> Ed25519PublicKey:
        return self._public

    def sign(self, data: bytes) -> bytes:
        """Blocks.  Raises AuditUnavailableError if the token cannot sign now."""
        with _MODULES:
            try:
                if self._private is not None:
                    try:
                        return self._sign(data)
                    except AuditKeyError:
                        self._private = None
                public, self._private = self._find_pair()
                if public != self._public:
                    raise self._error("has another key under this label", "restore the log's own key")
                return self._sign(data)
            except AuditError as error:
                self._private, self._is_broken = None, True
                raise AuditUnavailableError(str(error)) from error

    def _sign(self, data: bytes) -> bytes:
        import pkcs11  # noqa: PLC0415

        assert self._private is not None  # noqa: S101 - the callers opened it
        try:
            signature = self._private.sign(data, mechanism=pkcs11.Mechanism.EDDSA)
            self._public.verify(signature, data)
        except InvalidSignature as error:
            raise self._error("made a wrong signature", "check its key pair") from error
        except pkcs11.PKCS11Error as error:
            self._is_broken = True
            raise self._error(f"does not sign ({_name(error)})", "check the token") from error
        return signature

    def _find_pair(self) -> "tuple[Ed25519PublicKey, _PrivateKey]":
        try:
            import pkcs11  # noqa: PLC0415 - an extra, which only processes that sign load
        except ImportError as error:
            raise AuditKeyError(
                f"{self._key} needs python-pkcs11: install the appliance with its extra `hsm`"
            ) from error
        pin = self._read_pin()
        try:
            if self._is_broken:
                self._is_broken = False
                _restart(self._key)
            session = self._log_in(self._find_token(), pin)
            kinds = (pkcs11.ObjectClass.PUBLIC_KEY, pkcs11.ObjectClass.PRIVATE_KEY)
            public, private = (
                list(
                    session.get_objects(
                        {
                            pkcs11.Attribute.CLASS: kind,
                            pkcs11.Attribute.KEY_TYPE: pkcs11.KeyType.EC_EDWARDS,
                            pkcs11.Attribute.LABEL: self._key.object,
                        }
                    )
                )
                for kind in kinds
            )
            if (len(public), len(private)) != (1, 1):
                raise self._error(
                    f"has {len(private)} private and {len(public)} public Ed25519 keys of this label",
                    "it must have one of each: generate the pair in the token, or correct the label",
                )
            if private[0][pkcs11.Attribute.EXTRACTABLE] and not private[0][pkcs11.Attribute.SENSITIVE]:
                raise self._error(
                    "would give out the private key in clear", "generate one that is sensitive, in the token"
                )
            point = bytes(public[0][pkcs11.Attribute.EC_POINT])
        except pkcs11.PKCS11Error as error:
            self._is_broken = True
            raise self._error(f"cannot be used ({_name(error)})", "check module and token") from error
        if len(point) not in POINT_LENGTHS:
            raise self._error("has a key of another curve", "generate an Ed25519 key")
        return Ed25519PublicKey.from_public_bytes(point[-32:]), cast("_PrivateKey", private[0])

    def _find_token(self) -> "pkcs11.Token":
        import pkcs11  # noqa: PLC0415

        tokens = list(pkcs11.lib(str(self._key.module)).get_tokens())
        found = [
            token
            for token in tokens
            if token.label == self._key.token
            and self._key.serial in {None, token.serial.decode("ascii", "replace")}
        ]
        if len(found) != 1:
            # The module may list its tokens at its start only.
            self._is_broken = True
            labels = ", ".join(sorted(token.label for token in tokens if token.label)) or "none"
            raise self._error(
                f"is there {len(found)} times; the module has {labels}",
                "connect it, or name its label (and serial, if two have it)",
            )
        (token,) = found
        if pkcs11.Mechanism.EDDSA not in token.slot.get_mechanisms():
            raise self._error("does not support CKM_EDDSA", "use a token or firmware that has Ed25519")
        return token

    def _log_in(self, token: "pkcs11.Token", pin: str) -> "pkcs11.Session":
        import pkcs11  # noqa: PLC0415

        if token.flags & pkcs11.TokenFlag.USER_PIN_LOCKED:
            raise self._error("is locked", "let its security officer set a new PIN")
        if pin == self._refused_pin:
            raise self._error(f"refused the PIN in {self._key.pin}", "correct it; it is not tried again")
        if token.flags & (pkcs11.TokenFlag.USER_PIN_COUNT_LOW | pkcs11.TokenFlag.USER_PIN_FINAL_TRY):
            raise self._error(
                "was given a wrong PIN since its last login, so no PIN is tried",
                f"correct {self._key.pin}, then log in once with the token's own tool",
            )
        try:
            return token.open(user_pin=pin)
        except pkcs11.UserAlreadyLoggedIn:  # by another key of this process
            return token.open()
        except (
            pkcs11.PinIncorrect,
            pkcs11.PinInvalid,
            pkcs11.PinLenRange,
            pkcs11.PinExpired,
            pkcs11.PinLocked,
        ) as error:
            self._refused_pin = pin
            raise self._error(
                f"refused the PIN in {self._key.pin} ({_name(error)})", "correct it; it is not tried again"
            ) from error

    def _error(self, problem: str, remedy: str) -> AuditKeyError:
        return AuditKeyError(
            f"the token {self._key.token} of the signing key {self._key.object} {problem}: {remedy}"
        )


class _Functions(ctypes.Structure):
    """The beginning of CK_FUNCTION_LIST."""

    _fields_ = (
        ("version", ctypes.c_ubyte * 2),
        ("initialize", ctypes.CFUNCTYPE(ctypes.c_ulong, ctypes.c_void_p)),
        ("finalize", ctypes.CFUNCTYPE(ctypes.c_ulong, ctypes.c_void_p)),
    )


def _restart(key: TokenKey) -> None:
    """
    Initialise the module again: many keep a lost token, or a lost connection to it, until then.

    By ctypes, since python-pkcs11 holds the interpreter's lock while it finalizes: a module that waits for
    its device would stop the event loop.
    """
    import pkcs11  # noqa: PLC0415

    if not pkcs11.lib(str(key.module)).initialized:
        return
    functions = ctypes.POINTER(_Functions)()
    ctypes.CDLL(str(key.module)).C_GetFunctionList(ctypes.byref(functions))
    functions.contents.finalize(None)
    if code := functions.contents.initialize(None):
        raise pkcs11.PKCS11Error(f"C_Initialize: {code:#x}")


def _name(error: Exception) -> str:
    """Errors of PKCS#11 have names, and seldom texts."""
    return str(error) or type(error).__name__

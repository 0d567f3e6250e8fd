"""
One attempt at one line of a batch: an ordinary request without a client connection.

The gateway admits, limits and audits it as if its tenant had sent it; its audit entries name the batch
and the line.
"""

from collections.abc import Callable

from appliance.errors import ApplianceError, AtCapacityError, StorageUnavailableError
from appliance.gateway.batch.batch import Batch
from appliance.gateway.batch.lines import BatchLine
from appliance.gateway.batch.results import LineAnswer
from appliance.gateway.call import Call
from appliance.gateway.gateway import Gateway
from appliance.gateway.reply import ReplyHead
from appliance.infra.logs import Logger
from appliance.tenancy import ApiKey, Caller, PriorityClass, TenantDirectory
from appliance.tenancy.keys import KEY_ID_FORMAT


class CollectedReply:
    def __init__(self) -> None:
        self.client_left = False  # set if the batch is cancelled or expired; logged like a client that left
        self.status = 0
        self.may_pass = True  # whether an error may be temporary
        self._pieces: list[bytes] = []

    async def start(self, head: ReplyHead) -> None:
        self.status = head.status
        self.may_pass = head.headers.get("x-should-retry") != "false"

    async def write(self, data: bytes) -> None:
        self._pieces.append(data)

    def write_now(self, data: bytes) -> bool:
        self._pieces.append(data)
        return True

    async def end(self, data: bytes) -> None:
        self._pieces.append(data)

    @property
    def text(self) -> str:
        return b"".join(self._pieces).decode("utf-8", "replace")


def find_owner(directory: TenantDirectory, tenant: str, key_id: str, now: float) -> Caller | None:
    """
    The caller that a tenant's key authenticates at `now`, Unix time; None if it is no longer valid.

    Looked up before each line, so that revoking a key stops its batches.  A token or certificate of an
    identity provider expires long before its batch has run: for those only the tenant is checked.
    """
    owner = directory.tenant(tenant)
    if owner is None:
        return None
    if not KEY_ID_FORMAT.fullmatch(key_id):
        return Caller(tenant=owner, key=ApiKey(key_id=key_id, digest=""))
    caller = directory.caller(key_id)
    if caller is None or caller.tenant is not owner:
        return None
    return caller if caller.is_valid_at(now) else None


Render = Callable[[Exception, str], tuple[int, str, bool]]  # status, body, whether a retry can succeed


class Answerer:
    """
    Sends lines to the gateway.

    `is_client_id`: whether the log may record a `custom_id` as the client's own id of the request.
    """

    def __init__(
        self,
        gateway: Gateway,
        *,
        render: Render,
        new_request_id: Callable[[], str],
        is_client_id: Callable[[str], bool],
        salted: bool,
        logger: Logger,
    ) -> None:
        self._gateway = gateway
        self._render = render
        self._new_request_id = new_request_id
        self._is_client_id = is_client_id
        self._salted = salted
        self._logger = logger

    async def read(self, batch: Batch, number: int, line: bytes) -> BatchLine:
        """Raises InvalidRequestError as `parse_line`; StorageUnavailableError, after which a batch waits."""
        try:
            return await self._gateway.bodies.parse_line(number, line, batch.tenant, batch.endpoint)
        except AtCapacityError as error:
            raise StorageUnavailableError(str(error)) from error

    async def ask(self, batch: Batch, line: BatchLine, caller: Caller, reply: CollectedReply) -> LineAnswer:
        """Errors are returned as answers; cancelling stops the worker, and `reply.client_left` says why."""
        request_id = self._new_request_id()
        try:
            terms = self._gateway.terms(caller, batch.endpoint, salted=self._salted)
            parsed = await self._gateway.bodies.parse(line.body, terms)
            call = Call(
                request_id=request_id,
                client_request_id=line.custom_id if self._is_client_id(line.custom_id) else None,
                caller=caller,
                route=batch.endpoint,
                body=line.body,
                parsed=parsed,
                client=batch.client,
                priority=PriorityClass.BATCH,
                batch_line=(batch.batch_id, line.number),
            )
            self._gateway.admit(call)
            await self._gateway.relay(call, reply)
        except ApplianceError as error:
            status, body, may_pass = self._render(error, batch.endpoint)
        except Exception as error:
            # A defect in one line must not block the others.
            self._logger.exception(
                "batch_line_crashed",
                request_id=request_id,
                detail=batch.batch_id,
                error=type(error).__name__,
            )
            status, body, may_pass = self._render(error, batch.endpoint)
        else:
            status, body, may_pass = reply.status, reply.text, reply.may_pass
        return LineAnswer(request_id=request_id, status=status, body=body, may_pass=may_pass)

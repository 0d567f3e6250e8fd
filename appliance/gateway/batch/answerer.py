"""
One try of one line: a request like any other, but that nobody holds a connection for.

It is admitted, limited and audited by the gateway as if its tenant had sent it, and its entries
name the batch and the line.
"""

from collections.abc import Callable

from appliance.errors import ApplianceError
from appliance.gateway.batch.batch import Batch
from appliance.gateway.batch.lines import BatchLine
from appliance.gateway.batch.reply import CollectedReply
from appliance.gateway.batch.results import Answer
from appliance.gateway.call import Call
from appliance.gateway.gateway import Gateway
from appliance.infra.logs import Logger
from appliance.tenancy import Caller, PriorityClass

Render = Callable[[Exception, str], tuple[int, str, bool]]
"""Status and body that a client of a path would be sent for an error, and whether trying again can help."""


class Answerer:
    """Asks the gateway."""

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
        """
        Prepare.

        Args:
            gateway: answers.
            render: what a client would be sent for an error.
            new_request_id: names requests.
            is_client_id: whether a `custom_id` may be in the log as the client's own id of the request.
            salted: whether workers keep apart what they cache of each tenant's prompts.
            logger: told of defects.
        """
        self._gateway = gateway
        self._render = render
        self._new_request_id = new_request_id
        self._is_client_id = is_client_id
        self._salted = salted
        self._logger = logger

    async def ask(self, batch: Batch, line: BatchLine, caller: Caller, reply: CollectedReply) -> Answer:
        """
        Run a line once; an error is an answer, too.

        Cancelling this stops the worker; `reply.client_left` then tells a tenant who cancelled from a
        gateway that stops.
        """
        call = Call(
            request_id=self._new_request_id(),
            client_request_id=line.custom_id if self._is_client_id(line.custom_id) else None,
            caller=caller,
            route=batch.endpoint,
            model=line.model,
            text=line.text,
            members=line.members,
            is_stream=False,
            wants_usage=False,
            client=batch.client,
            priority=PriorityClass.BATCH,
            salted=self._salted,
            batch_line=(batch.batch_id, line.number),
        )
        try:
            self._gateway.admit(call)
            await self._gateway.relay(call, reply)
        except ApplianceError as error:
            status, body, may_pass = self._render(error, batch.endpoint)
        except Exception as error:
            # A defect that one line meets must not hold up the others.
            self._logger.exception(
                "batch_line_crashed",
                request_id=call.request_id,
                detail=batch.batch_id,
                error=type(error).__name__,
            )
            status, body, may_pass = self._render(error, batch.endpoint)
        else:
            status, body, may_pass = reply.status, reply.text, reply.may_pass
        return Answer(request_id=call.request_id, status=status, body=body, may_pass=may_pass)

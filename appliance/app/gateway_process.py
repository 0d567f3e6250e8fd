"""
The gateway of a process: every part, built from the settings in the order they need each other.

First the parts that have to be closed again (`app.opened`), then those made of them.  Nothing runs yet when
`GatewayRole.open` yields; `run` starts the parts, and stops them before this closes what they use.
"""

import asyncio
import os
import socket
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager, closing
from dataclasses import dataclass
from functools import partial

from appliance.api.batches import render_line
from appliance.api.console.console import Console
from appliance.api.console.history import History
from appliance.api.console.sessions import LoginAttempts, Sessions
from appliance.api.documentation import find_site
from appliance.api.refusals import RefusedCallers
from appliance.api.request_middleware import CLIENT_ID
from appliance.api.services import Services
from appliance.app.announcer import Announcer
from appliance.app.opened import WALL_CLOCK, GatewayOpener, OpenedParts, new_request_id
from appliance.audit.content.payload_keys import PayloadKeys, load_master_key
from appliance.audit.content.payloads import SqlPayloadStore
from appliance.audit.signing_keys import encode_keys, load_public_keys
from appliance.audit.store import SqlAuditStore
from appliance.audit.verification import LogVerification
from appliance.control.approvals import Approvals, SqlApprovalStore
from appliance.control.changes import ChangeLog
from appliance.control.egress_checks import EgressWatch
from appliance.control.loop import ControlLoop, ControlParts
from appliance.control.recycle import RecycleParts, Recycler, Restarter
from appliance.control.tenants.enrolment import enrol, seal_upgraded
from appliance.control.tenants.registrar import Registrar
from appliance.control.worker_list import WorkerList
from appliance.drafts.promotion.promoter import Promoter
from appliance.drafts.promotion.promotion_run import LocalTarget, PromotionParts
from appliance.drafts.registry.site_registry import open_registry
from appliance.gateway.admission import AdmissionControl
from appliance.gateway.attribution import Attribution
from appliance.gateway.batch.answerer import Answerer
from appliance.gateway.batch.batch_runner import BatchRunner
from appliance.gateway.batch.batch_setup import OpenBatches, open_batches
from appliance.gateway.cost.reader import UsageReader
from appliance.gateway.gateway import Gateway, GatewayPolicy
from appliance.gateway.intents import IntentRecorder
from appliance.gateway.outcomes import OutcomeRecorder
from appliance.infra.os_account import account_name
from appliance.infra.settings import Settings
from appliance.serving.discovery import Discovery
from appliance.serving.worker import WorkerId
from appliance.tenancy import TenantDirectory
from appliance.tenancy.identity.authenticator import Authenticator
from appliance.tenancy.identity.files import Renewable
from appliance.tenancy.identity.provider import open_provider
from appliance.tenancy.watch import TenantWatch


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayParts:
    opened: OpenedParts
    services: Services
    discovery: Discovery
    egress: EgressWatch
    promoter: Promoter
    tenants: TenantWatch
    batches: BatchRunner
    renewable: tuple[Renewable, ...]  # read files that may change


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayRole(GatewayOpener):
    read_settings: Callable[[], Settings]  # reads file and environment again
    announcer: Announcer
    own: Mapping[WorkerId, Restarter]  # workers of this process
    local: LocalTarget | None  # their target's weights

    @asynccontextmanager
    async def open(self) -> AsyncIterator[GatewayParts]:
        """Build every part until the block ends; raises ApplianceError if one cannot be opened."""
        continues = self.installation.sealed_head.exists()
        async with self.opened() as opened:
            tenants = TenantDirectory()
            provider = open_provider(self.settings.oidc, logger=self.logger, clock=WALL_CLOCK)
            watch = TenantWatch(
                store=opened.tenant_store,
                directory=tenants,
                logger=self.logger,
                clock=time.monotonic,
                stale_seconds=self.settings.tenants.stale_seconds,
            )
            opened.metrics.keys_next_end.set_function(lambda: watch.next_key_expiry)
            opened.metrics.tenants_generation.set_function(lambda: watch.generation)
            opened.metrics.tenants_age_seconds.set_function(lambda: watch.age_seconds)
            registrar = await self._enrol(opened, watch, continues=continues)
            attribution = Attribution(label_key=os.urandom(16), clock=time.monotonic)
            gateway = self._make_gateway(opened, attribution)
            recycler = self._make_recycler(opened)
            control = self._make_control(opened, recycler)
            promoter = self._make_promoter(opened, recycler, control)
            egress = self._make_egress(opened)
            discovery = Discovery(
                pool=opened.pool,
                urls=self.settings.pool.urls,
                discover=self.settings.pool.discover,
                seconds=self.settings.pool.discover_seconds,
                control_port=self.settings.pool.control_port,
                logger=self.logger,
            )
            console = self._make_console(opened, control)
            async with self._open_batches(opened, gateway, tenants) as work:
                services = Services(
                    settings=self.settings.api,
                    tenants=tenants,
                    identity=Authenticator(
                        tenants,
                        provider=provider,
                        tls=self.settings.tls,
                        refuse=watch.refuse_if_stale,
                        poll=watch.poll_for_refused,
                    ),
                    refused=RefusedCallers(
                        audit=opened.audit.sink,
                        metrics=opened.metrics,
                        logger=self.logger,
                        clock=WALL_CLOCK,
                    ),
                    pool=opened.pool,
                    workers=WorkerList(
                        pool=opened.pool,
                        discovery=discovery,
                        settings=self.settings,
                        read_settings=self.read_settings,
                        record=opened.audit.log.append,
                        logger=self.logger,
                        wall=self.wall,
                    ),
                    gateway=gateway,
                    audit=opened.audit.log,
                    audit_health=opened.audit.monitor.health,
                    attribution=attribution,
                    control=control,
                    overrides=opened.overrides,
                    metrics=opened.metrics,
                    logger=self.logger,
                    clock=WALL_CLOCK,
                    new_request_id=new_request_id,
                    version=self.version,
                    wall=self.wall,
                    egress=egress,
                    registrar=registrar,
                    tenants_warning=lambda: watch.warning,
                    forward_warning=lambda: opened.forwarder.warning if opened.forwarder else None,
                    retention=opened.content.retention,
                    approvals=self._make_approvals(opened, tenants),
                    files=work.files,
                    batches=work.batches,
                    console=console,
                    documentation=find_site(),
                    promoter=promoter,
                )
                yield GatewayParts(
                    opened=opened,
                    services=services,
                    discovery=discovery,
                    egress=egress,
                    promoter=promoter,
                    tenants=watch,
                    renewable=(opened.worker_tls, *((provider,) if provider else ())),
                    batches=work.runner,
                )

    async def _enrol(self, opened: OpenedParts, watch: TenantWatch, *, continues: bool) -> Registrar:
        registrar = Registrar(store=opened.tenant_store, record=opened.audit.log.append, adopt=watch.apply)
        with closing(SqlAuditStore(opened.database)) as log:
            await seal_upgraded(
                registrar,
                opened.tenant_store,
                log,
                continues=continues,
                actor=f"cli:{account_name()}",
                clock=WALL_CLOCK,
            )
        roster, first = await enrol(
            registrar,
            self.installation,
            file=self.settings.tenants.file,
            demo=bool(self.own),
            actor=f"cli:{account_name()}",
            clock=WALL_CLOCK,
        )
        watch.apply(roster)
        self.announcer.show_keys(first)
        return registrar

    def _make_approvals(self, opened: OpenedParts, tenants: TenantDirectory) -> Approvals | None:
        if not self.settings.audit.two_person:
            return None
        return Approvals(
            store=SqlApprovalStore(opened.database),
            log=opened.audit.log,
            entries=SqlPayloadStore(opened.database).entries,
            tenants=tenants,
            retention_days=self.settings.audit.payload_retention_days,
            clock=WALL_CLOCK,
        )

    def _make_gateway(self, opened: OpenedParts, attribution: Attribution) -> Gateway:
        settings = self.settings
        return Gateway(
            pool=opened.pool,
            admission=AdmissionControl(
                pool=opened.pool,
                settings=settings.admission,
                pool_settings=settings.pool,
                metrics=opened.metrics,
                clock=time.monotonic,
            ),
            client=opened.client,
            intents=IntentRecorder(
                audit=opened.audit.sink,
                attribution=attribution,
                captures=opened.content.captures,
                logger=self.logger,
            ),
            outcomes=OutcomeRecorder(
                audit=opened.audit.sink,
                attribution=attribution,
                captures=opened.content.captures,
                metrics=opened.metrics,
                logger=self.logger,
                clock=time.monotonic,
                costs=opened.costs,
                count=opened.counts.usage,
            ),
            metrics=opened.metrics,
            clock=time.monotonic,
            policy=GatewayPolicy(
                keep_alive_seconds=settings.api.keep_alive_seconds,
                silence_seconds=settings.api.silence_seconds,
                origin=settings.audit.origin,
            ),
            limits=opened.limits,
            costs=opened.costs,
            tracing=opened.tracing,
            bodies=opened.bodies,
        )

    def _make_recycler(self, opened: OpenedParts) -> Recycler:
        return Recycler(
            RecycleParts(
                pool=opened.pool,
                client=opened.client,
                own=self.own,
                others=opened.others,
                audit=opened.audit.sink,
                metrics=opened.metrics,
                logger=self.logger,
            ),
            settings=self.settings.recycle,
            clock=time.monotonic,
        )

    def _make_control(self, opened: OpenedParts, recycler: Recycler) -> ControlLoop:
        return ControlLoop(
            ControlParts(
                pool=opened.pool,
                client=opened.client,
                speculation=opened.speculation,
                lease=opened.lease,
                overrides=opened.overrides,
                recycler=recycler,
                changes=ChangeLog(
                    audit=opened.audit.sink, metrics=opened.metrics, logger=self.logger, clock=WALL_CLOCK
                ),
                metrics=opened.metrics,
                logger=self.logger,
                costs=opened.costs,
            ),
            settings=self.settings.monitor,
            clock=time.monotonic,
            wall_clock=WALL_CLOCK,
        )

    def _make_promoter(self, opened: OpenedParts, recycler: Recycler, control: ControlLoop) -> Promoter:
        return Promoter(
            PromotionParts(
                pool=opened.pool,
                recycler=recycler,
                is_acting=lambda: control.is_acting,
                clock=time.monotonic,
                sleep=asyncio.sleep,
                directory=self.installation.drafts,
                open_registry=partial(open_registry, self.settings, WALL_CLOCK),
                record=opened.audit.log.append,
                drafts=self.settings.drafts,
                recycle=self.settings.recycle,
                wall_clock=WALL_CLOCK,
                metrics=opened.metrics,
                logger=self.logger,
                local=self.local,
            ),
            new_id=new_request_id,
        )

    def _make_egress(self, opened: OpenedParts) -> EgressWatch:
        return EgressWatch(
            settings=self.settings.egress,
            observe=self.prober.observe if self.prober else None,
            audit=opened.audit.sink,
            gateway=opened.gateway,
            host=socket.gethostname(),
            metrics=opened.metrics,
            logger=self.logger,
            clock=WALL_CLOCK,
            monotonic=time.monotonic,
        )

    def _open_batches(
        self, opened: OpenedParts, gateway: Gateway, tenants: TenantDirectory
    ) -> AbstractAsyncContextManager[OpenBatches]:
        settings = self.settings
        answerer = Answerer(
            gateway,
            render=render_line,
            new_request_id=new_request_id,
            is_client_id=lambda text: CLIENT_ID.match(text) is not None,
            salted=not settings.api.share_prefix_cache,
            logger=self.logger,
        )
        return open_batches(
            database=opened.database,
            directory=settings.batch.directory or self.installation.files,
            former=self.installation.files,
            gateway=opened.gateway,
            keys=self._payload_keys(),
            settings=settings.batch,
            worker_requests=settings.admission.worker_requests,
            max_line_bytes=settings.api.max_body_bytes,
            tenants=tenants,
            pool=opened.pool,
            audit=opened.audit.sink,
            answerer=answerer,
            metrics=opened.metrics,
            logger=self.logger,
            clock=WALL_CLOCK,
            monotonic=time.monotonic,
            random_bytes=os.urandom,
            new_id=new_request_id,
        )

    def _make_console(self, opened: OpenedParts, control: ControlLoop) -> Console | None:
        chosen, clock = self.settings.console, time.monotonic
        if not chosen.enabled:
            return None
        audit, installation = self.settings.audit, self.installation

        def vkey() -> str:
            return encode_keys(
                load_public_keys(installation.signing_key, audit.origin, installation.public_key)
            )

        return Console(
            settings=chosen,
            sessions=Sessions(
                idle_seconds=chosen.idle_seconds, longest_seconds=chosen.session_seconds, clock=clock
            ),
            attempts=LoginAttempts(clock=clock),
            history=History(pool=opened.pool, control=control, clock=clock, logger=self.logger),
            verification=LogVerification(
                database_url=installation.database_url,
                scratch=installation.directory,
                vkey=vkey,
                witnesses=audit.witnesses,
                keep_free_bytes=audit.low_disk_bytes,
                clock=WALL_CLOCK,
            ),
            usage=UsageReader(
                database_url=installation.database_url,
                settings=self.settings.cost,
                time_zone=self.settings.limits.time_zone,
            ),
            witnesses=lambda: opened.witnessing.level,
            timestamps=lambda: opened.timestamping.level,
            open_log=lambda: SqlAuditStore(installation.database_url),
            vkey=vkey,
            clock=clock,
        )

    def _payload_keys(self) -> PayloadKeys:
        """Another view of the content keys, for files: each thread that uses them needs its own."""
        audit = self.settings.audit
        master = audit.payload_master_key_file
        return PayloadKeys(
            self.installation.payload_keys,
            master_key=load_master_key(master) if master else None,
            key_days=audit.payload_rotation_days,
            clock=WALL_CLOCK,
            random_bytes=os.urandom,
        )

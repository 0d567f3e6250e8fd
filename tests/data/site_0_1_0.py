"""
Make the site that an upgrade starts from; run in a checkout of commit b8f7e63, which is version 0.1.0.

    PYTHONPATH=. python site_0_1_0.py DIRECTORY [URL of an empty PostgreSQL database]

Leaves in DIRECTORY the data directory `data`, the witness's `witness` and `keys.json` with the tenants' keys.
With PostgreSQL, add `pg_dump --inserts --no-owner --no-privileges` as `database.sql`.  The archives here
are these directories without the draft's `model.safetensors`.
"""

import asyncio
import json
import os
import sys
from pathlib import Path

from appliance.audit.keys import create_signing_key, load_signing_key  # isort: skip - a module of 0.1.0
from tests.fakes import chat
from tests.integration.test_batches import Appliance, EchoWorker, begin, ended, requests, said

SITE, DATABASE = Path(sys.argv[1]), sys.argv[2] if len(sys.argv) > 2 else None
ORIGIN, WITNESS = "appliance.local/audit", "auditor.example/witness"


async def main() -> None:
    data, witness = SITE / "data", SITE / "witness"
    data.mkdir(parents=True, mode=0o700)
    create_signing_key(data / "audit.key")
    settings = {"APPLIANCE_AUDIT__DATABASE_URL": DATABASE} if DATABASE else {}
    worker = EchoWorker()
    async with worker.serving():
        appliance = Appliance(data, worker, **settings)

        async def run(*words: str) -> str:
            command = [sys.executable, "-m", "appliance", *words]
            done = await asyncio.create_subprocess_exec(
                *command, env={**os.environ, **settings, **extra}, stdout=asyncio.subprocess.PIPE
            )
            out, _ = await done.communicate()
            assert done.returncode == 0, (words, out)
            return out.decode()

        extra: dict[str, str] = {}
        where = ("--data", str(data))
        if DATABASE:
            await run("audit", "upgrade-database", *where)
        await appliance.start()
        await run(
            "tenant",
            "create",
            "clinic",
            "--content",
            "encrypted",
            "--models",
            "*",
            "--may",
            "train_drafts",
            "--limit",
            "requests_per_minute=600",
            *where,
        )
        key = (await run("key", "create", "clinic", *where)).strip().splitlines()[-1]
        async with appliance.client() as demo, appliance.client(key) as clinic:
            for client in (demo, clinic):
                for text in ("the first question", "the second question"):
                    await client.chat.completions.create(**{**chat(), "messages": said(text)})
            batch = await begin(clinic, requests("one", "two", "three"))
            batch = await ended(clinic, batch.id)
            assert batch.status == "completed", batch
        log_key = load_signing_key(data / "audit.key", ORIGIN).vkey
        named = (
            await run("audit", "witness", "init", str(witness), "--name", WITNESS, "--log", log_key)
        ).strip()
        extra["APPLIANCE_AUDIT__WITNESSES"] = json.dumps([{"name": WITNESS, "key": named}])
        head = str(SITE / "head.json")
        await asyncio.sleep(2)
        await run("audit", "witness", "export-head", head, *where)
        await run("audit", "witness", "cosign", str(witness), head)
        await run("audit", "witness", "import", head, *where)
        await run(
            "draft",
            "import",
            "demo/models/demo-coder-eagle31",
            "--target",
            "demo/models/demo-coder",
            "--vouch",
            *where,
        )
        assert await appliance.stop() == 0
        await run("audit", "verify", *where)
        (SITE / "keys.json").write_text(
            json.dumps(
                {
                    "demo": appliance.key,
                    "clinic": key,
                    "batch": batch.id,
                    "output": batch.output_file_id,
                    "witness": named,
                }
            )
        )


asyncio.run(main())

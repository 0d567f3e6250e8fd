"""
Loaded by Python in each process of a worker: makes the model's executor fail once, in the worst way.

In the first step that has both a new request and draft tokens of another one, `execute_model` raises an
exception that quotes everything it was given.  What it quoted is left in `FAILED_STEP`, for the test.
"""

import importlib.abc
import importlib.machinery
import json
import os
import sys
from pathlib import Path

MODULE = "vllm.v1.worker.cpu_worker"


class Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name != MODULE:
            return None
        sys.meta_path.remove(self)
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        load = spec.loader.exec_module

        def exec_module(module):
            load(module)
            fail_once(module.CPUWorker)

        spec.loader.exec_module = exec_module
        return spec


def fail_once(worker_class):
    record = Path(os.environ["TMPDIR"]) / "failed-step.json"
    execute = worker_class.execute_model

    def execute_model(worker, output):
        drafts = {request: list(ids) for request, ids in output.scheduled_spec_decode_tokens.items()}
        if output.scheduled_new_reqs and any(drafts.values()) and not record.exists():
            prompts = {request.req_id: request.prompt_token_ids for request in output.scheduled_new_reqs}
            record.write_text(json.dumps({"drafts": drafts, "prompts": prompts}))
            raise ValueError(f"cannot execute {output}: {prompts}, {drafts}")
        return execute(worker, output)

    worker_class.execute_model = execute_model


sys.meta_path.insert(0, Finder())

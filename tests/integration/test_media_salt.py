"""
Under which name vLLM finds an image in its caches, by vLLM's own functions.

In a process of its own: importing vLLM takes seconds and configures the logs of the process.
"""

import json
import subprocess
import sys

import pytest

pytestmark = pytest.mark.worker

PROGRAM = """
import asyncio, json, sys
from types import SimpleNamespace
from PIL import Image
from vllm.multimodal.parse import MultiModalDataParser
from vllm.renderers.base import BaseRenderer
from vllm.v1.engine.input_processor import InputProcessor
from vllm.v1.core.encoder_cache_manager import EncoderCacheManager

if sys.argv[1] == "salted":
    from appliance.serving.vllm.media_salt import salt_media
    salt_media(BaseRenderer)

class Processor:
    info = SimpleNamespace(parse_mm_data=MultiModalDataParser().parse_mm_data)
    def apply(self, inputs, timing):
        return {"type": "multimodal", "hashes": inputs.get_mm_hashes("the model", "blake3")}

class Renderer(BaseRenderer):
    def __init__(self):
        self.api_process_rank = 0
        self.model_config = SimpleNamespace(multimodal_config=None)
        self._mm_req_counter = SimpleNamespace(inc=lambda by: by)
        self._mm_timing_registry = {None: None, "renderer0-mm-1": None}
        self._mm_processor_cache = self._mm_processor_only_cache = None
    def get_mm_processor(self):
        return Processor()
    def update_mm_cache_stats(self):
        pass
    async def _process_multimodal_async(self, *given, **named):
        return self._process_multimodal(*given, **named)
    render_messages = get_tokenizer = None
Renderer.__abstractmethods__ = frozenset()

def identify(salt, colour, options=None, is_async=False):
    prompt = {"prompt_token_ids": [1], "multi_modal_data": {"image": [Image.new("RGB", (8, 8), colour)]}}
    if salt:
        prompt["cache_salt"] = salt
    if options:
        prompt["media_io_kwargs"] = options
    renderer = Renderer()
    if is_async:
        made = asyncio.run(renderer._process_tokens_async(prompt))
    else:
        made = renderer._process_tokens(prompt)
    (name,) = made["hashes"]["image"]
    return InputProcessor._get_mm_identifier(SimpleNamespace(lora_config=None), name, None)

def is_cached(first, second):
    cache = EncoderCacheManager(cache_size=8)
    request = lambda name: SimpleNamespace(
        request_id=name, mm_features=[SimpleNamespace(identifier=name)], get_num_encoder_embeds=lambda at: 1
    )
    cache.allocate(request(first), 0)
    return cache.check_and_update_cache(request(second), 0)

a, b, none = (identify(salt, "red") for salt in ("tenant a", "tenant b", None))
print(json.dumps({
    "tenants": is_cached(a, b),
    "same tenant": is_cached(a, identify("tenant a", "red")),
    "same tenant, both ways": is_cached(a, identify("tenant a", "red", is_async=True)),
    "other image": is_cached(a, identify("tenant a", "blue")),
    "other options": is_cached(a, identify("tenant a", "red", {"image": {"image_mode": "L"}})),
    "shared": is_cached(none, identify(None, "red")),
    "salted and shared": is_cached(none, a),
}))
"""


def found(how: str) -> dict[str, bool]:
    """What is found in the encoder's cache after another request."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, how], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_an_image_of_another_tenant_is_not_found_in_the_caches():
    """The name is salted; without a salt, as with a shared prefix cache, images are shared."""
    assert found("salted") == {
        "tenants": False,
        "same tenant": True,
        "same tenant, both ways": True,
        "other image": False,
        "other options": False,
        "shared": True,
        "salted and shared": False,
    }


@pytest.mark.slow
def test_vllm_alone_still_shares_images_between_salts():
    """If an upgrade changes that, the product's own salt is not needed any more."""
    assert found("vllm")["tenants"]

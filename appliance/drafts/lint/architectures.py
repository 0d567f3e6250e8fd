"""
Architectures that vLLM 0.32 can pair: EAGLE 3 drafts, and the targets they work with.

Copied from `vllm/model_executor/models/registry.py` and the classes it names, because only the worker's
plugin imports vllm; a test compares it with the installed vLLM.
"""

from collections.abc import Mapping
from enum import StrEnum
from types import MappingProxyType


class Family(StrEnum):
    """The class vLLM loads a draft with."""

    LLAMA = "llama"
    """`llama_eagle3.py`."""
    QWEN3 = "qwen3"
    """`qwen3_eagle3.py`: Llama with norms on queries and keys."""
    MLA = "mla"
    """`deepseek_eagle3.py`: DeepSeek's latent attention; Kimi's drafts use it."""


DRAFT_FAMILIES: Mapping[str, Family] = MappingProxyType(
    {
        "Eagle3LlamaForCausalLM": Family.LLAMA,
        "LlamaForCausalLMEagle3": Family.LLAMA,
        "Eagle3MiniMaxM2ForCausalLM": Family.LLAMA,
        "Eagle3Qwen2_5vlForCausalLM": Family.LLAMA,
        "Eagle3Qwen3vlForCausalLM": Family.LLAMA,
        "Eagle3Qwen3ForCausalLM": Family.QWEN3,
        "Eagle3DeepseekV2ForCausalLM": Family.MLA,
        "Eagle3DeepseekV3ForCausalLM": Family.MLA,
    }
)

TARGETS = frozenset(
    """
    AfmoeForCausalLM ApertusForCausalLM ArceeForCausalLM Cohere2MoeForCausalLM
    CohereCompassForConditionalGeneration Cosmos3ForConditionalGeneration CwmForCausalLM
    DeepseekForCausalLM DeepseekV2ForCausalLM DeepseekV32ForCausalLM DeepseekV3ForCausalLM
    DeepseekV41ForCausalLM DeepseekV4ForCausalLM DeepseekV4ForConditionalGeneration
    Emu3ForConditionalGeneration Ernie4_5ForCausalLM Exaone4_5_ForConditionalGeneration
    FlexOlmoForCausalLM GPTBigCodeForCausalLM GPTNeoXForCausalLM Gemma4ForCausalLM
    Gemma4ForConditionalGeneration Gemma4UnifiedForConditionalGeneration Glm5NextForCausalLM
    Glm5NextForConditionalGeneration GlmForCausalLM GlmMoeDsaForCausalLM GptOssForCausalLM
    GraniteForCausalLM GraniteSWAForCausalLM HunYuanDenseV1ForCausalLM HunYuanMoEV1ForCausalLM
    HunYuanVLForConditionalGeneration IQuestCoderForCausalLM InternLM3ForCausalLM
    InternS1ProForConditionalGeneration InternS2MobiusForConditionalGeneration
    InternS2PreviewForConditionalGeneration Jais2ForCausalLM K2HorizonForCausalLM
    KimiK25ForConditionalGeneration KimiK3ForConditionalGeneration KimiLinearForCausalLM
    LLaMAForCausalLM LagunaForCausalLM LightOnOCRForConditionalGeneration Llama4ForCausalLM
    Llama4ForConditionalGeneration LlamaForCausalLM LlavaForConditionalGeneration MellumForCausalLM
    MiMoForCausalLM MiMoV2FlashForCausalLM MiMoV2ForCausalLM MiMoV2OmniForCausalLM MiniCPM3ForCausalLM
    MiniCPMForCausalLM MiniCPMV4_6ForConditionalGeneration MiniCPMV4_7ForConditionalGeneration
    MiniMaxM2ForCausalLM MiniMaxM3SparseForCausalLM MiniMaxM3SparseForConditionalGeneration
    Ministral3ForCausalLM Mistral3ForConditionalGeneration MistralForCausalLM MistralLarge3ForCausalLM
    MuseGlimmerForCausalLM MuseGlimmerForConditionalGeneration NanbeigeForCausalLM NemotronHForCausalLM
    NemotronHPuzzleForCausalLM NemotronH_Nano_Omni_Reasoning_V3 NemotronH_Nano_VL_V2
    NemotronH_Omni_Reasoning_V3 NemotronH_Super_Omni_Reasoning_V3 Olmo2ForCausalLM Olmo3ForCausalLM
    OlmoForCausalLM OpenCUAForConditionalGeneration Phi3ForCausalLM PhiForCausalLM
    PixtralForConditionalGeneration Plamo3ForCausalLM Qwen2ForCausalLM
    Qwen2_5_VLForConditionalGeneration Qwen3ASRForConditionalGeneration Qwen3ASRRealtimeGeneration
    Qwen3ForCausalLM Qwen3MoeForCausalLM Qwen3NextForCausalLM Qwen3OmniMoeForConditionalGeneration
    Qwen3VLForConditionalGeneration Qwen3VLMoeForConditionalGeneration Qwen3_5ForCausalLM
    Qwen3_5ForConditionalGeneration Qwen3_5MoeForCausalLM Qwen3_5MoeForConditionalGeneration
    Qwen4ExpForConditionalGeneration SarvamMLAForCausalLM SeedOssForCausalLM SmolLM3ForCausalLM
    Starcoder2ForCausalLM Step1ForCausalLM TeleChat2ForCausalLM TeleChat3ForCausalLM TeleFLMForCausalLM
    TransformersForCausalLM TransformersMoEForCausalLM TransformersMultiModalForCausalLM
    TransformersMultiModalMoEForCausalLM VaultGemmaForCausalLM VibeVoiceAsrForConditionalGeneration
    """.split()  # noqa: SIM905 - one word a line would be a hundred lines
)
"""Architectures whose class is a `SupportsEagle3`."""

"""
The demo pair's tokenizer: byte-level BPE, by default of 2,048 entries, with a chat template.
"""

from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

VOCABULARY = 2048
USER, ASSISTANT, SYSTEM, END, BEGIN = (
    "<|user|>",
    "<|assistant|>",
    "<|system|>",
    "<|end|>",
    "<|begin|>",
)
CHAT_TEMPLATE = (
    "{{ '<|begin|>' }}"
    "{% for message in messages %}"
    "{% if message['content'] is string %}{% set text = message['content'] %}"
    "{% else %}{% set text = message['content'] | map(attribute='text') | join('') %}{% endif %}"
    "{{ '<|' + message['role'] + '|>' + text + '<|end|>' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def train_tokenizer(
    texts: list[str], directory: Path, vocabulary: int = VOCABULARY
) -> PreTrainedTokenizerFast:
    """Learn the merges from `texts` and write the tokenizer's files to `directory`."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(
        texts,
        trainers.BpeTrainer(
            vocab_size=vocabulary,
            special_tokens=[BEGIN, END, SYSTEM, USER, ASSISTANT],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=BEGIN,
        eos_token=END,
        pad_token=END,
        extra_special_tokens=[SYSTEM, USER, ASSISTANT],
        clean_up_tokenization_spaces=False,
        model_max_length=2048,
    )
    wrapped.chat_template = CHAT_TEMPLATE
    wrapped.save_pretrained(directory)
    return wrapped

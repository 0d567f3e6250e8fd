"""Rendering gives the worker's tokens, or a reason."""

import io
import json
import subprocess
import sys
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from appliance.drafts.harvest.conversation import EOS, Conversation, PromptSource, SampledAnswer, Skipped
from appliance.drafts.harvest.rendering import render
from appliance.drafts.harvest.tokenizer import TargetTokenizer, digest_tokenizer
from appliance.drafts.harvest.tokenizer_process import answer_all
from appliance.errors import DraftStorageError
from tests.unit.drafts.harvest.harvest_site import LetterChild, LetterTokenizer

SECRET = "a secret of the tenant"


def user(text, **more):
    return PromptSource(messages=({"role": "user", "content": text},), **more)


def tokens(asked, answer, prompt, completion, tokenizer=None):
    """What a child would answer."""
    child = LetterChild(tokenizer)
    talk = Conversation(prompt=asked, answer=answer)
    return child.tokenize(talk, prompt_tokens=prompt, completion_tokens=completion)


def text_of(token_ids):
    return LetterTokenizer().decode(
        list(token_ids), skip_special_tokens=False, clean_up_tokenization_spaces=False
    )


def test_prompt_and_answer_are_tokenized_with_the_template():
    prompt, answer = tokens(user("hi"), SampledAnswer(text="yo", end=EOS), 6, 3)
    assert text_of(prompt) == "<|begin|><|user|>hi<|end|><|assistant|>"
    assert text_of(answer) == "yo<|end|>"
    assert tokens(user("hi"), SampledAnswer(text="yo", end=6), 6, 3)[1][-1] == 6
    assert text_of(tokens(user("hi"), SampledAnswer(text="yo", end=None), 6, 2)[1]) == "yo"


def test_different_token_count_is_a_reason():
    ended = SampledAnswer(text="yo", end=EOS)
    assert tokens(user("hi"), ended, 7, 3) is Skipped.PROMPT_DIFFERS
    assert tokens(user("hi"), ended, 6, 4) is Skipped.ANSWER_DIFFERS
    assert tokens(user("hi"), ended, 6, 2) is Skipped.ANSWER_DIFFERS


def test_answer_tokenized_differently_is_skipped():
    merging = LetterTokenizer(merges=True)
    assert tokens(user("hi"), SampledAnswer(text="abc", end=EOS), 6, 3, merging) == (
        tuple(merging.encode("<|begin|><|user|>hi<|end|><|assistant|>", add_special_tokens=False)),
        (9, ord("c") + 10, 1),
    )
    assert tokens(user("hi"), SampledAnswer(text="abc", end=EOS), 6, 4, merging) is Skipped.ANSWER_DIFFERS


def test_answer_that_does_not_round_trip_is_skipped():
    class Lowering(LetterTokenizer):
        def encode(self, text, *, add_special_tokens):
            return super().encode(text.lower(), add_special_tokens=add_special_tokens)

    assert tokens(user("hi"), SampledAnswer(text="Yo", end=EOS), 6, 3, Lowering()) is Skipped.ANSWER_DIFFERS
    assert len(tokens(user("hi"), SampledAnswer(text="yo", end=EOS), 6, 3, Lowering())[1]) == 3


def test_several_texts_in_a_message_are_tried_both_ways():
    """With a template for lists and one for texts; the one with the worker's count is right."""
    asked = user(["a", "b"])
    ended = SampledAnswer(text="yo", end=EOS)
    assert text_of(tokens(asked, ended, 7, 3)[0]) == "<|begin|><|user|>a\nb<|end|><|assistant|>"
    listing = LetterTokenizer(lists=True)
    assert text_of(tokens(asked, ended, 7, 3, listing)[0]) == "<|begin|><|user|>a|b<|end|><|assistant|>"


def test_stop_text_and_tokens_overlapping_it_are_removed():
    asked = PromptSource(text="x")
    stopped = SampledAnswer(text="yo", end=None, stop="..")
    assert text_of(tokens(asked, stopped, 2, 4)[1]) == "yo"
    merging = LetterTokenizer(merges=True)
    assert text_of(tokens(asked, SampledAnswer(text="ya", end=None, stop="b"), 2, 2, merging)[1]) == "y"


def test_tokens_and_texts_are_prompts_too():
    """Tokens unchanged, text with the tokenizer's prefix."""
    ended = SampledAnswer(text="yo", end=EOS)
    assert tokens(PromptSource(tokens=(5, 6)), ended, 2, 3)[0] == (5, 6)
    assert tokens(PromptSource(text="x"), ended, 2, 3)[0] == (0, ord("x") + 10)


def test_request_arguments_reach_the_template_except_fixed_ones():
    ended = SampledAnswer(text="yo", end=EOS)
    more = {"flavour": "zz", "tokenize": False, "add_generation_prompt": False, "chat_template": "x"}
    prompt, _ = tokens(user("hi", arguments=more), ended, 8, 3)
    assert text_of(prompt).startswith("<|begin|>zz<|user|>")
    assert text_of(prompt).endswith("<|assistant|>")


def test_tokenizer_without_a_last_token_ends_nothing():
    endless = LetterTokenizer()
    endless.eos_token_id = None
    assert tokens(user("hi"), SampledAnswer(text="yo", end=EOS), 6, 3, endless) is Skipped.ANSWER_DIFFERS


@given(st.text("abxyz<|end>", max_size=12), st.text("abxyz<|end>", min_size=1, max_size=12), st.booleans())
def test_accepted_tokens_decode_to_the_answer(prompt, answer, merges):
    tokenizer = LetterTokenizer(merges=merges)
    spelt = tokenizer.encode(answer, add_special_tokens=False)
    found = tokens(
        PromptSource(text=prompt),
        SampledAnswer(text=answer, end=EOS),
        1 + len(prompt),
        len(spelt) + 1,
        tokenizer,
    )
    if not isinstance(found, Skipped):
        assert text_of(found[0]) == "<|begin|>" + prompt
        assert text_of(found[1]) == answer + "<|end|>"


def test_no_job_ends_the_child_or_returns_content():
    """Library errors may quote the text."""

    class Raising(LetterTokenizer):
        def encode(self, text, *, add_special_tokens):
            raise ValueError(text)

    asked = json.dumps({"tokens": None, "text": SECRET, "answer": SECRET, "prompt_tokens": 1})
    answers = io.StringIO()
    answer_all(Raising(), [asked, "no json at all " + SECRET, asked], answers)
    assert [json.loads(line) for line in answers.getvalue().splitlines()] == [{"skipped": "unreadable"}] * 3


def test_template_that_raises_is_a_prompt_that_differs():
    class Picky(LetterTokenizer):
        def apply_chat_template(self, conversation, **more):
            raise RuntimeError(conversation)

    assert tokens(user("hi"), SampledAnswer(text="yo", end=EOS), 6, 3, Picky()) is Skipped.PROMPT_DIFFERS


# The process.


def child_of(code):
    """A child that runs this code in place of ours."""
    return subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )


def end(child):
    child.kill()
    for pipe in (child.stdin, child.stdout):
        with suppress(OSError):
            pipe.close()
    child.wait()


@pytest.mark.parametrize(
    "code", ["raise SystemExit", "print('nonsense', flush=True)", "import time; time.sleep(60)"]
)
def test_dead_or_silent_child_is_a_storage_error(code):
    child = child_of(code)
    try:
        with pytest.raises(DraftStorageError, match="tokenizer"):
            TargetTokenizer(child).ask("{}", 1.0)
    finally:
        end(child)


def test_digest_of_a_tokenizer_is_of_its_files_and_of_no_others(tmp_path):
    """Weights and the model's config may change without it."""
    (tmp_path / "tokenizer.json").write_text("{}")
    (tmp_path / "config.json").write_text("{}")
    before = digest_tokenizer(tmp_path)
    (tmp_path / "config.json").write_text('{"x": 1}')
    (tmp_path / "model.safetensors").write_bytes(b"x")
    assert digest_tokenizer(tmp_path) == before
    (tmp_path / "chat_template.jinja").write_text("x")
    assert digest_tokenizer(tmp_path) != before


def test_render_says_what_it_made_as_json_can():
    job = {
        "messages": None,
        "tools": [],
        "arguments": {},
        "text": "x",
        "tokens": None,
        "answer": "y",
        "end": None,
        "stop": "",
        "prompt_tokens": 2,
        "completion_tokens": 1,
    }
    assert json.loads(json.dumps(render(LetterTokenizer(), job))) == {"prompt": [0, 130], "answer": [131]}

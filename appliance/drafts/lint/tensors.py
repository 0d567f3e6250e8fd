"""Rules on the tensors in a draft's file, except quantized ones: their scheme decides their shapes.  Pure."""

from collections.abc import Iterator

from appliance.drafts.lint.layers import Expected, expected_tensors, fused_tensors
from appliance.drafts.lint.pair import PREFIX, Pair
from appliance.drafts.lint.rules import Finding, Rule

MAP, HEAD, EMBEDDING = "d2t", "lm_head.weight", "embed_tokens.weight"
OFFSETS = frozenset({"I64", "U64", "I32", "U32", "F32", "F64"})
"""Types that can hold the offset between any two token ids."""
JUDGED_ELSEWHERE = frozenset({MAP, HEAD, EMBEDDING, "fc.weight", "input_norm.weight"})
SHAPES = (Rule.ATTENTION_SHAPE, Rule.MLA_SHAPE, Rule.MLP_SHAPE, Rule.NORM_SHAPE)


def vocabulary_problems(pair: Pair) -> Iterator[Finding]:
    shape, vocabulary = pair.shape, pair.target_size("vocab_size")
    whole, drafted = shape.size("vocab_size"), shape.draft_vocab_size
    if None not in {whole, vocabulary} and whole != vocabulary:
        yield Finding(Rule.VOCAB_SIZE, f"its vocab_size is {whole}, the target's is {vocabulary}")
    if drafted is None or vocabulary is None:
        return
    if drafted > vocabulary:
        message = f"its draft_vocab_size is {drafted}, more than the target's {vocabulary} tokens"
        yield Finding(Rule.DRAFT_VOCAB_SIZE, message)
    yield from _map_problems(pair, drafted, vocabulary)
    yield from _shared_problems(pair, drafted, vocabulary)


def _map_problems(pair: Pair, drafted: int, vocabulary: int) -> Iterator[Finding]:
    found = pair.tensors.get(MAP)
    if found is None:
        if drafted < vocabulary:
            message = f"it drafts {drafted} of {vocabulary} tokens, but has no d2t to map them"
            yield Finding(Rule.D2T_MISSING, message)
        return
    if drafted == vocabulary:
        message = f"it has a d2t, but drafts all of the target's {vocabulary} tokens"
        yield Finding(Rule.D2T_UNEXPECTED, message)
    elif found.shape != (drafted,):
        yield Finding(Rule.D2T_SHAPE, f"d2t is {found.shape} for a draft_vocab_size of {drafted}")
    elif found.dtype not in OFFSETS:
        yield Finding(Rule.D2T_DTYPE, f"d2t is stored as {found.dtype}")


def _shared_problems(pair: Pair, drafted: int, vocabulary: int) -> Iterator[Finding]:
    """Head and embedding: the draft's own, or shared with the target."""
    shape, hidden, wide = pair.shape, pair.shape.size("hidden_size"), pair.target_size("hidden_size")
    # Where the widths are not known, or the draft is not for this target at all, that is found elsewhere.
    can_share = None in {hidden, wide} or hidden == wide or shape.target_hidden_size != wide
    has_head = any(name.startswith("lm_head.") for name in pair.tensors)
    if not has_head and not (drafted >= vocabulary and can_share):
        message = f"it has no lm_head.weight, and the target's is not ({drafted}, {hidden})"
        yield Finding(Rule.LM_HEAD_MISSING, message)
    if EMBEDDING not in pair.tensors and not can_share:
        message = f"it has no embed_tokens.weight, and the target's is {wide} wide, not {hidden}"
        yield Finding(Rule.EMBED_TOKENS_MISSING, message)
    rows = {HEAD: drafted, EMBEDDING: shape.size("vocab_size")}
    for name, rule in ((HEAD, Rule.LM_HEAD_SHAPE), (EMBEDDING, Rule.EMBED_TOKENS_SHAPE)):
        info, expected = pair.tensors.get(name), Expected(shape=(rows[name], hidden), rule=rule)
        if info is not None and not pair.packed and not expected.fits(info.shape):
            yield Finding(rule, f"{name} is {info.shape}, and its config needs {expected}")


def tensor_problems(pair: Pair) -> Iterator[Finding]:
    if prefixed := sorted(name for name in pair.draft.tensors if name.startswith(PREFIX)):
        message = f"its tensors have names such as {prefixed[0]}, which vLLM prefixes itself"
        yield Finding(Rule.MODEL_PREFIX, message)
    if pair.undeclared:
        first = pair.undeclared[0]
        message = f"{first} is stored as {pair.tensors[first].dtype}, and its config declares no quantization"
        yield Finding(Rule.QUANTIZATION_UNDECLARED, message)
    if pair.packed:
        return
    expected = fused_tensors(expected_tensors(pair.shape), pair.tensors)
    for rule in SHAPES:
        wrong = [
            f"{name} is {pair.tensors[name].shape}, and its config needs {place}"
            for name, place in expected.items()
            if place.rule is rule and name in pair.tensors and not place.fits(pair.tensors[name].shape)
        ]
        if wrong:
            yield Finding(rule, wrong[0] + _more(wrong))
    if missing := [name for name, place in expected.items() if not (place.optional or name in pair.tensors)]:
        yield Finding(Rule.TENSOR_MISSING, f"{missing[0]} is not in its file{_more(missing)}")
    strange = sorted(name for name in pair.tensors if name not in expected and not _is_known(name, pair))
    if unknown := [name for name in strange if not name.endswith(".bias")]:
        message = f"it has {unknown[0]}, which vLLM has no place for{_more(unknown)}"
        yield Finding(Rule.TENSOR_UNKNOWN, message)
    if ignored := [name for name in strange if name.endswith(".bias")]:
        message = f"it has {ignored[0]}, and its config announces no such bias{_more(ignored)}"
        yield Finding(Rule.BIAS_IGNORED, message)


def _is_known(name: str, pair: Pair) -> bool:
    """Whether vLLM loads a tensor outside the layers, or another rule checks it."""
    if name.startswith("fc_norm."):
        places = {f"fc_norm.{index}.weight" for index in range(pair.shape.aux_count)}
        return name in places or not pair.shape.flag("fc_norm")
    return name in JUDGED_ELSEWHERE


def _more(names: list[str]) -> str:
    return f", and {len(names) - 1} more" if len(names) > 1 else ""

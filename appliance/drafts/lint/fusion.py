"""Rules on how a draft reads its target's hidden states, and on its training record.  Pure."""

import json
from collections.abc import Iterator

from appliance.drafts.lint.architectures import Family
from appliance.drafts.lint.layers import Expected
from appliance.drafts.lint.pair import Pair
from appliance.drafts.lint.rules import Finding, Rule
from appliance.drafts.lint.shape import AUX_IDS, Size, default_aux_layers
from appliance.drafts.training_record import is_count

INPUT_NORM = "input_norm.weight"


def fusion_problems(pair: Pair) -> Iterator[Finding]:
    if pair.shape.fuses:
        yield from _fc_problems(pair)
        yield from _norm_problems(pair)
        yield from _layer_problems(pair)
    else:
        message = "its eagle_config sets use_aux_hidden_state: false, which one of vLLM's runners ignores"
        yield Finding(Rule.AUX_HIDDEN_STATES_OFF, message)
    yield from _record_problems(pair)


def _fc_problems(pair: Pair) -> Iterator[Finding]:
    shape, fc = pair.shape, pair.tensors.get("fc.weight")
    if fc is None and not (pair.packed and any(name.startswith("fc.") for name in pair.tensors)):
        yield Finding(Rule.FC_MISSING, "it has no fc.weight")
    if fc is None or pair.packed:
        return
    needed = Expected(shape=(shape.size("hidden_size"), _fused_width(pair)), rule=Rule.FC_SHAPE)
    if not needed.fits(fc.shape):
        what = f"its config with {shape.aux_count} aux layers needs {needed}"
        yield Finding(Rule.FC_SHAPE, f"fc.weight is {fc.shape}, and {what}")


def _fused_width(pair: Pair) -> Size:
    width = pair.shape.target_hidden_size
    return None if width is None else width * pair.shape.aux_count


def _norm_problems(pair: Pair) -> Iterator[Finding]:
    shape, is_mla = pair.shape, pair.shape.family is Family.MLA
    if shape.flag("fc_norm") and shape.norm_before_fc and not is_mla:
        yield Finding(Rule.NORMS_COMBINED, "its config sets both fc_norm and norm_before_fc")
    yield from _fc_norm_problems(pair)
    yield from _mla_norm_problems(pair) if is_mla else _input_norm_problems(pair)
    if shape.flag("fc_norm") and not shape.flag("norm_output") and pair.record.norm_output is None:
        message = "its config sets fc_norm, but not norm_output; EAGLE 3.1 has both"
        yield Finding(Rule.NORM_OUTPUT_UNSET, message)


def _fc_norm_problems(pair: Pair) -> Iterator[Finding]:
    found = sorted(name for name in pair.tensors if name.startswith("fc_norm."))
    if pair.shape.flag("fc_norm"):
        names = [f"fc_norm.{index}.weight" for index in range(pair.shape.aux_count)]
        if problem := _absent_or_misshapen(pair, names, pair.shape.target_hidden_size):
            yield Finding(Rule.FC_NORM_WEIGHTS, f"its config sets fc_norm, but {problem}")
    elif found:
        yield Finding(Rule.FC_NORM_FLAG, f"it has {found[0]}, but its config does not set fc_norm")


def _input_norm_problems(pair: Pair) -> Iterator[Finding]:
    if pair.shape.norm_before_fc:
        if problem := _absent_or_misshapen(pair, [INPUT_NORM], _fused_width(pair)):
            yield Finding(Rule.NORM_BEFORE_FC_WEIGHTS, f"its config sets norm_before_fc, but {problem}")
    elif INPUT_NORM in pair.tensors:
        message = f"it has {INPUT_NORM}, but its config does not set norm_before_fc"
        yield Finding(Rule.NORM_BEFORE_FC_FLAG, message)


def _mla_norm_problems(pair: Pair) -> Iterator[Finding]:
    if pair.shape.norm_before_fc or INPUT_NORM in pair.tensors:
        what = "its config sets norm_before_fc" if pair.shape.norm_before_fc else f"it has {INPUT_NORM}"
        message = f"{what}, which vLLM 0.32 has no place for in an MLA draft"
        yield Finding(Rule.NORM_BEFORE_FC_IGNORED, message)


def _absent_or_misshapen(pair: Pair, names: list[str], width: Size) -> str:
    for name in names:
        info = pair.tensors.get(name)
        if info is None:
            return f"{name} is missing"
        if not (needed := Expected(shape=(width,), rule=Rule.NORM_SHAPE)).fits(info.shape):
            return f"{name} is {info.shape}, not {needed}"
    return ""


def _layer_problems(pair: Pair) -> Iterator[Finding]:
    first, second = pair.shape.aux_layers(AUX_IDS), pair.shape.aux_layers("layer_ids")
    depth, named = pair.target_size("num_hidden_layers"), first or second
    default = default_aux_layers(depth)
    if not named and pair.record.aux_layers != default:
        message = "it names no eagle_aux_hidden_state_layer_ids, so vLLM picks layers by itself"
        yield Finding(Rule.AUX_LAYERS_MISSING, message)
    if default and set(map(str, first or default)) != set(map(str, second or default)):
        where = "eagle_config.eagle_aux_hidden_state_layer_ids" if first else "eagle_config.layer_ids"
        message = f"it names its aux layers only in {where}, and one of vLLM's runners would take {default}"
        yield Finding(Rule.AUX_LAYERS_NESTED, message)
    used = named or default
    shown = ", ".join(str(layer) for layer in used)
    if not used:
        return
    if not all(is_count(layer) and (depth is None or layer <= depth) for layer in used):
        yield Finding(Rule.AUX_LAYERS_RANGE, f"its aux layers are {shown}, and the target has {depth} layers")
        return
    if len(set(used)) != pair.shape.aux_count:
        message = f"its aux layers are {shown}, where it fuses {pair.shape.aux_count} different ones"
        yield Finding(Rule.AUX_LAYERS_COUNT, message)
    elif named and list(map(str, named)) != list(map(str, pair.shape.captured_layers(depth))):
        message = f"its aux layers are {shown}, and vLLM passes them in ascending order"
        yield Finding(Rule.AUX_LAYERS_ORDER, message)


def _record_problems(pair: Pair) -> Iterator[Finding]:
    shape, record = pair.shape, pair.record
    if pair.malformed:
        message = f"its training.json has invalid values of {', '.join(pair.malformed)}"
        yield Finding(Rule.TRAINING_RECORD_MALFORMED, message)
    flags = (
        ("norm_output", Rule.TRAINING_NORM_OUTPUT, shape.flag("norm_output"), record.norm_output),
        ("fc_norm", Rule.TRAINING_NORMS, shape.flag("fc_norm"), record.fc_norm),
        ("norm_before_fc", Rule.TRAINING_NORMS, shape.norm_before_fc, record.norm_before_fc),
    )
    for name, rule, flag, was in flags:
        if was is not None and was != flag:
            message = f"its config has {name}: {json.dumps(flag)}, its training.json {json.dumps(was)}"
            yield Finding(rule, message)
    captured = shape.captured_layers(pair.target_size("num_hidden_layers"))
    if record.aux_layers is not None and shape.fuses and record.aux_layers != captured:
        trained, served = (", ".join(map(str, layers)) for layers in (record.aux_layers, captured))
        message = f"its training.json says it was trained on layers {trained}; vLLM would pass it {served}"
        yield Finding(Rule.TRAINING_AUX_LAYERS, message)

"""
The trained head is the served head.

The reference is not the training's own unrolling: it serves one row after the other, as vLLM does.
"""

import json
from dataclasses import replace

import pytest

torch = pytest.importorskip("torch")
from safetensors.torch import load_file, save_file  # noqa: E402

from appliance.drafts.lint.lint import lint_pair  # noqa: E402
from appliance.drafts.training.head_shape import HeadShape  # noqa: E402
from appliance.drafts.training.small.files import load_head, new_head, save_head, weight_name  # noqa: E402
from appliance.drafts.training.small.head import DraftHead, StepCache  # noqa: E402
from appliance.drafts.training.small.loss import unrolled_loss  # noqa: E402
from appliance.drafts.training.small.target import Observed, TokenBatch, load_target  # noqa: E402
from appliance.drafts.training.small.trainer import collate, concatenate, plain_batch  # noqa: E402
from appliance.drafts.training.windows import TextWindow, cut  # noqa: E402
from appliance.errors import DraftRefusedError  # noqa: E402
from appliance.serving.weights import inspect_weights  # noqa: E402
from tests.unit.drafts.training.tiny import VOCABULARY, WIDTH, Text, text, write_target  # noqa: E402

SHAPE = HeadShape(
    width=WIDTH,
    target_width=WIDTH,
    inner=48,
    heads=4,
    kv_heads=2,
    head_dim=8,
    vocabulary=VOCABULARY,
    drafted=VOCABULARY,
    epsilon=1e-6,
    positions=512,
    aux_layers=(1, 2, 3),
    fc_norm=True,
    norm_output=True,
    rope={"rope_type": "default", "rope_theta": 10000.0},
)
SHAPES = {
    "EAGLE 3.1": SHAPE,
    "EAGLE 3": replace(SHAPE, fc_norm=False, norm_output=False),
    "norm before fc": replace(SHAPE, fc_norm=False, norm_before_fc=True),
    "norm before the residual": replace(SHAPE, norm_before_residual=True, norm_output=False),
    "scaled": replace(SHAPE, logit_scale=0.5, rope={"rope_type": "linear", "rope_theta": 5e5, "factor": 4.0}),
    "sliding window": replace(SHAPE, sliding_window=5),
    "half the vocabulary": replace(SHAPE, drafted=30),
}


def made(shape: HeadShape, seed: int = 3) -> DraftHead:
    """A head whose norms are not all ones."""
    torch.manual_seed(seed)
    head = DraftHead(shape)
    with torch.no_grad():
        for parameter in head.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.rand_like(parameter))
    if shape.drafted < shape.vocabulary:
        head.proposes = torch.arange(shape.drafted) * 2
    return head


def seen(batch: int = 2, time: int = 14, seed: int = 4) -> tuple[TokenBatch, Observed]:
    """A batch from the middle of two texts, and a target's opinions on it."""
    torch.manual_seed(seed)
    states = [torch.randn(batch, time, WIDTH) for _ in range(3)]
    ids = torch.randint(0, VOCABULARY, (batch, time))
    positions = torch.tensor([[7], [100]])[:batch] + torch.arange(time)
    mask = torch.rand(batch, time) < 0.7
    observed = Observed(
        captured=states,
        embeds=torch.randn(batch, time, WIDTH),
        logits=torch.randn(batch, time, VOCABULARY) * 3,
    )
    return TokenBatch(ids=ids, positions=positions, mask=mask), observed


def served(head: DraftHead, observed: Observed, batch: TokenBatch, row: int, start: int, unroll: int):
    """Outputs of a draft from one row, computed token by token with a cache of its own."""
    shape = head.shape
    fused = head.fuse([state[row : row + 1] for state in observed.captured])
    keys, values, outputs = [], [], []
    fed = None
    for place in range(start + unroll):
        # Up to the row the cache is filled from the target's states, after it from its own output.
        given = fused[:, place : place + 1] if place <= start else fed
        embeds = observed.embeds[row : row + 1, place + 1 : place + 2]
        normed = head.hidden_norm(given)
        residual = normed if shape.norm_before_residual else given
        mixed = torch.cat([head.input_layernorm(embeds), normed], -1)
        position = batch.positions[row : row + 1, :1] + place
        cos, sin = head._rotary(mixed, position)

        def heads(x, count):
            return x.view(1, 1, count, shape.head_dim).transpose(1, 2)

        def turn(x, cos=cos, sin=sin):
            first, second = x.chunk(2, -1)
            return x * cos[:, None] + torch.cat([-second, first], -1) * sin[:, None]

        query = turn(heads(head.q_proj(mixed), shape.heads))
        keys.append(turn(heads(head.k_proj(mixed), shape.kv_heads)).repeat_interleave(2, 1))
        values.append(heads(head.v_proj(mixed), shape.kv_heads).repeat_interleave(2, 1))
        reach = len(keys) if shape.sliding_window is None else shape.sliding_window
        attended = torch.nn.functional.scaled_dot_product_attention(
            query, torch.cat(keys[-reach:], 2), torch.cat(values[-reach:], 2)
        )
        residual = residual + head.o_proj(attended.transpose(1, 2).reshape(1, 1, -1))
        x = head.post_attention_layernorm(residual)
        mlp = head.down_proj(torch.nn.functional.silu(head.gate_proj(x)) * head.up_proj(x))
        residual = residual + mlp
        output = head.norm(residual)
        fed = output if shape.norm_output else residual
        if place >= start:
            outputs.append(output[0, 0])
    return outputs


@pytest.mark.parametrize("name", SHAPES)
def test_trained_head_equals_vllms_head(name):
    """For each row, every draft token's output equals that of serving row by row."""
    head, unroll = made(SHAPES[name]), 3
    batch, observed = seen()
    rows = batch.ids.shape[1] - 1 - unroll
    fed, cache = (
        head.fuse([state[:, :rows] for state in observed.captured]),
        StepCache(head.shape.sliding_window),
    )
    trained = []
    with torch.no_grad():
        for j in range(unroll):
            embeds = observed.embeds[:, 1 + j : 1 + j + rows]
            output, fed = head.step(fed, embeds, batch.positions[:, :rows] + j, cache)
            trained.append(output)
        for row in range(2):
            for start in (0, 3, rows - 1):
                expected = served(head, observed, batch, row, start, unroll)
                for j in range(unroll):
                    torch.testing.assert_close(trained[j][row, start], expected[j], atol=2e-5, rtol=2e-4)


def test_only_distances_matter_to_a_rotary_embedding():
    head = made(SHAPE)
    batch, observed = seen()
    far = TokenBatch(ids=batch.ids, positions=batch.positions + 300, mask=batch.mask)
    losses = [unrolled_loss(head, observed, each, unroll=3, decay=0.9).loss for each in (batch, far)]
    torch.testing.assert_close(losses[0], losses[1], atol=1e-4, rtol=1e-4)
    spread = TokenBatch(ids=batch.ids, positions=batch.positions * 3, mask=batch.mask)
    other = unrolled_loss(head, observed, spread, unroll=3, decay=0.9).loss
    assert abs((other - losses[0]).item()) > 1e-3


@pytest.mark.parametrize("name", ["EAGLE 3.1", "half the vocabulary"])
def test_tokens_outside_the_mask_change_nothing(name):
    """Other target logits outside the answer: the same loss and gradient, bit for bit."""
    head = made(SHAPES[name])
    batch, observed = seen()
    # Logits at t are about token t+1; those of the last are about a token that is not there.
    counts = torch.cat([batch.mask[:, 1:], torch.zeros(2, 1, dtype=torch.bool)], 1)
    # Tokens 0 and 1 can never be predicted.
    counts[:, :1] = False
    other = torch.where(counts[..., None], observed.logits, torch.randn_like(observed.logits) * 9)
    changed = replace(observed, logits=other)
    found = []
    for each in (observed, changed):
        head.zero_grad()
        result = unrolled_loss(head, each, batch, unroll=3, decay=0.9)
        result.loss.backward()
        found.append((result.loss, [parameter.grad.clone() for parameter in head.parameters()], result.hits))
    assert torch.equal(found[0][0], found[1][0])
    assert all(torch.equal(*pair) for pair in zip(found[0][1], found[1][1], strict=True))
    assert found[0][2] == found[1][2]


@pytest.mark.parametrize("token", [2, 3, 4, 9, 13])
def test_token_is_predicted_from_the_logits_before_it(token):
    """Draft token j of row t is text token t+2+j: each masked token is predicted once per draft position."""
    head, unroll = made(SHAPE), 3
    batch, observed = seen(batch=1, time=14 + unroll - 1)
    mask = torch.zeros_like(batch.mask)
    mask[0, token] = True
    batch = replace(batch, mask=mask)
    result = unrolled_loss(head, observed, batch, unroll=unroll, decay=0.9)
    assert result.counts == tuple(int(token - 2 - j >= 0) for j in range(unroll))
    # Make the target agree with draft token 0 there only, independent of the head.
    rows = batch.ids.shape[1] - 1 - unroll
    with torch.no_grad():
        fused = head.fuse([state[:, :rows] for state in observed.captured])
        first, _ = head.step(fused, observed.embeds[:, 1 : 1 + rows], batch.positions[:, :rows], StepCache())
        guess = int(head.logits(first)[0, token - 2].argmax())
    logits = observed.logits.clone()
    logits[0, token - 1] = -50.0
    logits[0, token - 1, guess] = 50.0
    agreed = unrolled_loss(head, replace(observed, logits=logits), batch, unroll=unroll, decay=0.9)
    assert agreed.hits[0] == 1
    assert agreed.accepted >= 1
    logits[0, token - 1, guess] = -90.0
    assert unrolled_loss(head, replace(observed, logits=logits), batch, unroll=unroll, decay=0.9).hits[0] == 0


def test_draft_is_accepted_up_to_its_first_miss():
    """As in greedy verification: a hit after a miss does not count."""
    head = made(SHAPE)
    batch, observed = seen(batch=1, time=10)
    batch = replace(batch, mask=torch.ones_like(batch.mask))
    result = unrolled_loss(head, observed, batch, unroll=3, decay=0.9)
    assert result.drafts == result.counts[0] == 6
    assert result.accepted <= result.hits[0] * 3
    assert result.accepted <= sum(result.hits)


def test_padding_and_neighbours_change_nothing():
    head = made(SHAPE)
    target_logits = torch.randn(1, 40, VOCABULARY)
    texts = [text(12, 3, seed=1), text(30, 3, seed=2)]
    one, both = (
        collate(texts, windows, 3)
        for windows in ([TextWindow(0, 0, 12, 0)], [TextWindow(0, 0, 12, 0), TextWindow(1, 0, 30, 0)])
    )
    torch.manual_seed(6)
    states = [torch.randn(1, 40, WIDTH) for _ in range(3)]
    embeds = torch.randn(1, 40, WIDTH)
    found = []
    for batch in (one, both):
        time = batch.ids.shape[1]
        rows = batch.ids.shape[0]
        observed = Observed(
            captured=[state[:, :time].expand(rows, -1, -1) for state in states],
            embeds=embeds[:, :time].expand(rows, -1, -1),
            logits=target_logits[:, :time].expand(rows, -1, -1),
        )
        alone = replace(batch, mask=batch.mask & (torch.arange(rows) == 0)[:, None])
        found.append(unrolled_loss(head, observed, alone, unroll=3, decay=0.9))
    torch.testing.assert_close(found[0].loss, found[1].loss)
    assert (found[0].hits, found[0].counts) == (found[1].hits, found[1].counts)


def test_every_answer_token_is_drafted_first_once():
    """The last token of a text included."""
    one = text(20, 4)
    batch = collate([one], cut(one, 0, window=32), unroll=4)
    head = made(SHAPE)
    time = batch.ids.shape[1]
    observed = Observed(
        captured=[torch.randn(1, time, WIDTH) for _ in range(3)],
        embeds=torch.randn(1, time, WIDTH),
        logits=torch.randn(1, time, VOCABULARY),
    )
    result = unrolled_loss(head, observed, batch, unroll=4, decay=0.9)
    assert result.counts == (16, 16, 16, 15)


def test_window_positions_count_from_the_text():
    long = Text(tuple(range(50)), (False,) * 4 + (True,) * 46)
    batch = collate([long], [TextWindow(0, 20, 44, 26)], unroll=3)
    assert batch.positions[0, 0] == 20
    assert batch.ids[0, :24].tolist() == list(range(20, 44))
    assert batch.mask[0].tolist() == [False] * 6 + [True] * 18 + [False] * 2


def test_batches_are_concatenated():
    first = collate([text(12, 3)], [TextWindow(0, 0, 12, 0)], 3)
    second = collate([text(30, 3)], [TextWindow(0, 5, 30, 5)], 3)
    both = concatenate(first, second)
    assert both.ids.shape == (2, 27)
    assert both.positions[:, 0].tolist() == [0, 5]
    assert int(both.mask.sum()) == int(first.mask.sum()) + int(second.mask.sum())


def test_hidden_states_are_captured_where_vllm_captures_them(tmp_path):
    """Captured states are the layers' inputs; nothing in the target is trained."""
    target = load_target(write_target(tmp_path), "cpu")
    batch = plain_batch(torch.randint(0, VOCABULARY, (2, 9)))
    caught = {}
    layers = target._model.model.layers
    for number, layer in enumerate(layers):
        layer.register_forward_pre_hook(
            lambda _, given, named, number=number: caught.update(
                {number: given[0] if given else named["hidden_states"]}
            ),
            with_kwargs=True,
        )
    observed = target.observe(batch, (1, 2, 3))
    for place, layer in enumerate((1, 2, 3)):
        assert torch.equal(observed.captured[place], caught[layer])
    assert torch.equal(observed.embeds, target._model.model.embed_tokens(batch.ids))
    assert not any(parameter.requires_grad for parameter in target._model.parameters())
    own = torch.randn(VOCABULARY, WIDTH)
    assert torch.equal(target.observe(batch, (1,), own).embeds[0, 0], own[batch.ids[0, 0]])


def test_target_that_cannot_be_loaded_is_one_line(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(DraftRefusedError, match="cannot be loaded") as refused:
        load_target(tmp_path, "cpu")
    assert "\n" not in str(refused.value)


def new(tmp_path):
    directory = write_target(tmp_path / "target")
    target = inspect_weights(directory)
    return target, new_head(target.config, load_target(directory, "cpu").output)


def test_saved_head_fits_its_target_and_round_trips(tmp_path):
    target, stored = new(tmp_path)
    stored.dtype = torch.float32
    draft = tmp_path / "draft"
    draft.mkdir()
    save_head(stored, draft)
    assert lint_pair(target, inspect_weights(draft)) == ()
    again = load_head(draft, target.config, torch.zeros(VOCABULARY, WIDTH))
    for name, tensor in stored.head.state_dict().items():
        assert torch.equal(again.head.state_dict()[name], tensor)


def test_new_head_starts_from_the_targets_output(tmp_path):
    target, stored = new(tmp_path)
    output = load_target(target.path, "cpu").output
    assert torch.equal(stored.head.lm_head.weight, output.float())


@pytest.mark.parametrize("layout", ["plain", "speculators"])
def test_refresh_changes_only_numbers(tmp_path, layout):
    """Config, names, types, vocabulary map and embedding are written as read."""
    target, stored = new(tmp_path)
    config = {**stored.config, "draft_vocab_size": 30}
    tensors = {
        weight_name(name): tensor.to(torch.bfloat16) for name, tensor in stored.head.state_dict().items()
    }
    tensors["lm_head.weight"] = tensors["lm_head.weight"][:30].clone()
    tensors["d2t"] = torch.arange(30)
    tensors["embed_tokens.weight"] = torch.randn(VOCABULARY, WIDTH).to(torch.bfloat16)
    if layout == "speculators":
        tensors = {name.replace("midlayer.", "layers.0."): tensor for name, tensor in tensors.items()}
    parent, child = tmp_path / "parent", tmp_path / "child"
    for directory in (parent, child):
        directory.mkdir()
    save_file(tensors, parent / "model.safetensors", metadata={"format": "pt"})
    (parent / "config.json").write_text(json.dumps(config))
    loaded = load_head(parent, target.config, torch.zeros(VOCABULARY, WIDTH))
    assert torch.equal(loaded.head.proposes, torch.arange(30) * 2)
    assert torch.equal(loaded.head.embedding, tensors["embed_tokens.weight"].float())
    save_head(loaded, child)
    written = load_file(child / "model.safetensors")
    assert written.keys() == tensors.keys()
    assert all(torch.equal(written[name], tensor) for name, tensor in tensors.items())
    assert all(written[name].dtype == tensor.dtype for name, tensor in tensors.items())
    assert inspect_weights(child).config == inspect_weights(parent).config


@pytest.mark.parametrize("broken", ["fc.weight", "midlayer.mlp.up_proj.weight"])
def test_file_that_lacks_a_tensor_is_refused(tmp_path, broken):
    """vLLM would serve it with uninitialised memory."""
    target, stored = new(tmp_path)
    directory = tmp_path / "draft"
    directory.mkdir()
    save_head(stored, directory)
    tensors = load_file(directory / "model.safetensors")
    del tensors[broken]
    save_file(tensors, directory / "model.safetensors")
    with pytest.raises(DraftRefusedError, match=broken):
        load_head(directory, target.config, torch.zeros(VOCABULARY, WIDTH))


def test_head_without_an_output_starts_from_the_targets(tmp_path):
    target, stored = new(tmp_path)
    directory = tmp_path / "draft"
    directory.mkdir()
    save_head(stored, directory)
    tensors = load_file(directory / "model.safetensors")
    del tensors["lm_head.weight"]
    save_file(tensors, directory / "model.safetensors")
    output = torch.randn(VOCABULARY, WIDTH)
    assert torch.equal(load_head(directory, target.config, output).head.lm_head.weight, output)
    with pytest.raises(DraftRefusedError, match="output embedding"):
        load_head(directory, target.config, output[:5])

"""Which pairs each architecture has is written down by hand; that folding them changes nothing is measured on the logits."""

import copy

import pytest
import torch
import transformers
from torch import nn
from torch.nn import functional as F

from torchq import architectures
from torchq.architectures import check_fold, find_folds
from torchq.folding import fold_
from torchq.testing import tiny_llama

SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 64,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GQA = {"num_key_value_heads": 2}
T5 = {"d_model": 32, "d_ff": 48, "d_kv": 8, "num_layers": 2, "num_heads": 4, "vocab_size": 64, "decoder_start_token_id": 0}

# One line per pair of each block: producer[rows], "+1" for x * (1 + weight), -> consumers.
LLAMA = """
input_layernorm -> self_attn.q_proj self_attn.k_proj self_attn.v_proj
self_attn.v_proj -> self_attn.o_proj
post_attention_layernorm -> mlp.gate_proj mlp.up_proj
mlp.up_proj -> mlp.down_proj
"""
GEMMA = """
input_layernorm+1 -> self_attn.q_proj self_attn.k_proj self_attn.v_proj
self_attn.v_proj -> self_attn.o_proj
pre_feedforward_layernorm+1 -> mlp.gate_proj mlp.up_proj
mlp.up_proj -> mlp.down_proj
"""
PHI3 = """
input_layernorm -> self_attn.qkv_proj
self_attn.qkv_proj[48:64] -> self_attn.o_proj
post_attention_layernorm -> mlp.gate_up_proj
mlp.gate_up_proj[48:96] -> mlp.down_proj
"""
GPT2 = """
ln_1 -> attn.c_attn
attn.c_attn[64:96] -> attn.c_proj
ln_2 -> mlp.c_fc
"""
OPT = """
self_attn_layer_norm -> self_attn.q_proj self_attn.k_proj self_attn.v_proj
self_attn.v_proj -> self_attn.out_proj
final_layer_norm -> fc1
fc1 -> fc2
"""
OPT_POST_NORM = """
self_attn.v_proj -> self_attn.out_proj
fc1 -> fc2
"""
FALCON = """
input_layernorm -> self_attention.query_key_value mlp.dense_h_to_4h
self_attention.query_key_value[40:48] -> self_attention.dense
"""
FALCON_NEW = """
ln_attn -> self_attention.query_key_value
self_attention.query_key_value[24:32,56:64] -> self_attention.dense
ln_mlp -> mlp.dense_h_to_4h
"""
COHERE = """
input_layernorm -> self_attn.q_proj self_attn.k_proj self_attn.v_proj mlp.gate_proj mlp.up_proj
self_attn.v_proj -> self_attn.o_proj
mlp.up_proj -> mlp.down_proj
"""
GPT_NEOX = """
input_layernorm -> attention.query_key_value
attention.query_key_value[16:24,40:48,64:72,88:96] -> attention.dense
post_attention_layernorm -> mlp.dense_h_to_4h
"""
POST_NORM = """
self_attn.v_proj -> self_attn.o_proj
mlp.up_proj -> mlp.down_proj
"""
BERT = "attention.self.value -> attention.output.dense"
T5_ENCODER = """
layer.0.layer_norm -> layer.0.SelfAttention.q layer.0.SelfAttention.k layer.0.SelfAttention.v
layer.0.SelfAttention.v -> layer.0.SelfAttention.o
layer.1.layer_norm -> layer.1.DenseReluDense.wi
layer.1.DenseReluDense.wi -> layer.1.DenseReluDense.wo
"""
T5_DECODER = """
layer.0.layer_norm -> layer.0.SelfAttention.q layer.0.SelfAttention.k layer.0.SelfAttention.v
layer.0.SelfAttention.v -> layer.0.SelfAttention.o
layer.1.layer_norm -> layer.1.EncDecAttention.q
layer.1.EncDecAttention.v -> layer.1.EncDecAttention.o
layer.2.layer_norm -> layer.2.DenseReluDense.wi
layer.2.DenseReluDense.wi -> layer.2.DenseReluDense.wo
"""
MIXTRAL = """
input_layernorm -> self_attn.q_proj self_attn.k_proj self_attn.v_proj
self_attn.v_proj -> self_attn.o_proj
post_attention_layernorm -> mlp.gate mlp.experts.gate_up_proj
mlp.experts.gate_up_proj[48:96] -> mlp.experts.down_proj
"""
DEEPSEEK_MOE = """
input_layernorm -> self_attn.q_a_proj self_attn.kv_a_proj_with_mqa
self_attn.q_a_layernorm -> self_attn.q_b_proj
self_attn.kv_a_layernorm -> self_attn.kv_b_proj
self_attn.kv_b_proj[8:16,24:32,40:48,56:64] -> self_attn.o_proj
post_attention_layernorm -> mlp.gate mlp.experts.gate_up_proj mlp.shared_experts.gate_proj mlp.shared_experts.up_proj
mlp.experts.gate_up_proj[24:48] -> mlp.experts.down_proj
mlp.shared_experts.up_proj -> mlp.shared_experts.down_proj
"""
DEEPSEEK = {
    "num_key_value_heads": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "first_k_dense_replace": 0,
    "moe_intermediate_size": 24,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
}

# name: (class, settings, {prefix of its blocks: pairs of each})
ARCHITECTURES = {
    "llama": ("LlamaForCausalLM", SIZES | GQA, {"model.layers": LLAMA}),
    "qwen2": ("Qwen2ForCausalLM", SIZES | GQA, {"model.layers": LLAMA}),
    "qwen3": ("Qwen3ForCausalLM", SIZES | GQA | {"head_dim": 8}, {"model.layers": LLAMA}),
    "gemma2": ("Gemma2ForCausalLM", SIZES | GQA | {"head_dim": 8}, {"model.layers": GEMMA}),
    "gemma3": ("Gemma3ForCausalLM", SIZES | GQA | {"head_dim": 8}, {"model.layers": GEMMA}),
    "phi3": ("Phi3ForCausalLM", SIZES | GQA, {"model.layers": PHI3}),
    "gpt2": ("GPT2LMHeadModel", SIZES, {"transformer.h": GPT2}),
    "opt": ("OPTForCausalLM", SIZES | {"ffn_dim": 48, "word_embed_proj_dim": 32}, {"model.decoder.layers": OPT}),
    "opt-350m": (
        "OPTForCausalLM",
        SIZES | {"ffn_dim": 48, "word_embed_proj_dim": 16, "do_layer_norm_before": False},
        {"model.decoder.layers": OPT_POST_NORM},
    ),
    "falcon": ("FalconForCausalLM", SIZES, {"transformer.h": FALCON}),
    "falcon-40b": (
        "FalconForCausalLM",
        SIZES | {"num_kv_heads": 2, "new_decoder_architecture": True},
        {"transformer.h": FALCON_NEW},
    ),
    "cohere": ("CohereForCausalLM", SIZES | GQA, {"model.layers": COHERE}),
    "gpt-neox": ("GPTNeoXForCausalLM", SIZES, {"gpt_neox.layers": GPT_NEOX}),
    "olmo2": ("Olmo2ForCausalLM", SIZES | GQA, {"model.layers": POST_NORM}),
    "stablelm": ("StableLmForCausalLM", SIZES | GQA, {"model.layers": LLAMA}),
    "bert": ("BertForMaskedLM", SIZES, {"bert.encoder.layer": BERT}),
    "t5": ("T5ForConditionalGeneration", T5, {"encoder.block": T5_ENCODER, "decoder.block": T5_DECODER}),
    "mixtral": ("MixtralForCausalLM", SIZES | GQA | {"num_local_experts": 4}, {"model.layers": MIXTRAL}),
    "deepseek-v3": ("DeepseekV3ForCausalLM", SIZES | DEEPSEEK, {"model.layers": DEEPSEEK_MOE}),
}


def random_model(architecture):
    """A tiny model in which no norm is one and no bias zero."""
    class_name, settings, _ = ARCHITECTURES[architecture]
    model_class = getattr(transformers, class_name)
    config = model_class.config_class if architecture != "gemma3" else transformers.Gemma3TextConfig
    return randomized(model_class(config(**settings)))


def randomized(model):
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(parameter + 0.3 * noise if parameter.ndim < 2 else noise / parameter.shape[-1] ** 0.5)
    return model.eval()


def rows_text(rows):
    if rows is None:
        return ""
    rows = rows.tolist()
    starts = [row for row in rows if row - 1 not in rows]
    ends = [row + 1 for row in rows if row + 1 not in rows]
    return "[" + ",".join(f"{a}:{b}" for a, b in zip(starts, ends, strict=True)) + "]"


def text(pair, block):
    def inside(name):
        assert name.startswith(block + ".")
        return name.removeprefix(block + ".")

    offset = "+1" if pair.producer.kind == "offset_norm" else ""
    consumers = " ".join(inside(consumer.name) for consumer in pair.consumers)
    return f"{inside(pair.producer.name)}{offset}{rows_text(pair.producer.rows)} -> {consumers}"


def random_scale(size, seed=0):
    return 0.5 + 1.5 * torch.rand(size, generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def logits_of(model):
    ids = torch.randint(64, (2, 24), generator=torch.Generator().manual_seed(3))
    return model(ids, decoder_input_ids=ids).logits if model.config.is_encoder_decoder else model(ids).logits


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_finds_all_pairs_of_an_architecture_and_folding_them_changes_nothing(architecture):
    model = random_model(architecture)
    state = copy.deepcopy(model.state_dict())
    folds = find_folds(model)
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())

    blocks = {f"{prefix}.{i}": pairs for prefix, pairs in ARCHITECTURES[architecture][2].items() for i in range(2)}
    found = {block: {text(p, block) for p in folds.pairs if p.producer.name.startswith(block + ".")} for block in blocks}
    assert found == {block: set(pairs.strip().splitlines()) for block, pairs in blocks.items()}
    assert len(folds.pairs) == sum(map(len, found.values()))
    assert all(pair.error < 1e-5 for pair in folds.pairs)

    before = logits_of(model)
    for seed, pair in enumerate(folds.pairs):
        fold_(model, pair, random_scale(pair.num_channels, seed))
    assert (logits_of(model) - before).norm() < 1e-5 * before.norm()
    norms = [name for name, value in model.state_dict().items() if value.ndim == 1]
    assert any(not torch.equal(model.state_dict()[name], state[name]) for name in norms) or architecture == "olmo2"


def test_grouped_query_attention_repeats_channels():
    pairs = {pair.producer.name: pair for pair in find_folds(random_model("llama")).pairs}
    (output,) = pairs["model.layers.1.self_attn.v_proj"].consumers
    heads = torch.arange(16).view(2, 8)
    assert torch.equal(output.channels, heads.repeat_interleave(2, dim=0).flatten())
    assert pairs["model.layers.1.mlp.up_proj"].consumers[0].channels is None


def test_norms_that_reach_the_residual_stream_are_refused_with_reason_and_error():
    refused = {r.producer: r for r in find_folds(random_model("bert")).refused}
    leak = refused["bert.encoder.layer.0.attention.output.LayerNorm"]
    assert leak.consumers == ("bert.encoder.layer.0.intermediate.dense",)
    assert "the block's output depends on it as well" in leak.reason
    assert leak.error > 1e-2
    assert refused["bert.encoder.layer.0.output.LayerNorm"].reason == "no weight reads its channels one by one"
    assert "not linear" in refused["bert.encoder.layer.0.intermediate.dense"].reason


def test_the_other_half_of_a_fused_projection_is_refused_by_its_rows():
    refused = [r for r in find_folds(random_model("phi3")).refused if r.producer == "model.layers.0.mlp.gate_up_proj"]
    assert [r.reason for r in refused] == ["of channels 0 to 47: mlp.down_proj reads it through a function that is not linear"]


def test_a_16_bit_model_is_measured_in_float32():
    model = random_model("gemma2").to(torch.bfloat16)
    folds = find_folds(model)
    assert len(folds.pairs) == 8
    assert max(pair.error for pair in folds.pairs) < 1e-5
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}


def test_blocks_that_are_built_alike_are_probed_once(monkeypatch):
    probed = []
    original = architectures._candidates
    monkeypatch.setattr(architectures, "_candidates", lambda block: probed.append(block) or original(block))
    find_folds(tiny_llama(num_hidden_layers=3))
    assert len(probed) == 1
    settings = SIZES | GQA | {"head_dim": 8, "layer_types": ["sliding_attention", "full_attention"]}
    model = transformers.Gemma3ForCausalLM(transformers.Gemma3TextConfig(**settings))
    find_folds(model.eval())
    assert len(probed) == 3


class Block(nn.Module):
    """x + down(between(fc(norm(x))))."""

    def __init__(self, width=16):
        super().__init__()
        self.norm, self.fc, self.down = nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x):
        return x + self.down(self.between(self.fc(self.norm(x))))

    def between(self, h):
        return F.relu(h)


class Model(nn.Module):
    def __init__(self, *blocks):
        super().__init__()
        self.layers = nn.ModuleList(blocks)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def batch_of(width=16, tokens=24):
    return {"x": torch.randn(1, tokens, width, generator=torch.Generator().manual_seed(0))}


def reasons(folds):
    return {r.producer: r.reason for r in folds.refused}


def names_of(folds):
    return [(pair.producer.name, [consumer.name for consumer in pair.consumers]) for pair in folds.pairs]


def test_a_model_without_numbered_blocks_is_one_block():
    folds = find_folds(randomized(Block()), batch_of())
    assert names_of(folds) == [("norm", ["fc"]), ("fc", ["down"])]
    assert not folds.refused


@pytest.mark.parametrize(
    "between",
    [F.gelu, F.silu, torch.square, lambda h: h.clamp(-8, 8), lambda h: F.layer_norm(h, h.shape[-1:]), lambda h: h + 1],
    ids=["gelu", "silu", "square", "clamp", "normalize", "offset"],
)
def test_what_is_not_linear_is_refused(between):
    block = randomized(Block())
    block.between = between
    folds = find_folds(block, batch_of())
    assert names_of(folds) == [("norm", ["fc"])]
    with pytest.raises(
        ValueError, match=r"fc cannot be folded into down: .* \(the output changes by [\d.e-]+, more than 1e-05\)"
    ):
        check_fold(block, "fc", ["down"], batch_of())


def test_a_permutation_with_repeats_slices_and_foreign_columns_is_mapped_exactly():
    class Shuffled(Block):
        def __init__(self):
            super().__init__()
            self.order = torch.randperm(32, generator=torch.Generator().manual_seed(1))[:20]
            self.down = nn.Linear(20 + 20 + 16, 16)

        def forward(self, x):
            h = self.fc(self.norm(x))[..., self.order]
            return x + self.down(torch.cat([h, x, h.flip(-1).relu()], dim=-1))

    block = randomized(Shuffled())
    pair = find_folds(block, batch_of()).pairs[1]
    rows, (consumer,) = pair.producer.rows, pair.consumers
    assert torch.equal(rows, block.order.sort().values)
    assert torch.equal(rows[consumer.channels[:20]], block.order)
    assert torch.equal(consumer.channels[20:36], torch.full((16,), -1))
    assert torch.equal(rows[consumer.channels[36:]], block.order.flip(0))


def test_a_fused_projection_may_be_in_several_pairs():
    class Fused(Block):
        def __init__(self):
            super().__init__()
            self.fc, self.second = nn.Linear(16, 96), nn.Linear(32, 16)

        def forward(self, x):
            first, gate, up = self.fc(self.norm(x)).chunk(3, dim=-1)
            return x + self.down(first.relu()) + self.second(gate.sigmoid() * up)

    folds = find_folds(randomized(Model(Fused())), batch_of())
    assert [text(pair, "layers.0") for pair in folds.pairs] == ["norm -> fc", "fc[0:32] -> down", "fc[64:96] -> second"]


def test_a_bare_router_parameter_is_a_consumer():
    class Routed(Block):
        def __init__(self):
            super().__init__()
            self.router = nn.Parameter(torch.empty(32, 16))

        def forward(self, x):
            y = self.norm(x)
            return x + self.down(self.fc(y) * F.linear(y, self.router).sigmoid())

    model = randomized(Model(Routed()))
    folds = find_folds(model, batch_of())
    assert names_of(folds)[0] == ("layers.0.norm", ["layers.0.fc", "layers.0.router"])
    before = model(**batch_of())
    fold_(model, folds.pairs[0], random_scale(16))
    torch.testing.assert_close(model(**batch_of()), before, rtol=1e-5, atol=1e-5)


class Experts(Block):
    """Each token goes to one of several experts, which are Linears in a list."""

    def __init__(self, num_experts, bias=0.0, runs_idle=False):
        super().__init__()
        self.gate, self.bias, self.runs_idle = nn.Linear(16, num_experts), bias, runs_idle
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(16, 24), nn.ReLU(), nn.Linear(24, 16)) for _ in range(num_experts))

    def forward(self, x):
        y = self.norm(x).flatten(0, 1)
        best = (self.gate(y) + self.bias * torch.arange(len(self.experts))).argmax(-1)
        result = torch.zeros_like(y)
        for index in range(len(self.experts)) if self.runs_idle else best.unique().tolist():
            result[best == index] = self.experts[index](y[best == index])
        return x + result.view_as(x) + self.down(self.fc(self.norm(x)))


@pytest.mark.parametrize("runs_idle", [False, True])
def test_experts_that_the_batch_does_not_reach_are_consumers_too(runs_idle):
    folds = find_folds(randomized(Model(Experts(12, runs_idle=runs_idle))), batch_of())
    norm, *others = names_of(folds)
    assert norm[0] == "layers.0.norm"
    assert set(norm[1]) >= {f"layers.0.experts.{i}.0" for i in range(12)} | {"layers.0.gate", "layers.0.fc"}
    assert {f"layers.0.experts.{i}.0" for i in range(12)} <= {name for name, _ in others}


def test_a_norm_that_an_expert_may_read_whom_no_token_reaches_is_refused():
    folds = find_folds(randomized(Model(Experts(3, bias=100.0))), batch_of())
    assert reasons(folds)["layers.0.norm"] == "experts.0.0, which no token of this batch reaches, may read it as well"


def test_keys_and_values_left_for_other_blocks_are_outputs():
    class Sharing(nn.Module):
        def __init__(self, *blocks):
            super().__init__()
            self.layers = nn.ModuleList(blocks)

        def forward(self, x):
            shared = {}
            for layer in self.layers:
                x = layer(x, shared)
            return x

    class Layer(Block):
        def forward(self, x, shared):
            shared.setdefault("h", self.fc(self.norm(x)))
            return x + self.down(F.relu(shared["h"]))

    folds = find_folds(randomized(Sharing(Layer(), Layer())), batch_of())
    assert names_of(folds) == [(f"layers.{i}.norm", [f"layers.{i}.fc"]) for i in range(2)]
    assert reasons(folds)["layers.0.fc"] == "the block's output depends on it as well"


def test_parameters_shared_with_another_block_are_refused():
    model = Model(Block(), Block())
    model.layers[1].norm.weight = model.layers[0].norm.weight
    folds = find_folds(randomized(model), batch_of())
    assert names_of(folds) == [(f"layers.{i}.fc", [f"layers.{i}.down"]) for i in range(2)]
    assert reasons(folds)["layers.0.norm"] == "its parameters are also those of layers.1.norm"


def test_the_uncut_block_has_the_last_word():
    block = randomized(Block())
    block.between = lambda h: F.relu(h).clamp(max=1e6)  # far beyond what a probe looks at
    with torch.no_grad():
        block.fc.weight.mul_(1e6)
    folds = find_folds(block, batch_of())
    assert reasons(folds)["fc"] == "the block's output changes"


def test_control_flow_that_depends_on_the_channels_is_refused():
    block = randomized(Block())
    block.between = lambda h: F.relu(h if h.abs().max() < 100 else h[:, 1:].sum(1, keepdim=True))
    assert reasons(find_folds(block, batch_of()))["fc"] == "what the block computes depends on it"


def test_columns_that_stay_zero_are_refused_not_guessed():
    block = randomized(Block())
    block.between = lambda h: F.pad(h[..., 1:], (0, 1))
    assert reasons(find_folds(block, batch_of()))["fc"].endswith(
        "down reads columns that are zero for all tokens; give a longer batch"
    )
    block.between = F.relu
    assert len(find_folds(block, batch_of(tokens=1)).pairs) == 2


def test_blocks_that_do_not_run_are_listed():
    model = randomized(Model(Block()))
    model.vision = Model(Block())
    assert reasons(find_folds(model, batch_of())) == {"vision.layers.0": "the block did not run in this batch"}
    with pytest.raises(ValueError, match=r"vision\.layers\.0 did not run in this batch"):
        check_fold(model, "vision.layers.0.norm", ["vision.layers.0.fc"], batch_of())


def test_a_model_without_vocabulary_needs_a_batch():
    with pytest.raises(ValueError, match=r"batch must be given for a Model, which has no config\.vocab_size"):
        find_folds(Model(Block()))


def test_check_fold_returns_what_find_folds_found():
    model = random_model("phi3")
    pair = check_fold(model, "model.layers.1.mlp.gate_up_proj", ["model.layers.1.mlp.down_proj"])
    assert text(pair, "model.layers.1") == "mlp.gate_up_proj[48:96] -> mlp.down_proj"
    assert pair.error < 1e-5


def test_check_fold_refuses_with_the_measured_error():
    model = random_model("llama")
    attention, mlp = "model.layers.0.self_attn.", "model.layers.0.mlp."
    with pytest.raises(ValueError, match=r"k_proj, .*v_proj reads it as well \(the output changes by \d"):
        check_fold(model, "model.layers.0.input_layernorm", [attention + "q_proj"])
    with pytest.raises(ValueError, match=r"up_proj does not read its channels one by one; .*\(the output changes by \d"):
        check_fold(model, "model.layers.0.input_layernorm", [mlp + "up_proj"])
    with pytest.raises(ValueError, match=r"no weight reads its channels one by one.*\(the output changes by \d"):
        check_fold(model, attention + "o_proj", [mlp + "up_proj"])
    with pytest.raises(ValueError, match=r"down_proj does not read its channels one by one; .* reads it as well$"):
        check_fold(model, "model.layers.0.input_layernorm", [mlp + "down_proj"])
    with pytest.raises(ValueError, match="neither a norm nor a matrix that is multiplied in the model"):
        check_fold(model, "model.embed_tokens", ["lm_head"])


def test_check_fold_names_what_is_missing():
    with pytest.raises(
        ValueError, match=r"'model\.layers\.0\.mlp\.up' is neither .* did you mean model\.layers\.0\.mlp\.up_proj\?"
    ):
        check_fold(random_model("llama"), "model.layers.0.mlp.up", ["model.layers.0.mlp.down_proj"])


def test_check_fold_goes_beyond_blocks():
    untied = random_model("llama")
    untied.config.tie_word_embeddings = False
    assert check_fold(untied, "model.norm", ["lm_head"]).consumers[0].name == "lm_head"
    with pytest.raises(ValueError, match=r"the block's output changes \(the output changes by"):
        check_fold(random_model("gemma2"), "model.norm", ["lm_head"])  # tied: the embedding would be scaled as well
    t5 = random_model("t5")  # its outputs hold the encoder's
    readers = [f"decoder.block.{i}.layer.1.EncDecAttention.{x}" for i in range(2) for x in "kv"]
    with pytest.raises(ValueError, match="the block's output depends on it as well"):
        check_fold(t5, "encoder.final_layer_norm", readers)


@pytest.mark.parametrize("kind", [dict, transformers.cache_utils.KVSharingDict])
def test_what_a_block_leaves_for_later_blocks_is_an_output(kind):
    """Values that other layers read too, in a container that may not be one for PyTorch."""

    class Sharing(nn.Module):
        def __init__(self, first):
            super().__init__()
            self.first, self.norm = first, nn.LayerNorm(16)
            self.v, self.o = nn.Linear(16, 16), nn.Linear(16, 16)

        def forward(self, x, shared):
            if self.first:
                shared["v"] = (self.v(self.norm(x)),)
            return x + self.o(shared["v"][0])

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList([Sharing(True), Sharing(False)])

        def forward(self, x):
            shared = kind()
            for layer in self.layers:
                x = layer(x, shared)
            return x

    model = randomized(Model())
    for dtype in (torch.float32, torch.bfloat16):  # blocks are measured in float32
        folds = find_folds(model.to(dtype), {"x": torch.randn(2, 8, 16, dtype=dtype)})
        assert [pair.producer.name for pair in folds.pairs] == ["layers.0.norm"]
        reasons = {refused.producer: refused.reason for refused in folds.refused}
        assert "output" in reasons["layers.0.v"] or "depends on it as well" in reasons["layers.0.v"]

"""The suspended forward pass gives the statistics of a plain true-sequential loop."""

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers as hf
from torch import Tensor, nn

from torchq.calibration.packing import Batch
from torchq.calibration.passes import Passes, eval_mode
from torchq.calibration.statistics import InputStatistics
from torchq.calibration.stream import Group, find_groups, stream
from torchq.testing import tiny_llama

COMMON = dict(hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, vocab_size=128)


def linears(model: nn.Module) -> dict[str, nn.Module]:
    return {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear) and "lm_head" not in name}


def batches(count: int, seed: int = 0, rows: int = 2, length: int = 9) -> list[Batch]:
    generator = torch.Generator().manual_seed(seed)
    return [Batch({"input_ids": torch.randint(3, 128, (rows, length), generator=generator)}, None) for _ in range(count)]


def halve(layers: dict[str, nn.Module], names: list[str]) -> None:
    """Stands for quantizing: a new weight that changes everything after it."""
    for name in names:
        layers[name]._parameters["weight"] = nn.Parameter(layers[name].weight.detach() / 2 + 0.01)


def plain_loop(model: nn.Module, groups: list[Group], data: list[Batch]) -> dict[str, Tensor]:
    """True-sequential calibration by whole forward passes: one over all the data for every group."""
    layers, result = linears(model), {}
    for group in groups:
        statistics = InputStatistics(layers[group.names[0]].in_features, "cpu")
        handle = layers[group.names[0]].register_forward_pre_hook(lambda m, args, s=statistics: s.add(args[0]))
        with torch.no_grad():
            for batch in data:
                model(**batch.inputs, use_cache=False)
        handle.remove()
        statistics.finish()
        result[group.names[0]] = statistics.H
        halve(layers, group.names)
    return result


def streamed(
    model: nn.Module, data: list[Batch], held: list[Batch], change: Callable[[list[str]], None], *, recompute: bool = False
) -> dict[str, Any]:
    layers, found = linears(model), {}

    def solve(group: Group) -> None:
        assert group.train is not None
        found[group.names[0]] = (group.train.H.clone(), group.train.num_tokens, group.holdout and group.holdout.H.clone())
        change(group.names)

    groups = find_groups(model, layers, data[0])
    assert stream(model, layers, groups, data, held, solve, recompute=recompute) == []
    return found


def test_groups_are_the_layers_that_read_one_tensor_in_order() -> None:
    model = tiny_llama().eval()
    groups = find_groups(model, linears(model), batches(1)[0])
    per_block = [["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"], ["self_attn.o_proj"],
                 ["mlp.gate_proj", "mlp.up_proj"], ["mlp.down_proj"]]  # fmt: skip
    expected = [[f"model.layers.{i}.{name}" for name in names] for i in range(2) for names in per_block]
    assert [group.names for group in groups] == expected
    assert all(group.calls == 1 for group in groups)


@pytest.mark.parametrize("recompute", [False, True])
def test_equals_a_plain_true_sequential_loop_bit_for_bit(recompute: bool) -> None:
    data = batches(3)
    model = tiny_llama().eval()
    expected = plain_loop(model, find_groups(model, linears(model), data[0]), data)
    model = tiny_llama().eval()
    layers = linears(model)
    found = streamed(model, data, batches(2, seed=1), lambda names: halve(layers, names), recompute=recompute)
    assert list(found) == list(expected)
    for name, (H, num_tokens, holdout) in found.items():
        assert torch.equal(H, expected[name]), name
        assert num_tokens == 3 * 2 * 9 and holdout is not None and not torch.equal(H, holdout)


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("share", [1.0, 0.5])
def test_drift_is_that_between_the_two_models(share: float, recompute: bool) -> None:
    """Two plain models side by side give the same sums: the reference passes run on the original weights everywhere."""
    data, model, original = batches(4), tiny_llama().eval(), tiny_llama().eval()
    layers, before = linears(model), linears(original)
    groups = find_groups(model, layers, data[0])
    found: dict[str, InputStatistics] = {}

    def solve(group: Group) -> None:
        assert group.train is not None and group.holdout is not None
        found[group.names[0]] = group.train
        assert group.holdout.drift_tokens == group.holdout.num_tokens
        halve(layers, group.names)

    assert stream(model, layers, groups, data, batches(1, seed=1), solve, drift_tokens=share, recompute=recompute) == []
    with_reference = data if share == 1 else data[::2]
    changed = tiny_llama().eval()
    for group in groups:
        name, inputs = group.names[0], []
        for net, modules in ((changed, linears(changed)), (original, before)):
            caught: list[Tensor] = []
            handle = modules[name].register_forward_pre_hook(lambda m, args, c=caught: c.append(args[0]))
            with torch.no_grad():
                for batch in with_reference:
                    net(**batch.inputs, use_cache=False)
            handle.remove()
            inputs.append(torch.cat([x.flatten(0, 1) for x in caught]))
        x, r = inputs
        assert found[name].drift is not None and found[name].drift_tokens == len(x)
        assert torch.allclose(found[name].drift, (r - x).t() @ x, rtol=2e-2, atol=2e-2 * float(((r - x).t() @ x).abs().max())), (
            name
        )
        assert torch.allclose(found[name].drift_H, x.t() @ x, rtol=1e-4, atol=1e-4), name
        halve(linears(changed), group.names)


def test_without_changes_it_is_the_float_model() -> None:
    data = batches(2)
    model = tiny_llama().eval()
    found = streamed(model, data, [], lambda names: None)
    inputs: dict[str, InputStatistics] = {}
    handles = []
    for name, layer in linears(model).items():
        inputs[name] = InputStatistics(layer.in_features, "cpu")
        handles.append(layer.register_forward_pre_hook(lambda m, args, s=inputs[name]: s.add(args[0])))
    with torch.no_grad():
        for batch in data:
            model(**batch.inputs)
    for handle in handles:
        handle.remove()
    for name, (H, _, holdout) in found.items():
        inputs[name].finish()
        assert torch.equal(H, inputs[name].H) and holdout is None


def test_padding_does_not_count() -> None:
    model = tiny_llama().eval()
    ids = batches(1, rows=1)[0].inputs["input_ids"]
    alone = streamed(model, [Batch({"input_ids": ids}, None)], [], lambda names: None)
    padded = torch.cat([ids, torch.zeros(1, 6, dtype=torch.int64)], 1)
    mask = torch.cat([torch.ones_like(ids), torch.zeros(1, 6, dtype=torch.int64)], 1)
    batch = Batch({"input_ids": padded, "attention_mask": mask}, mask.bool())
    both = streamed(model, [batch], [], lambda names: None)
    for name, (H, num_tokens, _) in both.items():
        assert num_tokens == 9
        assert torch.allclose(H, alone[name][0], rtol=1e-4, atol=1e-4), name


@pytest.mark.parametrize("recompute", [False, True])
def test_modules_used_several_times_accumulate_and_are_solved_once(recompute: bool) -> None:
    model = hf.AlbertModel(hf.AlbertConfig(**COMMON, embedding_size=32)).eval()
    layers = {name: m for name, m in linears(model).items() if "pooler" not in name}
    groups = find_groups(model, layers, batches(1)[0])
    shared = [group for group in groups if group.calls == 2]
    assert [name.rpartition(".")[2] for group in shared for name in group.names] == [
        "query",
        "key",
        "value",
        "dense",
        "ffn",
        "ffn_output",
    ]
    solved: list[tuple[str, int]] = []

    def solve(group: Group) -> None:
        assert group.train is not None
        solved.append((group.names[0], group.train.num_tokens))
        assert group.train.drift_tokens == group.train.num_tokens  # at every visit
        halve(layers, group.names)

    stream(model, layers, groups, batches(2), [], solve, drift_tokens=1, recompute=recompute)
    assert len(solved) == len({name for name, _ in solved}) == len(groups)
    for name, num_tokens in solved:
        assert num_tokens == (2 if "albert_layer_groups" in name else 1) * 2 * 2 * 9


def test_layers_that_no_token_reaches_are_returned() -> None:
    model = tiny_llama().eval()
    model.extra = nn.Linear(64, 64)
    layers = linears(model)
    groups = find_groups(model, layers, batches(1)[0])
    assert stream(model, layers, groups, batches(1), [], lambda group: None) == ["extra"]


def test_each_layer_runs_once_and_what_follows_the_last_one_does_not_run() -> None:
    model = tiny_llama().eval()
    calls = {"layer": 0, "lm_head": 0}
    groups = find_groups(model, linears(model), batches(1)[0])
    model.model.layers[0].mlp.up_proj.register_forward_hook(lambda *_: calls.update(layer=calls["layer"] + 1))
    model.lm_head.register_forward_hook(lambda *_: calls.update(lm_head=calls["lm_head"] + 1))
    stream(model, linears(model), groups, batches(3), batches(1), lambda group: None)
    assert calls == {"layer": 4, "lm_head": 0}
    stream(model, linears(model), groups, batches(3), batches(1), lambda group: None, drift_tokens=1 / 3)
    assert calls == {"layer": 4 + 4 + 2, "lm_head": 0}


class Recorded:
    """Sums of every group of a model, found with passes suspended in layers and with recomputed blocks."""

    def __init__(self, build: Callable[[], nn.Module], data: list[Batch], *, autocast: torch.dtype | None = None) -> None:
        self.sums: dict[bool, dict[str, list[Tensor]]] = {False: {}, True: {}}
        self.runs: dict[bool, dict[str, int]] = {False: {}, True: {}}
        for recompute in (False, True):
            model = build().eval()
            layers, runs, sums = linears(model), self.runs[recompute], self.sums[recompute]
            groups = find_groups(model, layers, data[0], autocast=autocast)

            def solve(group: Group, layers: dict[str, nn.Module] = layers, sums: dict[str, list[Tensor]] = sums) -> None:
                assert group.train is not None and group.holdout is not None and group.train.drift is not None
                statistics = (group.train.H, group.holdout.H, group.train.drift, group.train.absmax)
                sums[group.names[0]] = [value.clone() for value in statistics]
                halve(layers, group.names)

            for name, layer in layers.items():
                layer.register_forward_hook(lambda *_, n=name, runs=runs: runs.update({n: runs.get(n, 0) + 1}))
            hooks = [len(module._forward_pre_hooks) for module in model.modules()]
            stream(model, layers, groups, data[1:], data[:1], solve, drift_tokens=0.5, recompute=recompute, autocast=autocast)
            assert hooks == [len(module._forward_pre_hooks) for module in model.modules()]

    def check(self) -> None:
        suspended, recomputed = self.sums[False], self.sums[True]
        assert list(suspended) == list(recomputed) and len(suspended) > 2
        for name, expected in suspended.items():
            assert all(map(torch.equal, recomputed[name], expected)), name


@pytest.mark.parametrize("autocast", [None, torch.bfloat16])
def test_recomputed_blocks_give_the_same_sums(autocast: torch.dtype | None) -> None:
    recorded = Recorded(tiny_llama, batches(4), autocast=autocast)
    recorded.check()
    for suspended, recomputed in zip(recorded.runs[False].values(), recorded.runs[True].values(), strict=True):
        assert 0 <= recomputed - suspended <= 3 * 4  # as often as there are groups after it in its block
    assert recorded.runs[True]["model.layers.0.self_attn.q_proj"] == recorded.runs[False]["model.layers.0.self_attn.q_proj"] + 12


def test_recomputed_blocks_of_an_encoder_and_a_decoder_give_the_same_sums() -> None:
    """Cross attention reads one tensor in all decoder blocks; and layers outside blocks are there too."""
    sizes = dict(d_model=64, d_ff=128, num_layers=2, num_heads=4, d_kv=16, vocab_size=128, decoder_start_token_id=0)
    data = [Batch({**b.inputs, "decoder_input_ids": b.inputs["input_ids"].flip(1)}, None) for b in batches(4)]
    torch.manual_seed(0)
    model = hf.T5ForConditionalGeneration(hf.T5Config(**sizes))
    model.proj = nn.Linear(64, 64)
    model.decoder.final_layer_norm.register_forward_hook(lambda module, args, output: model.proj(output))
    state = {name: value.clone() for name, value in model.state_dict().items()}

    def build() -> nn.Module:
        for name, layer in linears(model).items():
            layer._parameters["weight"] = nn.Parameter(state[f"{name}.weight"].clone())
        return model

    recorded = Recorded(build, data)
    recorded.check()
    assert "proj" in recorded.sums[True] and "decoder.block.0.layer.1.EncDecAttention.k" in recorded.sums[True]


def test_recomputed_blocks_that_write_to_their_input_give_the_same_sums() -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second, self.third = (nn.Linear(64, 64) for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            x.add_(self.first(x).tanh()).add_(self.second(x.sin()))
            return x.add_(self.third(x.cos()))

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.blocks = nn.Embedding(128, 64), nn.ModuleList(Block() for _ in range(2))

        def forward(self, input_ids: Tensor) -> Tensor:
            x = self.embed(input_ids)
            for block in self.blocks:
                x = block(x)
            return x

    def build() -> nn.Module:
        torch.manual_seed(0)
        return Model()

    Recorded(build, batches(4)).check()


def test_recomputed_blocks_with_hooks_shared_layers_and_containers_give_the_same_sums() -> None:
    """A pre-hook that changes a block's input, a layer that two blocks share, a list that blocks append to."""

    class Block(nn.Module):
        def __init__(self, shared: nn.Linear) -> None:
            super().__init__()
            self.own, self.shared = nn.Linear(64, 64), shared
            self.register_forward_pre_hook(lambda module, args: (args[0] * 1.5, *args[1:]))

        def forward(self, x: Tensor, seen: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
            seen.append(self.own(x).sin())
            return x + self.shared(sum(seen).cos()), seen

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            shared = nn.Linear(64, 64)
            self.embed, self.blocks = nn.Embedding(128, 64), nn.ModuleList(Block(shared) for _ in range(3))

        def forward(self, input_ids: Tensor) -> Tensor:
            x, seen = self.embed(input_ids), []
            for block in self.blocks:
                x, seen = block(x, seen)
            return x

    def build() -> nn.Module:
        torch.manual_seed(0)
        return Model()

    Recorded(build, batches(4)).check()


@pytest.mark.parametrize("recompute", [False, True])
def test_no_cache_is_built_where_forward_does_not_name_it(recompute: bool) -> None:
    class Wrapped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = tiny_llama()

        def forward(self, input_ids: Tensor, **kwargs: Any) -> Any:
            return self.inner(input_ids, **kwargs)

    model = Wrapped().eval()
    caches: list[bool] = []
    attention = model.inner.model.layers[0].self_attn
    attention.register_forward_pre_hook(
        lambda module, args, kwargs: caches.append(any(isinstance(value, hf.Cache) for value in kwargs.values())),
        with_kwargs=True,
    )
    model(**batches(1)[0].inputs)
    assert caches.pop()  # it builds one otherwise
    groups = find_groups(model, linears(model), batches(1)[0])
    stream(model, linears(model), groups, batches(2), [], lambda group: None, recompute=recompute)
    assert len(caches) >= 3 and not any(caches)
    assert model.inner.config.use_cache is True


def test_recomputing_holds_one_micro_batch_inside_a_block() -> None:
    model = tiny_llama().eval()
    alive: dict[bool, int] = {}
    for recompute in (False, True):
        inputs: list[weakref.ref[Tensor]] = []
        handle = model.model.layers[0].mlp.down_proj.register_forward_pre_hook(
            lambda module, args, inputs=inputs: inputs.append(weakref.ref(args[0]))
        )

        def solve(group: Group, recompute: bool = recompute, inputs: list[weakref.ref[Tensor]] = inputs) -> None:
            if group.names == ["model.layers.0.mlp.down_proj"]:
                alive[recompute] = sum(one() is not None for one in inputs)

        groups = find_groups(model, linears(model), batches(1)[0])
        inputs.clear()
        stream(model, linears(model), groups, batches(5), [], solve, recompute=recompute)
        handle.remove()
    assert alive == {False: 5, True: 0}


@pytest.mark.parametrize("recompute", [False, True])
def test_data_dependent_paths(recompute: bool) -> None:
    """Micro-batches that take different ways through the model, as those of routed experts do."""

    class Routed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
            self.out = nn.Linear(8, 8)

        def forward(self, x: Tensor, which: Tensor) -> Tensor:
            for index in which.tolist():
                x = self.experts[index](x)
            return self.out(x)

    model = Routed().eval()
    data = [Batch({"x": torch.randn(2, 8), "which": torch.tensor(which)}, None) for which in ([0, 2], [1, 2], [0, 1])]
    layers = linears(model)
    tokens: dict[str, int] = {}
    groups = find_groups(model, layers, data[0])

    def solve(group: Group) -> None:
        assert group.train is not None
        tokens[group.names[0]] = group.train.num_tokens

    stream(model, layers, groups, data, [], solve, recompute=recompute)
    assert tokens == {"experts.0": 4, "experts.1": 4, "experts.2": 4, "out": 6}


def test_no_drift_between_tokens_that_are_not_the_same() -> None:
    """A router that changes its mind about a token: an expert's inputs are then not comparable."""

    class Routed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.left, self.right = (nn.Linear(8, 8) for _ in range(3))

        def forward(self, input_ids: Tensor) -> Tensor:
            x = self.first(torch.nn.functional.one_hot(input_ids, 8).float()).flatten(0, 1)
            chosen = x[:, 0] > 0
            return self.left(x[chosen]).sum() + self.right(x[~chosen]).sum()

    torch.manual_seed(0)
    model = Routed().eval()
    data = [Batch({"input_ids": torch.randint(0, 8, (2, 9))}, None)]
    layers, drift = linears(model), {}
    groups = find_groups(model, layers, Batch({"input_ids": torch.arange(8).repeat(2, 1)}, None))

    def solve(group: Group) -> None:
        assert group.train is not None
        drift[group.names[0]] = (group.train.drift_tokens, group.train.num_tokens)
        halve(layers, group.names)

    stream(model, layers, groups, data, [], solve, drift_tokens=1)
    assert drift["first"] == (18, 18) and drift["left"][0] == drift["right"][0] == 0 and drift["left"][1] > 0


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("when", ["solve", "forward", "interrupt"])
def test_a_failure_leaves_no_hooks_and_no_suspended_calls(when: str, recompute: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_llama().eval()
    layers = linears(model)
    groups = find_groups(model, layers, batches(1)[0])
    error = KeyboardInterrupt if when == "interrupt" else RuntimeError
    runs, greenlet_of = [], Passes.greenlet_of
    monkeypatch.setattr(Passes, "greenlet_of", lambda self, function: runs.append(greenlet_of(self, function)) or runs[-1])

    def solve(group: Group) -> None:
        if "layers.1" in group.names[0] and when != "forward":
            raise error("stop")
        if "layers.1" in group.names[0]:
            model.model.layers[1].mlp.act_fn = None  # calling it fails

    with pytest.raises(TypeError if when == "forward" else error):
        stream(model, layers, groups, batches(2), [], solve, recompute=recompute)
    assert not any(module._forward_pre_hooks or module._forward_hooks for module in model.modules())
    assert len(runs) >= 2 and all(run.dead or not run for run in runs)
    assert torch.is_grad_enabled()


def test_inputs_that_are_not_finite_name_the_layer() -> None:
    model = tiny_llama().eval()
    with torch.no_grad():
        model.model.layers[1].post_attention_layernorm.weight[3] = float("nan")
    layers = linears(model)
    groups = find_groups(model, layers, batches(1)[0])
    with pytest.raises(ValueError, match=r"the input of model\.layers\.1\.mlp\.gate_proj holds NaN or inf; load the model in"):
        stream(model, layers, groups, batches(1), [], lambda group: None)


def test_modes_do_not_leak_between_passes() -> None:
    """One pass is suspended inside autocast; the others and the caller must not be."""

    class Casting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            with torch.autocast("cpu", torch.bfloat16, enabled=bool(x[0, 0] > 0)):
                x = self.first(x)
            seen.append((x.dtype, torch.is_autocast_enabled("cpu")))
            return self.second(x.float())

    model = Casting().eval()
    layers = linears(model)
    seen: list[tuple[torch.dtype, bool]] = []
    data = [Batch({"x": torch.full((2, 8), value)}, None) for value in (1.0, -1.0, 1.0)]
    groups = find_groups(model, layers, data[1])
    seen.clear()
    stream(model, layers, groups, data, [], lambda group: seen.append((torch.float64, torch.is_autocast_enabled("cpu"))))
    assert [flag for _, flag in seen] == [False] * len(seen)
    assert [dtype for dtype, _ in seen if dtype != torch.float64] == [torch.bfloat16, torch.float32, torch.bfloat16]
    assert not torch.is_autocast_enabled("cpu")


def test_under_autocast_all_that_layers_read_is_of_its_dtype() -> None:
    """Also the residual stream and norms, which autocast alone leaves in float32; and nothing stays behind."""
    model = tiny_llama().eval()
    layers, seen = linears(model), []
    for layer in layers.values():
        layer.register_forward_pre_hook(lambda module, args: seen.append(args[0].dtype))
    for module in (model.model.layers[1], model.model.norm):
        module.register_forward_hook(lambda module, args, output: seen.append(args[0].dtype))
    hooks = {name: len(module._forward_hooks) for name, module in model.named_modules()}
    groups = find_groups(model, layers, batches(1)[0], autocast=torch.bfloat16)
    assert len(groups) == 8 and set(seen) == {torch.bfloat16} and len(seen) == 16
    seen.clear()
    assert stream(model, layers, groups, batches(3), batches(1), lambda group: None, autocast=torch.bfloat16) == []
    assert set(seen) == {torch.bfloat16} and len(seen) > 4 * 12
    assert hooks == {name: len(module._forward_hooks) for name, module in model.named_modules()}
    assert not torch.is_autocast_enabled("cpu") and model(**batches(1)[0].inputs).logits.dtype == torch.float32


def test_groups_are_found_without_logits_of_every_token() -> None:
    model = tiny_llama().eval()
    seen: list[torch.Size] = []
    model.lm_head.register_forward_hook(lambda module, args, output: seen.append(output.shape))
    find_groups(model, linears(model), batches(1)[0])
    assert [shape[1] for shape in seen] == [1]


def test_dropout_is_off_and_training_mode_comes_back() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.9))
    model[1].eval()
    model[0].train()
    with eval_mode(model):
        assert not any(module.training for module in model.modules())
    assert (model.training, model[0].training, model[1].training) == (True, True, False)

"""The oneDNN form of W8A8 is the plain one, bit for bit."""

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses import FakeTensorMode

from torchq.kernels import w8a8_int8_cpu as module
from torchq.kernels.w8a8_int8 import w8a8_int8
from torchq.kernels.w8a8_int8_cpu import is_of_use, pack_weight, unpack_weight, w8a8_int8_cpu, w8a8_int8_cpu_ref

pytestmark = pytest.mark.skipif(not module.is_available(), reason="this PyTorch or processor has no exact oneDNN int8 matmul")
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
SHAPES = [(33, 100), (16, 32), (7, 33), (100, 576), (1, 1), (24, 2048), (64, 1)]
MODES = ["dynamic", "static", "static asymmetric"]


def activations(tokens, k, dtype, seed=0):
    x = torch.randn(tokens, k, generator=torch.Generator().manual_seed(seed)) * 3
    if tokens > 1:
        x[1] = 0
    return x.to(dtype)


def make(n, k, dtype, mode="dynamic", per_tensor=False):
    """A weight, and the arguments of the op after it up to the bias."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randint(-128, 128, (n, k), generator=generator).to(torch.int8)
    scale = (torch.rand((1,) if per_tensor else (n, 1), generator=generator) * 0.01 + 1e-3).to(dtype)
    input_scale = None if mode == "dynamic" else torch.tensor([0.03]).to(dtype)
    zero_point = torch.tensor([-77], dtype=torch.int8) if mode == "static asymmetric" else None
    return weight, (scale, input_scale, zero_point)


@pytest.mark.parametrize("shape", [*SHAPES, (4096, 17), (3, 65793)], ids=str)
def test_weights_come_back(shape):
    weight = torch.randint(-128, 128, shape, dtype=torch.int8)
    packed = pack_weight(weight)
    assert packed.shape == shape[::-1] and packed.nbytes == weight.nbytes
    assert torch.equal(unpack_weight(packed), weight)
    assert unpack_weight(packed).is_contiguous()
    assert torch.equal(unpack_weight(pack_weight(weight.t().contiguous().t())), weight)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("per_tensor", [True, False])
def test_equals_the_plain_op(per_tensor, mode, dtype):
    for n, k in SHAPES:
        weight, rest = make(n, k, dtype, mode, per_tensor)
        packed = pack_weight(weight)
        for tokens in (0, 1, 2, 7, 16, 17, 64, 130):
            x, bias = activations(tokens, k, dtype), activations(1, n, dtype, seed=5)[0]
            for added in (None, bias):
                y = w8a8_int8_cpu(x, packed, *rest, added)
                assert y.shape == (tokens, n) and y.dtype == dtype and y.is_contiguous()
                assert torch.equal(y, w8a8_int8(x, weight, *rest, added)), (n, k, tokens)
                assert torch.equal(y, w8a8_int8_cpu_ref(x, packed, *rest, added)), (n, k, tokens)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("k", [8192, 65793])
def test_largest_codes(k, mode):
    """Sums beyond 2^24, up to the ends of int32, and saturating instructions: all codes at the ends of the range."""
    _, rest = make(8, k, torch.float32, mode)
    for sign in (1.0, -1.0):
        x = torch.full((3, k), 100.0) * sign
        x[1, ::2] *= -1
        for value in (-128, 127):
            weight = torch.full((8, k), value, dtype=torch.int8)
            weight[1, 1::2] = 1
            weight[2, ::3] = -value - 1
            weight[3, 0] = value - 1 if value > 0 else value + 1
            expected = w8a8_int8(x, weight, *rest, None)
            assert torch.equal(w8a8_int8_cpu(x, pack_weight(weight), *rest, None), expected), (sign, value)


def test_more_tokens_than_are_multiplied_at_a_time(monkeypatch):
    weight, rest = make(33, 96, torch.bfloat16)
    x, bias = activations(200, 96, torch.bfloat16), activations(1, 33, torch.bfloat16, seed=5)[0]
    for elements in (1, 33 * 50):
        monkeypatch.setattr(module, "_OUTPUT_ELEMENTS", elements)
        assert torch.equal(w8a8_int8_cpu(x, pack_weight(weight), *rest, bias), w8a8_int8(x, weight, *rest, bias))


def test_shapes_strides_and_arguments_left_alone():
    weight, rest = make(33, 64, torch.float32, "static asymmetric")
    packed, bias = pack_weight(weight), torch.randn(33)

    def op(x):
        return w8a8_int8_cpu(x, packed, *rest, bias)

    x = activations(24, 64, torch.float32)
    before = [tensor.clone() for tensor in (x, *rest, bias)]
    assert torch.equal(op(x.view(2, 3, 4, 64)), op(x).view(2, 3, 4, 33))
    assert torch.equal(op(x[0]), op(x[:1])[0]) and op(x[0]).shape == (33,)
    assert op(x[:0].view(2, 0, 64)).shape == (2, 0, 33)
    for view in (x.t().contiguous().t(), x[::3], x[:1].expand(5, 64)):
        assert torch.equal(op(view), op(view.clone(memory_format=torch.contiguous_format)))
    assert all(torch.equal(a, b) for a, b in zip((x, *rest, bias), before, strict=True))
    assert torch.equal(unpack_weight(packed), weight)


def test_bad_tokens_stay_bad_and_alone():
    weight, rest = make(16, 64, torch.float32)
    x, packed = activations(6, 64, torch.float32), pack_weight(weight)
    expected = w8a8_int8_cpu(x, packed, *rest, None)
    x[2, 3], x[4, 5] = float("nan"), float("inf")
    y = w8a8_int8_cpu(x, packed, *rest, None)
    assert torch.isnan(y[2]).all() and not torch.isfinite(y[4]).any()
    assert torch.equal(y[[0, 1, 3, 5]], expected[[0, 1, 3, 5]])


@pytest.mark.parametrize("mode", MODES)
def test_fake_tensors_have_the_shape_of_real_ones(mode):
    """In place of torch.library.opcheck, which asks every argument for its storage."""
    weight, rest = make(33, 64, torch.bfloat16, mode)
    for x in (activations(3, 64, torch.bfloat16), activations(0, 64, torch.bfloat16).view(2, 0, 64)):
        arguments = (x, pack_weight(weight), *rest, torch.randn(33).bfloat16())
        y = w8a8_int8_cpu(*arguments)
        with FakeTensorMode() as mode:
            fake = w8a8_int8_cpu(*(None if tensor is None else mode.from_tensor(tensor) for tensor in arguments))
        assert (fake.shape, fake.dtype, fake.stride(), fake.device) == (y.shape, y.dtype, y.stride(), y.device)


def test_compiled_twice_at_most():
    weight, rest = make(48, 64, torch.bfloat16)
    packed = pack_weight(weight)
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(lambda x: w8a8_int8_cpu(x * 2, packed, *rest, None) + 1, fullgraph=True, backend=counter)
    for tokens in (7, 2, 16, 33, 130):
        x = activations(tokens, 64, torch.bfloat16)
        assert torch.equal(compiled(x), w8a8_int8_cpu(x * 2, packed, *rest, None) + 1)
    assert counter.frame_count <= 2


def test_only_large_weights_whose_sums_fit():
    assert is_of_use(torch.empty(1 << 13, 1 << 10, dtype=torch.int8))
    assert not is_of_use(torch.empty((1 << 13) - 1, 1 << 10, dtype=torch.int8))
    assert not is_of_use(torch.empty(128, 65794, dtype=torch.int8))
    assert not is_of_use(torch.empty(0, 128, dtype=torch.int8))


@pytest.mark.parametrize("fault", ["missing", "saturates", "no kernel"])
def test_an_inexact_onednn_is_not_used(fault, monkeypatch):
    def matmul(unsigned, packed, channel_scale, zero_point):
        if fault == "no kernel":
            raise RuntimeError("could not create a primitive")
        return torch.full((unsigned.shape[0], 33), 32767.0)

    module.is_available.cache_clear()
    monkeypatch.setattr(module, "_matmul", matmul)
    if fault == "missing":
        monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    assert not module.is_available()
    module.is_available.cache_clear()


def test_wrong_arguments():
    weight, rest = make(33, 64, torch.float32)
    with pytest.raises(ValueError, match=r"weight must be int8 \[N, 63\], got torch.int8 \[33, 64\]"):
        w8a8_int8_cpu(torch.zeros(3, 63), pack_weight(weight), *rest, None)
    with pytest.raises(ValueError, match=r"bias must be \[33\], got \[1\]"):
        w8a8_int8_cpu(torch.zeros(3, 64), pack_weight(weight), *rest, torch.zeros(1))

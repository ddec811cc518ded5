"""The test helpers: a helper that accepts anything would hide every bug."""

import math

import pytest
import torch

from torchq.testing import assert_within_dtype_error, sqnr_db, tiny_llama


def test_sqnr_db():
    x = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    assert sqnr_db(x, x) == math.inf
    assert sqnr_db(x, x * 1.01) == pytest.approx(40, abs=1e-3)
    assert sqnr_db(x, x * 0) == pytest.approx(0)
    assert sqnr_db(x * 0, x) == -math.inf
    assert sqnr_db(x.bfloat16(), x) == pytest.approx(sqnr_db(x.bfloat16().float(), x))
    with pytest.raises(ValueError, match=r"shapes must agree, got \(1000,\) and \(10,\)"):
        sqnr_db(x, x[:10])
    with pytest.raises(ValueError, match="actual holds NaN or inf"):
        sqnr_db(x, x / 0)
    with pytest.raises(ValueError, match="expected holds NaN or inf"):
        sqnr_db(x / 0, x)


def test_assert_within_dtype_error():
    exact = torch.linspace(-1, 1, 100, dtype=torch.float64)
    eager = exact.bfloat16()
    assert_within_dtype_error(eager, exact, eager)
    assert_within_dtype_error(eager[:0], exact[:0], eager[:0])
    error = (eager.double() - exact).abs().max()
    wrong = eager.clone()
    wrong[50] = (exact[50] + 8 * error).bfloat16()
    with pytest.raises(AssertionError, match=r"max error .* > 2 x eager's"):
        assert_within_dtype_error(wrong, exact, eager)
    assert_within_dtype_error(wrong, exact, eager, factor=10)
    for y, eager_lowp in ((eager.float(), eager), (eager, eager.float())):
        with pytest.raises(AssertionError, match="eager PyTorch gives"):
            assert_within_dtype_error(y, exact, eager_lowp)
    with pytest.raises(AssertionError, match="exact64 must be float64"):
        assert_within_dtype_error(eager, exact.float(), eager)
    with pytest.raises(ValueError, match="actual holds NaN or inf"):
        assert_within_dtype_error(eager / 0, exact, eager)
    with pytest.raises(ValueError, match="shapes must agree"):
        assert_within_dtype_error(eager[:5], exact, eager)


def test_tiny_llama_is_reproducible():
    torch.manual_seed(1)
    state = torch.get_rng_state()
    first, second, other = tiny_llama(), tiny_llama(), tiny_llama(seed=1)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))
    assert not torch.equal(first.lm_head.weight, other.lm_head.weight)
    ids = torch.arange(20)[None]
    with torch.no_grad():
        assert torch.isfinite(first(ids).logits).all() and first(ids).logits.std() > 0.1


def test_tiny_llama_takes_any_setting():
    model = tiny_llama(dtype=torch.bfloat16, hidden_size=128, num_hidden_layers=1, tie_word_embeddings=True)
    assert model.dtype == torch.bfloat16 and len(model.model.layers) == 1
    assert model.lm_head.weight is model.model.embed_tokens.weight and model.lm_head.weight.shape == (128, 128)

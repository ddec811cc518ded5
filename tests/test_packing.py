"""Packing is exact, and bit for bit what compressed-tensors writes and reads."""

import pytest
import torch
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32, unpack_from_int32

from torchq.packing import pack_int32, pack_zero_point, packed_words, unpack_int32, unpack_zero_point

WIDTHS = range(2, 9)
SHAPES = [(1, 1), (1, 7), (3, 8), (5, 31), (2, 32), (2, 33), (7, 100), (4, 576), (0, 64), (3, 0), (0, 0)]


def codes(shape: tuple[int, int], num_bits: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    half = 1 << (num_bits - 1)
    return torch.randint(-half, half, shape, generator=generator).to(torch.int8)


def bit_stream(row: list[int], num_bits: int) -> list[int]:
    """The words of a row, by the definition: one big little-endian number, cut into 32 bits."""
    number = sum((code + (1 << (num_bits - 1))) << (i * num_bits) for i, code in enumerate(row))
    words = [(number >> (32 * i)) & 0xFFFFFFFF for i in range(-(-len(row) * num_bits // 32))]
    return [word - (1 << 32) if word >= 1 << 31 else word for word in words]


def test_golden_word():
    row = torch.tensor([[-8, -7, -1, 0, 1, 6, 7, 3]], dtype=torch.int8)
    assert pack_int32(row, 4).item() & 0xFFFFFFFF == 0xBFE98710
    assert torch.equal(unpack_int32(pack_int32(row, 4), 4, (1, 8)), row)


@pytest.mark.parametrize("num_bits", WIDTHS)
@pytest.mark.parametrize("shape", SHAPES)
def test_round_trip_and_agreement_with_compressed_tensors(num_bits, shape):
    q = codes(shape, num_bits)
    packed = pack_int32(q, num_bits)
    assert packed.dtype == torch.int32 and packed.is_contiguous()
    assert tuple(packed.shape) == (shape[0], packed_words(shape[1], num_bits))
    assert torch.equal(unpack_int32(packed, num_bits, shape), q)
    if q.numel():
        theirs = pack_to_int32(q, num_bits)
        assert torch.equal(packed, theirs)
        assert torch.equal(unpack_int32(theirs, num_bits, shape), q)
        assert torch.equal(unpack_from_int32(packed, num_bits, torch.Size(shape)), q)


@pytest.mark.parametrize("num_bits", WIDTHS)
def test_bit_stream_by_definition(num_bits):
    q = codes((3, 45), num_bits)
    assert pack_int32(q, num_bits).tolist() == [bit_stream(row, num_bits) for row in q.tolist()]


@pytest.mark.parametrize("num_bits", WIDTHS)
def test_every_code_at_every_position(num_bits):
    half = 1 << (num_bits - 1)
    values = torch.arange(-half, half, dtype=torch.int8)
    for position in range(33):  # 33: into the second block of 32
        q = torch.full((len(values), 34), -half, dtype=torch.int8)
        q[:, position] = values
        packed = pack_int32(q, num_bits)
        assert torch.equal(unpack_int32(packed, num_bits, q.shape), q)
        changed_words = (packed != packed[0]).any(dim=0).nonzero().flatten().tolist()
        first, last = position * num_bits // 32, ((position + 1) * num_bits - 1) // 32
        assert set(changed_words) <= {first, last} and changed_words


@pytest.mark.parametrize("num_bits", WIDTHS)
@pytest.mark.parametrize("shape", [(1, 1), (8, 3), (33, 2), (100, 5), (64, 1), (48, 9)])
def test_zero_points_pack_along_the_output_dimension(num_bits, shape):
    zero_point = codes(shape, num_bits)
    packed = pack_zero_point(zero_point, num_bits)
    assert packed.is_contiguous() and tuple(packed.shape) == (packed_words(shape[0], num_bits), shape[1])
    theirs = pack_to_int32(zero_point, num_bits, packed_dim=0)
    assert torch.equal(packed, theirs)
    assert torch.equal(unpack_zero_point(theirs, num_bits, shape), zero_point)
    assert torch.equal(unpack_from_int32(packed, num_bits, torch.Size(shape), packed_dim=0), zero_point)


@pytest.mark.parametrize("num_bits", [3, 4, 8])
def test_strides_do_not_matter(num_bits):
    wide = codes((40, 12), num_bits)
    for q in (wide.t(), wide[::2], wide[:, 1::3], wide[:1].expand(5, 12), wide.flip(1)):
        assert torch.equal(pack_int32(q, num_bits), pack_int32(q.contiguous(), num_bits))
    packed = pack_int32(codes((6, 64), num_bits), num_bits)
    strided = torch.empty(packed.shape[1], packed.shape[0], dtype=torch.int32).t().copy_(packed)
    assert not strided.is_contiguous()
    assert torch.equal(unpack_int32(strided, num_bits, (6, 64)), codes((6, 64), num_bits))


def test_arguments_are_left_alone():
    q = codes((4, 40), 4)
    before, packed = q.clone(), pack_int32(q, 4)
    kept = packed.clone()
    unpack_int32(packed, 4, q.shape)
    assert torch.equal(q, before) and torch.equal(packed, kept)


def test_a_flipped_bit_changes_one_code():
    q = codes((2, 64), 3)
    packed = pack_int32(q, 3)
    packed[1, 2] ^= 1 << 7
    assert int((unpack_int32(packed, 3, q.shape) != q).sum()) == 1


@pytest.mark.parametrize("num_bits", [-1, 0, 1, 9, 32])
def test_num_bits_out_of_range(num_bits):
    with pytest.raises(ValueError, match=f"num_bits must be 2 to 8, got {num_bits}"):
        pack_int32(torch.zeros(1, 8, dtype=torch.int8), num_bits)
    with pytest.raises(ValueError, match=f"num_bits must be 2 to 8, got {num_bits}"):
        unpack_int32(torch.zeros(1, 1, dtype=torch.int32), num_bits, (1, 8))


@pytest.mark.parametrize("dtype", [torch.int32, torch.uint8, torch.float32, torch.int16])
def test_codes_must_be_int8(dtype):
    with pytest.raises(ValueError, match=f"q must be a 2-D int8 tensor, got 2-D {dtype}"):
        pack_int32(torch.zeros(2, 8, dtype=dtype), 4)


@pytest.mark.parametrize("shape", [(8,), (2, 2, 8), ()])
def test_codes_must_be_a_matrix(shape):
    with pytest.raises(ValueError, match=f"q must be a 2-D int8 tensor, got {len(shape)}-D torch.int8"):
        pack_int32(torch.zeros(shape, dtype=torch.int8), 4)


@pytest.mark.parametrize("num_bits", range(2, 8))
def test_codes_out_of_range(num_bits):
    half = 1 << (num_bits - 1)
    for value in (-half - 1, half):
        q = torch.zeros(2, 8, dtype=torch.int8)
        q[1, 3] = value
        message = rf"q must lie in \[{-half}, {half - 1}\] for num_bits={num_bits}, got \[{min(value, 0)}, {max(value, 0)}\]"
        with pytest.raises(ValueError, match=message):
            pack_int32(q, num_bits)


@pytest.mark.parametrize(
    ("packed", "shape"),
    [
        (torch.zeros(2, 4, dtype=torch.int64), (2, 32)),
        (torch.zeros(2, 4, dtype=torch.int32), (2, 33)),
        (torch.zeros(2, 5, dtype=torch.int32), (2, 32)),
        (torch.zeros(3, 4, dtype=torch.int32), (2, 32)),
        (torch.zeros(8, dtype=torch.int32), (2, 32)),
    ],
)
def test_packed_must_fit_the_shape(packed, shape):
    with pytest.raises(ValueError, match=r"packed must be int32 of shape \(2, \d\) for shape=\(2, \d+\) and num_bits=4, got"):
        unpack_int32(packed, 4, shape)

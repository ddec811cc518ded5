"""Tiles and splits of the KV cache's Triton kernels: they depend on sizes alone, and fit shared memory."""

import pytest
import torch

from torchq.kernels import kv_cache
from torchq.kernels import kv_cache_triton as kv
from torchq.kernels.dispatch import Gpu


def test_splits_depend_on_the_cache_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv, "gpu_of", lambda device: Gpu("sm_90", 132))
    tile = kv.tile_for(8, 8192, 128, 128, "fp8", "fp8", 2)
    assert tile == kv.Tile(8, 64, 2, 3)
    device = torch.device("cuda")
    assert [kv.num_splits(device, 8192, heads, tile) for heads in (8, 128, 512, 4096)] == [66, 4, 1, 1]
    assert kv.num_splits(device, 256, 8, tile) == 4 and kv.num_splits(device, 1 << 20, 1, tile) == 128


@pytest.mark.parametrize("form", kv_cache.FORMATS)
def test_tiles_fit(form: str) -> None:
    for dim in (32, 64, 80, 96, 128, 256):
        for rows in (1, 8, 9, 64, 500):
            for itemsize in (2, 4):
                tile = kv.tile_for(rows, 4096, dim, dim, form, form, itemsize)
                each = tile.tokens * 2 * kv._padded(dim) * {"fp8": 1, "int8": 1, "int4": 0.5, "16bit": itemsize}[form]
                assert each * (tile.num_stages - 1) <= 64 << 10 and tile.tokens >= 32 and tile.rows in (8, 16)

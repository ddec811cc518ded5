"""Where there is no GPU, Triton kernels run in its interpreter and tests marked ``gpu`` are skipped.

One thread: the tests' matrices are small, and threads that wait for each other beside any other load cost a multiple.
"""

import os

import pytest
import torch

if not torch.cuda.is_available():  # before torchq.kernels is imported: triton.jit reads it as it decorates
    os.environ.setdefault("TRITON_INTERPRET", "1")

torch.set_num_threads(1)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))

import pytest

pytestmark = pytest.mark.vllm


def test_vllm_and_its_compressed_tensors_reader_import(run_vllm):
    code = (
        "import torch, vllm, vllm._custom_ops\n"
        "from vllm.model_executor.layers.quantization import get_quantization_config\n"
        "print(get_quantization_config('compressed-tensors').__name__)"
    )
    assert run_vllm(code).split()[-1] == "CompressedTensorsConfig"

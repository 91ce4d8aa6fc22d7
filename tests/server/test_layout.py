import pytest
import torch

from lightning_g2.server import ParameterLayout, ParameterSpec, flatten

MIXED = {
    "half": torch.randn(3, 5).half(),
    "brain": torch.randn(7).bfloat16(),
    "double": torch.randn(2, 2, dtype=torch.float64),
    "complex": torch.randn(3, dtype=torch.complex64),
    "scalar": torch.tensor(3.5),
    "empty": torch.zeros(0, 4),
    "whole": torch.tensor([1, -(2**60)]),
    "strided": torch.randn(4, 3, 5, 6).to(memory_format=torch.channels_last),
    "transposed": torch.randn(5, 3).t(),
}


def test_every_dtype_and_stride_comes_back_exactly() -> None:
    layout = ParameterLayout.of(MIXED.items())
    buffer = layout.allocate()
    flatten(layout, list(MIXED.values()), layout.all(), buffer)
    for (name, tensor), view in zip(MIXED.items(), layout.views(buffer), strict=True):
        assert view.dtype == tensor.dtype, name
        assert view.shape == tensor.shape, name
        assert torch.equal(view, tensor), name
        assert view.stride() == tensor.stride(), name


def test_a_part_of_the_parameters_makes_a_smaller_buffer() -> None:
    layout = ParameterLayout.of(MIXED.items())
    part = (0, 3, 4)
    buffer = layout.allocate(part)
    assert buffer.numel() == layout.size_bytes(part) < layout.size_bytes()
    tensors = [list(MIXED.values())[i] for i in part]
    flatten(layout, tensors, part, buffer)
    assert all(torch.equal(a, b) for a, b in zip(layout.views(buffer, part), tensors, strict=True))


def test_a_buffer_of_another_model_is_refused() -> None:
    layout = ParameterLayout.of(MIXED.items())
    with pytest.raises(ValueError, match="ranks disagree on the model"):
        layout.views(torch.zeros(17, dtype=torch.uint8))


def test_offsets_stay_exact_beyond_two_to_the_31() -> None:
    big = ParameterSpec("big", (2**31 + 1,), torch.float32)
    layout = ParameterLayout((big, ParameterSpec("after", (3,), torch.float32)))
    buffer = torch.empty(layout.size_bytes(), dtype=torch.uint8, device="meta")
    views = layout.views(buffer)
    assert views[0].shape == (2**31 + 1,)
    assert views[1].storage_offset() * 4 >= 4 * (2**31 + 1)

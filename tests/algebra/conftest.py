from __future__ import annotations

import pytest
import torch


@pytest.fixture(params=[torch.float64, torch.float32], ids=["float64", "float32"])
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    return request.param


@pytest.fixture
def tolerance(dtype: torch.dtype) -> float:
    return 1e-12 if dtype == torch.float64 else 1e-5


@pytest.fixture
def generator() -> torch.Generator:
    return torch.Generator().manual_seed(20240214)

"""Every test on the device draws the same numbers at every run, whichever runs before it."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)

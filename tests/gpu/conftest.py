import pytest


def pytest_collection_modifyitems(items):
    import torch

    without = pytest.mark.skip(reason="needs a CUDA or ROCm device, and torch sees none")
    for item in items:
        if item.path.parent.name == "gpu":
            item.add_marker(pytest.mark.gpu)
            if not torch.cuda.is_available():
                item.add_marker(without)

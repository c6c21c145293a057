import atexit
import os
import shutil
import tempfile

import pytest

# vLLM and torch keep what they compile; here in a folder that goes when the tests end. Set before either is imported.
_cache = tempfile.mkdtemp(prefix="vllm-mamba3-tests-")
_owner = os.getpid()  # forked children run the exit handlers too
atexit.register(lambda: os.getpid() == _owner and shutil.rmtree(_cache, ignore_errors=True))
os.environ.update(VLLM_CACHE_ROOT=f"{_cache}/vllm", TORCHINDUCTOR_CACHE_DIR=f"{_cache}/inductor")
# No network, and a state cache of 1 GiB.
os.environ.update(HF_HUB_OFFLINE="1", VLLM_NO_USAGE_STATS="1", VLLM_CPU_KVCACHE_SPACE="1")


def pytest_collection_modifyitems(items):
    for item in items:
        if item.path.parent.name == "engine":
            item.add_marker(pytest.mark.engine)

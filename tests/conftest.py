import atexit
import os
import shutil
import tempfile

import pytest
from hypothesis import HealthCheck, settings

# vLLM and torch keep what they compile; here in a folder that goes when the tests end. Set before either is imported.
_cache = tempfile.mkdtemp(prefix="vllm-mamba3-tests-")
_owner = os.getpid()  # forked children run the exit handlers too
atexit.register(lambda: os.getpid() == _owner and shutil.rmtree(_cache, ignore_errors=True))
os.environ.update(VLLM_CACHE_ROOT=f"{_cache}/vllm", TORCHINDUCTOR_CACHE_DIR=f"{_cache}/inductor")
# No network, and a state cache of 1 GiB.
os.environ.update(HF_HUB_OFFLINE="1", VLLM_NO_USAGE_STATS="1", VLLM_CPU_KVCACHE_SPACE="1")

# Tests that draw at random: always the same few, or with --hypothesis-profile=long many others each time.
_DRAWN = dict(deadline=None, suppress_health_check=list(HealthCheck), database=None, print_blob=True)
settings.register_profile("few", max_examples=25, derandomize=True, **_DRAWN)
settings.register_profile("long", max_examples=2000, **_DRAWN)
settings.load_profile("few")


def pytest_collection_modifyitems(items):
    for item in items:
        if item.path.parent.name == "engine":
            item.add_marker(pytest.mark.engine)

"""One engine on a GPU against the reference; a process of its own, since graphs of several do not live well in one.

    check_engine.py CHECKPOINT RUNNER [SETTING=VALUE ...]        RUNNER: 1 for vLLM's model runner V2, 0 for V1

With the memory for states given, vLLM does not measure what is free, so that several may run side by side. Nothing is
compiled while one serves. With an ssm state of 16 bits the tokens may be others than the reference's; the
log-probabilities of what was chosen are near.
"""

import json
import os
import random
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))
LENGTHS = (1, 1, 2, 47, 48, 49, 64, 65, 100, 300)  # the token budget of a step is 48
MAX_TOKENS = 6


def main() -> None:
    checkpoint, runner, settings = Path(sys.argv[1]), sys.argv[2], dict(word.split("=") for word in sys.argv[3:])
    os.environ.update(VLLM_USE_V2_MODEL_RUNNER=runner, VLLM_ENABLE_V1_MULTIPROCESSING="0")
    import engines
    from independent_model import IndependentModel

    draw = random.Random(0)
    prompts = [[draw.randrange(128256) for _ in range(length)] for length in LENGTHS]
    model = IndependentModel(checkpoint, device="cuda")
    settings = {name: json.loads(value) for name, value in settings.items()}
    with engines.engine(checkpoint, dtype="float32", num_gpu_blocks_override=16, gpu_memory_utilization=0.1,
                        kv_cache_memory_bytes=1 << 30, **settings) as llm:
        compiled = kernels()
        for together in (True, False):
            completions = engines.generate(llm, prompts, MAX_TOKENS, together)
            if "mamba_ssm_cache_dtype" in settings:
                error = engines.differences(model, prompts, completions).square().mean().sqrt().item()
                print(f"largest difference, in the mean: {error:.1e}")
                assert 0 < error < 1e-2
            else:
                engines.compare(model, prompts, completions, 1e-4)
        assert engines.null_block_is_untouched(llm)
        assert compiled == kernels() and set(compiled.values()) == {1}, (compiled, kernels())


def kernels() -> dict[str, int]:
    """How many variants of each kernel this process has compiled."""
    from vllm_mamba3.kernels.scan import triton_scan
    from vllm_mamba3.kernels.step.triton_step import step_kernel

    names = [name for name in vars(triton_scan) if name.endswith("_kernel")] if scans_in_triton() else []
    found = {name: getattr(triton_scan, name) for name in names} | {"step_kernel": step_kernel}
    return {name: sum(len(caches[0]) for caches in kernel.device_caches.values()) for name, kernel in found.items()}


def scans_in_triton() -> bool:
    from vllm_mamba3.implementations import chosen_implementation

    return chosen_implementation("scan") == "triton"


if __name__ == "__main__":
    main()

"""One engine on a GPU against the reference; a process of its own, since graphs of several do not live well in one.

    check_engine.py CHECKPOINT RUNNER [SETTING=VALUE ...]        RUNNER: 1 for vLLM's model runner V2, 0 for V1
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
    with engines.engine(checkpoint, dtype="float32", num_gpu_blocks_override=16, gpu_memory_utilization=0.3,
                        **settings) as llm:
        engines.compare(model, prompts, engines.generate(llm, prompts, MAX_TOKENS), 1e-4)
        engines.compare(model, prompts, engines.generate(llm, prompts, MAX_TOKENS, together=False), 1e-4)
        assert engines.null_block_is_untouched(llm)


if __name__ == "__main__":
    main()

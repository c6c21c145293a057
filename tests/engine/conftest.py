import os

# Read by vLLM when it is first imported: the engine of an `LLM` then lives in the process of the test.
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"

"""What is promised of speed on a CPU, as ratios of one run; `python tests/benchmarks/bench_cpu.py` prints all."""

import importlib.util
from pathlib import Path

import pytest
import torch

_spec = importlib.util.spec_from_file_location("bench_cpu", Path(__file__).with_name("bench_cpu.py"))
bench_cpu = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(bench_cpu)

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def one_thread():
    """So that the processor's time can be taken, which other processes change little."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize("dtype", bench_cpu.DTYPES)
@pytest.mark.parametrize("shape", bench_cpu.SHAPES)
def test_decoding_takes_at_most_half_again_its_matrix_products(shape, dtype):
    measured = bench_cpu.decode_model(bench_cpu.layers_of(shape, dtype))
    assert measured.ratio <= 1.5, measured


def test_scan_takes_no_longer_than_the_projections_around_it():
    """In float32, SISO. In bfloat16, whose products are faster than float32's, and with four ranks, it takes longer."""
    measured = bench_cpu.scan_over_projections(bench_cpu.layers_of("siso-187m", "float32"))
    assert measured.ratio <= 1.0, measured

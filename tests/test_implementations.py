"""Which implementation an engine uses, and how it says so."""

import sys

import pytest

from vllm_mamba3 import implementations
from vllm_mamba3.kernels.step import default_implementation
from vllm_mamba3.kernels.step.mamba_ssm_step import cute_step


@pytest.fixture
def chosen(monkeypatch):
    """`chosen_implementation` on a device, with what the environment names; and what it logged."""
    logged = []
    monkeypatch.setattr(implementations.logger, "info", lambda message, *values: logged.append(message % values))

    def choose(operation, device="cpu", **environment):
        monkeypatch.setattr(implementations.current_platform, "device_type", device, raising=False)
        for name in ("VLLM_MAMBA3_STEP", "VLLM_MAMBA3_SCAN"):
            monkeypatch.delenv(name, raising=False)
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        implementations.chosen_implementation.cache_clear()
        return implementations.chosen_implementation(operation), logged

    yield choose
    implementations.chosen_implementation.cache_clear()


def test_the_devices_own(chosen):
    assert chosen("step")[0] == "torch"
    name, logged = chosen("step", device="cuda")
    assert name == "triton"
    assert logged[-1] == "Mamba-3 step: triton"
    assert default_implementation("cuda:1") == "triton"


def test_named_by_the_environment(chosen):
    name, logged = chosen("step", device="cuda", VLLM_MAMBA3_STEP="torch")
    assert name == "torch"
    assert logged[-1] == "Mamba-3 step: torch (VLLM_MAMBA3_STEP)"
    assert chosen("scan", VLLM_MAMBA3_SCAN="torch")[0] == "torch"


def test_logged_once(chosen):
    _, logged = chosen("scan")
    implementations.chosen_implementation("scan")
    assert len(logged) == 1


@pytest.mark.parametrize("operation, names", [("step", "torch, triton, mamba_ssm"), ("scan", "torch, triton")])
def test_no_such_implementation(chosen, operation, names):
    variable = f"VLLM_MAMBA3_{operation.upper()}"
    with pytest.raises(ValueError, match=f"{variable} is 'cuda'; it must be one of {names}"):
        chosen(operation, **{variable: "cuda"})


@pytest.mark.parametrize("name, missing, install", [
    ("triton", "triton", "pip install triton"), ("mamba_ssm", "mamba_ssm", "pip install --no-deps")])
def test_not_installed(chosen, monkeypatch, name, missing, install):
    monkeypatch.setitem(sys.modules, missing, None)
    cute_step.cache_clear()
    with pytest.raises(ValueError, match=install):
        chosen("step", device="cuda", VLLM_MAMBA3_STEP=name)


@pytest.mark.parametrize("name", ["triton", "mamba_ssm"])
def test_not_on_this_device(chosen, name):
    with pytest.raises(ValueError, match=f"'{name}' runs on CUDA and ROCm devices, and the device is cpu: use 'torch'"):
        chosen("step", VLLM_MAMBA3_STEP=name)

"""A wheel of this tree, installed into a fresh environment, serves a checkpoint; nothing is downloaded for it.

The environment has everything that the running one has except vllm-mamba3, whatever way that is installed there, so
the plugin that vLLM finds is the wheel's or none; and the server runs outside the repository. This proves that the
wheel holds every file it needs, that its entry point is found, and that `kernels` arrives as vllm_mamba3.kernels. What
it does not prove is that the extras resolve.
"""

import json
import shutil
import subprocess
import sys
import venv
import zipfile
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest
from hub_cache import write_tokenizer
from independent_model import IndependentModel
from openai import OpenAI
from random_checkpoints import config_dict, write_checkpoint
from server import Server

ROOT = Path(__file__).resolve().parents[2]
SOURCES = ("pyproject.toml", "README.md", "LICENSE", "kernels", "vllm_mamba3")
VLLM_SCRIPT = """#!{python}
import sys

from vllm.entrypoints.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """Built from a copy: a build leaves files in its tree, and takes in what an earlier one left."""
    source, target = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for name in SOURCES:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ROOT / name, source / name)
    # Without isolation: the build requires setuptools alone, which vLLM has brought along.
    pip("wheel", str(source), "--no-deps", "--no-build-isolation", "--wheel-dir", str(target))
    (file,) = target.iterdir()
    return file


@pytest.fixture(scope="module")
def fresh(wheel, tmp_path_factory) -> SimpleNamespace:
    """A new environment with the wheel: its python, its `vllm` command and its site-packages."""
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, symlinks=True)
    python, command = folder / "bin" / "python", folder / "bin" / "vllm"
    (site_packages,) = folder.glob("lib/python*/site-packages")
    for entry in Path(find_spec("vllm").origin).parents[1].iterdir():
        if "vllm_mamba3" not in entry.name:  # the package, its metadata, or an editable install's hook
            (site_packages / entry.name).symlink_to(entry)
    pip("--python", str(python), "install", "--no-deps", "--no-index", str(wheel))
    command.write_text(VLLM_SCRIPT.format(python=python))
    command.chmod(0o755)
    return SimpleNamespace(python=python, command=command, site_packages=site_packages)


def pip(*arguments: str) -> None:
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", *arguments]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr


def files_of(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()
            if "__pycache__" not in path.parts}


def test_the_wheel_holds_both_packages_and_nothing_else(wheel):
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        (information,) = {name.split("/")[0] for name in names if name.split("/")[0].endswith(".dist-info")}
        entry_points = archive.read(f"{information}/entry_points.txt").decode()
        metadata = archive.read(f"{information}/METADATA").decode()
        licence = archive.read(f"{information}/licenses/LICENSE").decode()
    sources = {f"vllm_mamba3/{name}" for name in files_of(ROOT / "vllm_mamba3")}
    sources |= {f"vllm_mamba3/kernels/{name}" for name in files_of(ROOT / "kernels")}
    assert {name for name in names if not name.startswith(information)} == sources
    assert entry_points.split() == ["[vllm.general_plugins]", "mamba3", "=", "vllm_mamba3:register"]
    assert "License-Expression: Apache-2.0" in metadata and "Requires-Python: >=3.11" in metadata
    assert licence == (ROOT / "LICENSE").read_text()


def test_the_environment_has_the_plugin_of_the_wheel_and_no_other(fresh, tmp_path):
    code = """
import importlib.metadata, json, vllm_mamba3.kernels
entry_points = importlib.metadata.entry_points(group="vllm.general_plugins")
ours = [str(point.dist.locate_file("")) for point in entry_points if point.value.startswith("vllm_mamba3")]
print(json.dumps([ours, vllm_mamba3.__file__, vllm_mamba3.kernels.__file__]))
"""
    result = subprocess.run([fresh.python, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
    entry_points, package, kernels = json.loads(result.stdout.splitlines()[-1])
    assert [Path(folder) for folder in entry_points] == [fresh.site_packages]
    assert Path(package) == fresh.site_packages / "vllm_mamba3" / "__init__.py"
    assert Path(kernels) == fresh.site_packages / "vllm_mamba3" / "kernels" / "__init__.py"


def test_it_serves_the_tokens_of_the_reference(fresh, tmp_path):
    folder = write_checkpoint(tmp_path / "checkpoint", config_dict(vocab_size=512))
    write_tokenizer(folder, vocab_size=512)
    arguments = ["--dtype", "float32", "--enforce-eager"]  # nothing to compile for a handful of tokens
    variables = {"VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": ""}
    with Server(str(folder), *arguments, log=tmp_path / "server.log", environment=variables, command=fresh.command,
                folder=tmp_path) as server:
        answer = OpenAI(base_url=f"{server.url}/v1", api_key="none").completions.create(
            model=str(folder), prompt="Once upon a time", max_tokens=8, temperature=0,
            extra_body={"return_token_ids": True, "ignore_eos": True},
        ).choices[0]
        assert server.stop() == 0
    assert len(answer.prompt_token_ids) == 1 + len("Once upon a time")
    choices = IndependentModel(folder).logprobs_after(answer.prompt_token_ids, answer.token_ids).argmax(-1)
    assert answer.token_ids == choices.tolist() and len(choices) == 8

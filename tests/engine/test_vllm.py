"""The parts of the vLLM backend that need no vLLM: folders, command lines, and errors before a server is there.

`tests/vllm` runs it against a real server.
"""

from __future__ import annotations

import base64
import json
import pickle
import socket
import sys
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from torch.multiprocessing.reductions import rebuild_tensor

from leyden.algorithm import PolicyGradient
from leyden.engine import EmbeddedBackend, IsolatedBackend, LoRA, VLLMBackend, untie_embeddings
from leyden.engine.vllm.folder import copy_with_changed, groups_of, read_config
from leyden.engine.vllm.parity import largest_difference, probes_for
from leyden.engine.vllm.process import ServerOptions, StartedServer, command_line, explain
from leyden.errors import ConfigError, EngineError
from tests.engine import tiny


def options(**changes: Any) -> ServerOptions:
    given: dict[str, Any] = {
        "python": sys.executable,
        "host": "127.0.0.1",
        "port": 0,
        "dtype": "float32",
        "max_length": 64,
        "kv_cache_gib": 1.0,
        "gpu_memory_utilization": None,
        "start_timeout_seconds": 20.0,
        "api_key": None,
        "lora_rank": None,
        "transfers": False,
        "extra_arguments": (),
        "environment": {},
    }
    return ServerOptions(**{**given, **changes})


def test_an_untied_folder_has_an_output_head_with_the_embeddings_numbers(tmp_path: Path):
    folder = tiny.make(tmp_path / "tied")
    assert untie_embeddings(folder)
    embeddings = load_file(folder / "model.safetensors")["model.embed_tokens.weight"]
    (head,) = load_file(folder / "model-output-head.safetensors").items()
    assert head[0] == "lm_head.weight"
    assert head[1].equal(embeddings)
    assert read_config(folder)["tie_word_embeddings"] is False
    assert not untie_embeddings(folder)


def test_signs_are_flipped_in_the_named_tensors_alone(tmp_path: Path):
    folder = tiny.make(tmp_path / "model", tie_word_embeddings=False)
    groups = groups_of(folder)
    assert len(groups["model.layers.*.mlp.up_proj.weight"]) == 2
    copy_with_changed(folder, tmp_path / "copy", groups["model.layers.*.mlp.up_proj.weight"])
    before, after = load_file(folder / "model.safetensors"), load_file(tmp_path / "copy" / "model.safetensors")
    for name, tensor in before.items():
        assert after[name].equal(-tensor if "up_proj" in name else tensor), name


def test_probes_are_the_same_every_time_and_inside_the_vocabulary():
    assert probes_for(260, 512) == probes_for(260, 512)
    assert {0 <= token < 260 for probe in probes_for(260, 512) for token in probe} == {True}
    assert largest_difference([[0.5, float("nan")]], [[0.5, 0.0]]) == float("inf")


def test_an_adapter_server_has_a_rank_that_vllm_offers(tmp_path: Path):
    command = command_line(tmp_path, "policy-base", 8000, options(lora_rank=12))
    assert command[command.index("--max-lora-rank") + 1] == "16"
    assert "--enable-lora" not in command_line(tmp_path, "policy", 8000, options())


def test_a_server_that_takes_weights_by_a_transfer_is_started_for_it(tmp_path: Path):
    command = command_line(tmp_path, "policy", 8000, options(transfers=True))
    assert json.loads(command[command.index("--weight-transfer-config") + 1]) == {"backend": "ipc"}
    assert "--weight-transfer-config" not in command_line(tmp_path, "policy", 8000, options())


@pytest.mark.parametrize(
    ("device", "given", "transfers"),
    [
        ("cpu", {}, False),
        ("cuda:0", {}, True),
        ("cuda:0", {"transfer": "folder"}, False),
        ("cuda:0", {"url": "http://127.0.0.1:8000"}, False),
        ("cuda:0", {"lora": LoRA(rank=4)}, False),
        ("cuda:0", {"extra_arguments": ["--tensor-parallel-size", "2"]}, False),
        ("cuda:0", {"environment": {"CUDA_VISIBLE_DEVICES": "1"}}, False),
        ("cuda:1", {}, False),
        ("cpu", {"transfer": "ipc"}, True),
    ],
)
def test_weights_pass_within_a_gpu_where_learner_and_server_share_it(
    device: str, given: dict[str, Any], transfers: bool
):
    assert VLLMBackend("model", **given)._uses_transfer(device) is transfers


async def test_shared_weights_are_the_learners_in_its_process_and_in_a_child(tmp_path: Path):
    folder = tiny.make(tmp_path / "model")
    async with EmbeddedBackend(folder, threads=1) as here, IsolatedBackend(folder, threads=1) as apart:
        assert (await here.device(), await apart.device()) == ("cpu", "cpu")
        shared, other = await here.share_weights(), await apart.share_weights()
    assert "lm_head.weight" in shared.names, "the head is tied, and the server has one of its own"
    handles = pickle.loads(base64.b64decode(other.handles))
    stored = load_file(folder / "model.safetensors")
    for name, dtype, shape, handle in zip(shared.names, shared.dtypes, shared.shapes, handles, strict=True):
        weight = rebuild_tensor(*handle["cpu"])
        assert (str(weight.dtype), list(weight.shape)) == (f"torch.{dtype}", shape)
        assert weight.equal(stored["model.embed_tokens.weight" if name == "lm_head.weight" else name]), name


def test_adapters_do_not_pass_by_the_transfer():
    with pytest.raises(ConfigError, match="lora= pushes adapters"):
        VLLMBackend("model", transfer="ipc", lora=LoRA(rank=4))


@pytest.mark.parametrize(
    ("log", "cause"),
    [
        ("/usr/bin/python: No module named 'vllm'", "python="),
        ("OSError: [Errno 98] Address already in use", "port=0"),
        ("ValueError: No available memory for the cache blocks", "kv_cache_gib"),
        ("the vLLM server (pid 7) was killed by SIGKILL; the last lines", "kv_cache_gib"),
        ("User-specified max_model_len (9999) is greater than the derived", "max_length"),
        ("api_server.py: error: unrecognized arguments: --hop", "extra_arguments"),
    ],
)
def test_a_failure_names_its_cause_and_the_setting(log: str, cause: str):
    assert cause in str(explain(log))
    assert explain("INFO: started") is None


def test_a_python_without_vllm_says_so_with_its_last_lines(tmp_path: Path):
    without = getattr(sys, "_base_executable", sys.executable)  # of the environment, which has vLLM in one group
    server = StartedServer(tmp_path, "policy", options(python=without))
    try:
        with pytest.raises(EngineError, match=r"No module named 'vllm'[\s\S]*python= the interpreter"):
            server.wait_until_ready()
    finally:
        server.close()


def program(path: Path, lines: str) -> str:
    """Write a program that stands for an interpreter with vLLM, and return its path."""
    path.write_text(f"#!{sys.executable}\n{lines}")
    path.chmod(0o755)
    return str(path)


def test_a_server_that_does_not_come_up_in_time_is_an_error_with_the_setting(tmp_path: Path):
    slow = program(tmp_path / "slow", "import time\ntime.sleep(600)\n")
    server = StartedServer(tmp_path, "policy", options(python=slow, start_timeout_seconds=0.5))
    try:
        with pytest.raises(
            EngineError, match=r"does not serve http://.*/health after 0.5 s[\s\S]*start_timeout_seconds=0.5"
        ):
            server.wait_until_ready()
    finally:
        server.close()


def test_the_cause_of_a_failed_start_is_named_though_other_tracebacks_follow_it(tmp_path: Path):
    """vLLM's engine process names the cause, and then the server's own process prints more than the last lines hold."""
    cause = "(EngineCore pid=7) ERROR ValueError: Available memory on node 0 (15.99/23.54 GiB) is less than requested"
    broken = program(
        tmp_path / "broken",
        f"import sys\nprint('WARNING: may end in an OSError: too many files', file=sys.stderr)\nprint({cause!r}, file=sys.stderr)\n"
        "print('a line of a traceback\\n' * 100 + 'RuntimeError: See root cause above.', file=sys.stderr)\nsys.exit(1)\n",
    )
    server = StartedServer(tmp_path, "policy", options(python=broken))
    try:
        with pytest.raises(EngineError) as caught:
            server.wait_until_ready()
    finally:
        server.close()
    lines = str(caught.value).splitlines()
    assert lines[-3:-1] == ["The first error in its log:", cause]
    assert lines[-1].startswith("Cause: not enough memory. Lower kv_cache_gib")


def test_a_port_in_use_is_refused_before_the_server_starts(tmp_path: Path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(EngineError, match=rf"port={port}, which is in use by another program; port=0"):
            StartedServer(tmp_path, "policy", options(port=port))


async def test_a_model_that_is_not_there_is_refused_before_a_server_starts(tmp_path: Path):
    with pytest.raises(EngineError, match="there is no folder"):
        await VLLMBackend(tmp_path / "nowhere", isolate=False).start()


def test_wrong_options_are_refused_by_name():
    with pytest.raises(ConfigError, match="url is 'localhost:8000'"):
        VLLMBackend("model", url="localhost:8000")
    with pytest.raises(ConfigError, match="did you mean 'max_length'"):
        VLLMBackend("model", max_lenght=7)
    with pytest.raises(ConfigError, match="no server can load"):
        VLLMBackend(object())  # pyright: ignore[reportArgumentType] -- the test
    with pytest.raises(ConfigError, match="api_key"):
        VLLMBackend("model", host="0.0.0.0")


def test_an_algorithm_takes_a_backend_by_spec():
    algorithm = PolicyGradient({"type": "vllm", "model": "somewhere", "lora": {"rank": 4}})
    assert isinstance(algorithm.backend, VLLMBackend)
    assert algorithm.backend.capabilities.adapter
    assert not algorithm.backend.capabilities.shared_weights
    with pytest.raises(ConfigError, match="vlm"):
        PolicyGradient({"type": "vlm", "model": "somewhere"})

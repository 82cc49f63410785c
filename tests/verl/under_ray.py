"""Programs that tests run, with verl under Ray on a CPU, and the demo's model and game.

python under_ray.py agent_loop FILE               verl's own agent loops before Leyden's replica; writes their rows
python under_ray.py whole_step FOLDER STEPS       steps of verl's trainer, with validation and checkpoints
python under_ray.py whole_step FOLDER STEPS resume
python under_ray.py whole_step FOLDER STEPS KIND  the same with the keys of `KINDS`
python under_ray.py whole_step FOLDER STEPS KIND cs   and with a process for each runner
python under_ray.py fails FOLDER PART             two steps; in the second one fails a part of `FAILURES`
"""

# verl has no types.
# pyright: reportMissingImports=false, reportMissingTypeStubs=false, reportUnknownVariableType=false, reportUnknownMemberType=false
# pyright: reportUnknownArgumentType=false

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

os.environ.update(
    OMP_NUM_THREADS="1",
    RAY_USAGE_STATS_ENABLED="0",
    HF_HUB_OFFLINE="1",
    TOKENIZERS_PARALLELISM="false",
    VERL_LOGGING_LEVEL="ERROR",
)

import yaml

import leyden
from examples.verl_cpu.train import KEYS as KEYS_OF_THE_EXAMPLE
from examples.verl_cpu.train import WEIGHTS, play
from leyden.algorithm.verl import VERL, make_config
from leyden.algorithm.verl.verl_run import use_platform, use_plug_points, with_cluster
from leyden.errors import ConfigError

ROOT = Path(leyden.__file__).parents[1]
MODEL = str(WEIGHTS)
KEYS: dict[str, Any] = {
    **yaml.safe_load(KEYS_OF_THE_EXAMPLE.read_text()),
    "actor_rollout_ref.model.path": MODEL,
    "actor_rollout_ref.actor.optim.lr": 5e-4,
    "actor_rollout_ref.actor.ppo_mini_batch_size": 4,
    "actor_rollout_ref.rollout.n": 4,
    "data.train_batch_size": 4,
}

FLOAT32 = {"param_dtype": "fp32", "reduce_dtype": "fp32", "buffer_dtype": "fp32"}
KINDS: dict[str, dict[str, Any]] = {
    "critic_and_reference": {
        "algorithm.adv_estimator": "gae",
        "actor_rollout_ref.actor.use_kl_loss": True,
        "+actor_rollout_ref.ref.fsdp_config.mixed_precision": FLOAT32,
        "critic": {
            "strategy": "fsdp2",
            "optim.lr": 1e-3,
            "fsdp": {"+mixed_precision": FLOAT32},
            "model": {
                "use_remove_padding": False,
                "enable_gradient_checkpointing": False,
                "override_config": {"+attn_implementation": "sdpa"},
            },
        },
    },
    "adapters": {
        "actor_rollout_ref.model": {"lora_rank": 4, "lora_alpha": 8},
        "actor_rollout_ref.actor.optim.lr": 1e-2,
    },
}


def whole_step(
    folder: str,
    steps: int,
    *,
    resume: bool = False,
    kind: str | None = None,
    strategy: str = "shm",
    trainer_cls: Any = None,
) -> None:
    """Train to a step, on four tasks each, and validate and save after each."""
    keys = {**KEYS, "trainer.total_training_steps": steps, "trainer.save_freq": 1, "trainer.test_freq": 1}
    keys |= KINDS[kind] if kind else {}
    algorithm = VERL(keys, trainer_cls=trainer_cls)
    tasks = [{"secret": number} for number in range(8)]
    trainer = leyden.Trainer(algorithm=algorithm, n_runners=1, strategy=strategy, run_dir=folder, progress=False)
    trainer.fit(play, tasks, tasks[:4], resume=resume)


def fail_in_the_trainer(_: Any) -> None:
    """Raise in the driver's own process."""
    raise ArithmeticError("the trainer has had enough")


def fail_in_the_worker(trainer: Any) -> None:
    """Raise in the process that trains."""

    def out_of_range(_: Any) -> int:
        return [0][1]

    ray_call(trainer.actor_rollout_wg.workers[0], out_of_range)


def kill_the_worker(trainer: Any) -> None:
    """Kill the process that trains, after it wrote a line to its log."""
    kill(trainer.actor_rollout_wg.workers[0], "the worker's last words")


def kill_the_server(trainer: Any) -> None:
    """Kill the server that samples, after it wrote a line to its log."""
    kill(trainer.llm_server_manager.server_handles[0], "the server's last words")


FAILURES = {each.__name__: each for each in (fail_in_the_trainer, fail_in_the_worker, kill_the_worker, kill_the_server)}


def kill(actor: Any, words: str) -> None:
    """Have an actor write a line, and kill its process."""

    def pid_after(_: Any) -> int:
        print(words, file=sys.stderr, flush=True)
        return os.getpid()

    os.kill(ray_call(actor, pid_after), signal.SIGKILL)


def ray_call(actor: Any, function: Any) -> Any:
    """Return what a function returns in an actor's process."""
    import ray

    return ray.get(actor.__ray_call__.remote(function))


def fails(folder: str, part: str) -> None:
    """Train until a part fails, before the second step samples. Print the error that `fit` raises."""
    use_platform(make_config(KEYS))
    from leyden.algorithm.verl import AgentLightningTrainer

    class Failing(AgentLightningTrainer):
        def on_sample_begin(self) -> None:
            super().on_sample_begin()
            if self.global_steps == 2:
                FAILURES[part](self)

    try:
        whole_step(folder, 2, trainer_cls=Failing)
    except Exception as error:  # noqa: BLE001 -- the test judges it
        print(f"fit raised {type(error).__name__}: {error}")
    else:
        sys.exit("nothing failed")


def agent_loop(file: str) -> None:
    """Have verl's own agent loop manager run three prompts twice, and write the rows that it queued."""
    config = make_config(KEYS, ["actor_rollout_ref.rollout.n=2", "data.max_response_length=8"])
    config.actor_rollout_ref.rollout.nnodes = config.actor_rollout_ref.rollout.n_gpus_per_node = 1
    use_platform(config)
    use_plug_points(config)
    import transfer_queue as queue
    from tensordict import NonTensorData, NonTensorStack, TensorDict
    from verl.trainer.ppo.v1.agent_loop_tq import AgentLoopManagerTQ
    from verl.workers.rollout.llm_server import LLMServerManager

    uids = ["a", "b", "c"]
    messages = [[{"role": "user", "content": f"guess 0..{number}"}] for number in (9, 5, 2)]
    with with_cluster(config):
        servers = LLMServerManager.create(config=config)
        loops = AgentLoopManagerTQ.create(config=config, llm_client=servers.get_client())
        batch: Any = TensorDict(
            {
                "uid": NonTensorStack(*uids),
                "raw_prompt": NonTensorStack(*(NonTensorData(each) for each in messages)),
                "index": NonTensorStack(0, 1, 2),
                "global_steps": NonTensorData(1),
            },
            batch_size=len(uids),
        )
        loops.generate_sequences(batch)  # it returns at once; the tags of the uids say when their loops have ended
        deadline = time.monotonic() + 120
        while True:
            tags = queue.kv_list("train").get("train", {})
            if all(tags.get(uid, {}).get("status") in ("finished", "failure") for uid in uids):
                break
            if time.monotonic() > deadline:
                sys.exit(f"the loops have not ended: {tags}")
            time.sleep(0.2)
        keys = [key for key, tag in tags.items() if tag.get("status") == "success"]
        fields = ["prompts", "responses", "response_mask", "rollout_log_probs"]
        found = queue.kv_batch_get(keys=keys, partition_id="train", select_fields=fields)
        rows = {key: {field: found[field][place].tolist() for field in fields} for place, key in enumerate(keys)}
    Path(file).write_text(json.dumps({"states": {uid: tags[uid]["status"] for uid in uids}, "rows": rows}))


def no_room() -> None:
    """Print why a cluster cannot be used."""
    config = make_config({**KEYS, "trainer.n_gpus_per_node": 2, "+ray_kwargs.ray_init.num_gpus": 1})
    use_platform(config)
    use_plug_points(config)
    try:
        with with_cluster(config):
            sys.exit("the cluster was taken")
    except ConfigError as error:
        print(error)


if __name__ == "__main__":
    if sys.argv[1] == "no_room":
        no_room()
    elif sys.argv[1] == "agent_loop":
        agent_loop(sys.argv[2])
    elif sys.argv[1] == "fails":
        fails(sys.argv[2], sys.argv[3])
    else:
        kind = next((name for name in KINDS if name in sys.argv), None)
        strategy = "cs" if "cs" in sys.argv else "shm"
        whole_step(sys.argv[2], int(sys.argv[3]), resume="resume" in sys.argv, kind=kind, strategy=strategy)

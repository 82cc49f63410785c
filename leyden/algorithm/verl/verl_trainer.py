"""`AgentLightningTrainer`: verl's synchronous trainer with rollouts of Leyden's runners.

It subclasses verl's `PPOTrainerSync` and overrides its hooks, and the steps in which it matters that a rollout may have
several rows. The agent loop manager passes each batch of prompts to a daemon, and puts the rows into TransferQueue
under verl's keys, `{uid}_{session}_{index}`. No code of verl is patched.
"""

# verl is installed in few environments, and it has no types.
# pyright: reportMissingImports=false, reportUnknownVariableType=false, reportUnknownMemberType=false, reportUnknownArgumentType=false
# pyright: reportUntypedBaseClass=false, reportMissingTypeStubs=false

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

import ray
import torch
import transfer_queue as queue
from verl.trainer.ppo.utils import Role
from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync
from verl.utils.tensordict_utils import list_of_dict_to_tensordict

from leyden.algorithm.verl.daemon import AgentModeDaemon, RolloutBatch, policy_version
from leyden.algorithm.verl.rows import SequenceRow, rollout_scales
from leyden.training import Metrics
from leyden.types import RolloutMode

Report = Callable[[Metrics, str, int], None]
"""Records the metrics of a stage ("train" or "val") after a step."""


class DaemonLoopManager:
    """verl's agent loop manager: runs prompts with a daemon and waits. The daemon's error ends the trainer's step."""

    def __init__(self, daemon: AgentModeDaemon, config: Any) -> None:
        self._daemon, self._config = daemon, config
        self.metrics: dict[RolloutMode, Metrics] = {}
        """The metrics of the newest training batch and of the newest validation batch."""

    def generate_sequences(self, batch: Any) -> None:
        """Run the prompts of a batch, and put the rows into TransferQueue."""
        rollout = self._config.actor_rollout_ref.rollout
        is_val = bool(batch["validate"]) if "validate" in batch else False
        partition: RolloutMode = "val" if is_val else "train"
        n = rollout.val_kwargs.n if is_val else rollout.n
        uids, tasks = [str(uid) for uid in batch["uid"]], [str(task) for task in batch["raw_prompt"]]
        step = int(batch["global_steps"])
        made = self._daemon.run_batch(uids, tasks, step=step, mode=partition, n=n)
        self.metrics[partition] = made.metrics
        sources = [str(source) for source in batch["data_source"]]
        fields, tags, keys = queue_rows(
            made, dict(zip(uids, sources, strict=True)), step=step, version=policy_version(step, partition)
        )
        queue.kv_batch_put(keys=keys, partition_id=partition, fields=list_of_dict_to_tensordict(fields), tags=tags)
        found = {row.group for row in made.rows}
        states = [{"status": "finished" if uid in found else "failure"} for uid in uids]
        tagged = [{"is_prompt": True, "global_steps": step, **state} for state in states]
        queue.kv_batch_put(keys=uids, partition_id=partition, tags=tagged)


def queue_rows(
    batch: RolloutBatch, sources: dict[str, str], *, step: int, version: int
) -> tuple[list[dict[str, Any]], list[dict[str, Any]], list[str]]:
    """Return the fields, the tags and the keys of a batch's rows for TransferQueue.

    sources: the data source of each prompt, by its uid.
    step: verl's step.
    version: the step whose weights sampled the rows.
    """
    fields: list[dict[str, Any]] = []
    tags: list[dict[str, Any]] = []
    keys: list[str] = []
    seen: dict[str, int] = {}
    for row, session in zip(batch.rows, batch.sessions, strict=True):
        index = seen[row.rollout_id] = seen.get(row.rollout_id, -1) + 1
        keys.append(f"{row.group}_{session}_{index}")
        fields.append(_fields(row, session, sources[row.group], step=step))
        n_prompt, n_response = len(row.prompt_ids), len(row.response_ids)
        tags.append(
            {
                "status": "success",
                "prompt_len": n_prompt,
                "response_len": n_response,
                "seq_len": n_prompt + n_response,
                "global_steps": step,
                "min_global_steps": version,
                "max_global_steps": version,
                "rollout_id": row.rollout_id,
                "n_trained": row.n_trained,
            }
        )
    return fields, tags, keys


def _fields(row: SequenceRow, session: int, source: str, *, step: int) -> dict[str, Any]:
    """Return a row as verl's transfer queue stores it, with the reward on the response's last token."""
    prompts, responses = torch.tensor(row.prompt_ids), torch.tensor(row.response_ids)
    mask = torch.tensor(row.response_mask)
    scores = torch.zeros(len(responses))
    scores[-1] = row.reward
    return {
        "uid": row.group,
        "session_id": session,
        "prompts": prompts,
        "responses": responses,
        "input_ids": torch.cat([prompts, responses]),
        "position_ids": torch.arange(len(prompts) + len(responses)),
        "response_mask": mask,
        "loss_mask": mask,
        "rollout_log_probs": torch.tensor(row.logprobs, dtype=torch.float32),
        "rm_scores": scores,
        "num_turns": row.n_calls,
        "data_source": source,
        "reward_model": {},
        "extra_fields": {},
        "multi_modal_inputs": {},
        "global_steps": step,
    }


class AgentLightningTrainer(PPOTrainerSync):
    """verl's PPO trainer with rollouts of Leyden's runners.

    config: a whole configuration (`make_config`).
    report: records metrics in the run.
    """

    def __init__(self, config: Any, *, report: Report | None = None) -> None:
        super().__init__(config=config)
        self._report = report
        self._loop_manager: DaemonLoopManager | None = None
        self._is_training = False
        self._validated: Metrics | None = None
        """The metrics of a validation that is not reported yet."""

    def _init_resource_pool_mgr(self) -> None:
        super()._init_resource_pool_mgr()
        platform = self.config.leyden.platform
        worker = None if platform is None else getattr(import_module(platform), "policy_worker", None)
        if worker is not None:
            for role in set(self.role_worker_mapping) & {Role.ActorRollout, Role.ActorRolloutRef}:
                self.role_worker_mapping[role] = ray.remote(worker())

    def fit(self, agent_loop_manager: Any) -> None:
        """Train to the last step.

        agent_loop_manager: makes the rollouts.
        """
        self._loop_manager = agent_loop_manager
        super().fit(agent_loop_manager)

    def on_train_begin(self) -> None:
        """Note that training has begun, so that later validations are reported after their step."""
        super().on_train_begin()
        self._is_training = True

    def _validate(self) -> dict[str, float]:
        """Validate. Report the metrics at once before the first step, otherwise after the step."""
        metrics = super()._validate()
        self._validated = {**self._sampled("val"), **_numbers(metrics)}
        if not self._is_training:
            self._report_validation()
        return metrics

    def _step_once(self, metrics: dict[str, Any], timing_raw: dict[str, Any], sample_batch_size: int) -> Any:
        batch = super()._step_once(metrics, timing_raw, sample_batch_size)
        metrics.update({f"leyden/{name}": value for name, value in _numbers(self._sampled("train")).items()})
        return batch

    def _compute_advantage(self, batch: Any, metrics: dict[str, Any]) -> Any:
        """Compute verl's advantages. `leyden.rollout_loss` scales each row so that rollouts count equally."""
        batch = super()._compute_advantage(batch, metrics)
        if not self.config.leyden.rollout_loss:
            return batch
        trained = [
            (tag.get("rollout_id", ""), 0 if tag.get("is_padding") else tag.get("n_trained", 0)) for tag in batch.tags
        ]
        data = queue.kv_batch_get(keys=batch.keys, partition_id=batch.partition_id, select_fields=["advantages"])
        scaled = [row * scale for row, scale in zip(data["advantages"].unbind(), rollout_scales(trained), strict=True)]
        data["advantages"] = torch.nested.as_nested_tensor(scaled, layout=torch.jagged)
        return queue.kv_batch_put(keys=batch.keys, partition_id=batch.partition_id, fields=data)

    def _compute_metrics(self, batch: Any, metrics: dict[str, Any], *args: Any, **options: Any) -> None:
        super()._compute_metrics(batch, metrics, *args, **options)
        if self._report is not None:
            own = {name: value for name, value in _numbers(metrics).items() if not name.startswith(("val-", "leyden/"))}
            named = {f"verl/{name}": value for name, value in own.items()}
            self._report({**self._sampled("train"), **named}, "train", self.global_steps)
        self._report_validation()

    def _report_validation(self) -> None:
        validated, self._validated = self._validated, None
        if self._report is not None and validated is not None:
            self._report(validated, "val", self.global_steps)

    def _sampled(self, mode: RolloutMode) -> Metrics:
        return {} if self._loop_manager is None else self._loop_manager.metrics.get(mode, {})


def _numbers(metrics: Any) -> dict[str, float]:
    found: dict[str, float] = {}
    for name, value in metrics.items():
        try:
            found[str(name)] = float(value)
        except (TypeError, ValueError):
            continue
    return found

"""Writers hear of episodes and steps: what is counted, what is written, and who asks for what."""

import csv
import importlib.util
import io
import json
import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from leyden.errors import ConfigError
from leyden.training import (
    ConsoleWriter,
    CsvWriter,
    EpisodeStats,
    JsonlWriter,
    LogCollector,
    LogLevel,
    LogWriter,
    MetricsAggregator,
    MlflowWriter,
    PickleWriter,
    Row,
    TensorboardWriter,
    TrainLoop,
    WandbWriter,
    read_pickled_rows,
)

Episode = tuple[int, list[float]]
"""Environment, and the reward of each step."""


def play(writers: list[LogWriter], lengths: list[int], n_envs: int = 2, *, seed: int = 0, named: bool = True) -> None:
    """What vectorised environments tell their writers: episodes of these lengths, in environments that take turns at random."""
    turns, waiting = random.Random(seed), list(enumerate(lengths))
    running: dict[int, tuple[int, int, int, MetricsAggregator]] = {}
    everyone = lambda hook, *told: [getattr(writer, hook)(*told) for writer in writers]  # noqa: E731
    everyone("on_env_all_ready")
    while waiting or running:
        for env_id in range(n_envs):
            if env_id not in running and waiting:
                seed_index, length = waiting.pop(0)
                running[env_id] = (seed_index, length, 0, MetricsAggregator())
                everyone("on_env_reset", env_id, {"obs": 0})
        env_id = turns.choice(sorted(running))
        seed_index, length, step, buffer = running.pop(env_id)
        step += 1
        collector = LogCollector(LogLevel.DEBUG)
        collector.add_scalar("reward", step)
        collector.add_scalar("inventory", 10 * seed_index + step)
        collector.add_string("note", f"env {env_id}", LogLevel.INFO)
        collector.add_any("obs", {"deep": [1.5, 2.5]}, LogLevel.DEBUG)
        buffer.add(collector.logs())
        for writer in writers:
            if writer.wants_steps:
                writer.on_env_step(env_id, {"obs": step}, step, step == length, {"log": collector.logs()})
        if step < length:
            running[env_id] = (seed_index, length, step, buffer)
        else:
            logs = buffer.metrics()
            stats = EpisodeStats(length, logs["reward"], logs, seed_index, seed_index, env_id if named else None)
            everyone("log_episode", stats)
    everyone("on_env_all_done")


def rows_of(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_a_row_for_each_episode_says_what_the_episode_was(tmp_path: Path) -> None:
    writer = CsvWriter(tmp_path / "episodes.csv", rows="episode")
    writer.open()
    writer.on_stage_start(7, "val")
    play([writer], [3, 1, 2], n_envs=1)
    writer.close()
    rows = rows_of(writer.path)
    assert list(rows[0]) == [
        *["iteration", "stage", "episode", "env_id", "seed_index", "length", "reward"],
        "inventory",
    ]
    assert [(r["iteration"], r["stage"], r["episode"], r["env_id"], r["seed_index"]) for r in rows] == [
        ("7", "val", str(n), "0", str(n - 1)) for n in (1, 2, 3)
    ]
    assert [(r["length"], r["reward"], r["inventory"]) for r in rows] == [
        ("3", "6.0", "2.0"),
        ("1", "1.0", "11.0"),
        ("2", "3.0", "21.5"),
    ]
    assert not writer.wants_steps


@settings(max_examples=50)
@given(lengths=st.lists(st.integers(1, 5), max_size=8), n_envs=st.integers(1, 3), seed=st.integers(0, 99))
@pytest.mark.parametrize("named", [True, False])
def test_step_rows_and_episode_rows_tell_the_same_story(
    lengths: list[int], n_envs: int, seed: int, named: bool
) -> None:
    steps, episodes = Kept(rows="step"), Kept(rows="episode")
    play([steps, episodes], lengths, n_envs, seed=seed, named=named)
    told = [row.flat() for row in episodes.kept]
    assert sorted(row["length"] for row in told) == sorted(lengths)
    for writer in (steps, episodes):
        assert writer.episode_count == writer.global_episode == len(lengths)
        assert writer.step_count == writer.global_step == sum(lengths)
    by_episode: dict[int, list[dict[str, Any]]] = {}
    for row in steps.kept:
        by_episode.setdefault(row.flat()["episode"], []).append(row.flat())
    assert [row.number for row in steps.kept] == list(range(1, sum(lengths) + 1))
    if named:  # without the environment's id, episode rows are numbered as they end
        for row in told:
            mine = by_episode[row["episode"]]
            assert [each["step"] for each in mine] == list(range(1, row["length"] + 1))
            assert sum(each["reward"] for each in mine) == row["reward"]
            assert {each["env_id"] for each in mine} == {row["env_id"]}


class Kept(LogWriter):
    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.kept: list[Row] = []

    def write(self, row: Row) -> None:
        self.kept.append(row)


def test_a_step_row_has_what_is_at_the_writers_level_or_above(tmp_path: Path) -> None:
    writers = [
        JsonlWriter(tmp_path / f"{level.name}.jsonl", rows="step", loglevel=level)
        for level in (LogLevel.DEBUG, LogLevel.PERIODIC, LogLevel.INFO)
    ]
    for writer in writers:
        writer.open()
    play(list(writers), [2])
    for writer in writers:
        writer.close()
    debug, periodic, info = ([json.loads(line) for line in w.path.read_text().splitlines()] for w in writers)
    places = {"iteration": 0, "stage": "train", "episode": 1, "step": 2, "env_id": 0, "reward": 2.0}
    assert info[1] == {**places, "note": "env 0"}
    assert periodic[1] == {**info[1], "inventory": 2.0}
    assert debug[1] == {**periodic[1], "obs": {"deep": [1.5, 2.5]}}


def test_arrays_and_strange_things_become_lists_and_text(tmp_path: Path) -> None:
    np = pytest.importorskip("numpy")
    collector = LogCollector()
    collector.add_array("prices", np.array([[1.0, 2.0]]))
    collector.add_any("thing", {"a": (np.float32(0.5), None), 3: complex(1, 2)})
    kinds = [CsvWriter, JsonlWriter, PickleWriter]
    for kind in kinds:
        writer = kind(tmp_path / kind.__name__, rows="step")
        writer.open()
        writer.on_env_step(0, None, 1.0, True, {"log": collector.logs()})
        writer.close()
    expected = {"prices": [[1.0, 2.0]], "thing": {"a": [0.5, None], "3": "(1+2j)"}}
    (pickled,) = read_pickled_rows(tmp_path / "PickleWriter")
    written = json.loads((tmp_path / "JsonlWriter").read_text())
    (cells,) = rows_of(tmp_path / "CsvWriter")
    for name, value in expected.items():
        assert pickled[name] == written[name] == json.loads(cells[name]) == value


class QlibSteps(Kept):
    def log_step(self, reward: float, contents: dict[str, Any]) -> None:
        self.heard = [*getattr(self, "heard", []), (reward, contents)]


class QlibEpisodes(Kept):
    def log_episode(self, length: int, rewards: list[float], contents: list[dict[str, Any]]) -> None:  # type: ignore[override]
        self.heard = [*getattr(self, "heard", []), (length, rewards, [each["inventory"] for each in contents])]


class QlibEnvSteps(Kept):
    def on_env_step(self, env_id: int, obs: Any, reward: float, done: bool, info: Any) -> None:
        super().on_env_step(env_id, obs, reward, done, info)
        self.heard = [*getattr(self, "heard", []), (env_id, obs["obs"], done, sorted(info["log"]))]


class Grandchild(QlibEpisodes):
    pass


class Silent(Kept):
    def log_episode(self, episode: EpisodeStats) -> None:
        self.heard = [*getattr(self, "heard", []), episode.length]


def test_a_writer_that_overrides_what_needs_steps_is_told_of_each_step() -> None:
    writers = [QlibSteps(), QlibEpisodes(), QlibEnvSteps(), Grandchild(), Silent(), Kept()]
    play(list(writers), [2, 1], n_envs=1)
    assert [writer.wants_steps for writer in writers] == [True, True, True, True, False, False]
    steps, episodes, env_steps, grandchild, silent, _ = writers
    assert [reward for reward, _ in steps.heard] == [1.0, 2.0, 1.0]
    assert steps.heard[0][1] == {"reward": 1.0, "inventory": 1.0, "note": "env 0"}
    assert episodes.heard == grandchild.heard == [(2, [1.0, 2.0], [1.0, 2.0]), (1, [1.0], [11.0])]
    everything = ["inventory", "note", "obs", "reward"]
    assert env_steps.heard == [(0, 1, False, everything), (0, 2, True, everything), (0, 1, True, everything)]
    assert silent.heard == [2, 1]
    for writer in writers:
        assert (writer.episode_count, writer.step_count) == (2, 3), type(writer).__name__


def test_a_collect_begins_to_count_anew_and_the_global_counts_survive_a_resume(tmp_path: Path) -> None:
    writer = JsonlWriter(tmp_path / "episodes.jsonl", rows="episode")
    writer.open()
    play([writer], [2, 2], n_envs=1)
    play([writer], [3])
    assert (writer.episode_count, writer.step_count) == (1, 3)
    assert (writer.global_episode, writer.global_step) == (3, 7)
    state = json.loads(json.dumps(writer.state_dict()))
    play([writer], [9])  # lost by a kill
    writer.close()
    resumed = JsonlWriter(writer.path, rows="episode")
    resumed.load_state_dict(state)
    resumed.open()
    play([resumed], [1])
    resumed.close()
    lines = [json.loads(line) for line in writer.path.read_text().splitlines()]
    assert [(line["episode"], line["length"]) for line in lines] == [(1, 2), (2, 2), (3, 3), (4, 1)]
    assert (resumed.global_episode, resumed.global_step) == (4, 8)


def test_the_loop_gives_stage_rows_to_those_that_take_them_and_tells_all_which_stage_it_is() -> None:
    class Vessel:
        def step(self, iteration: int) -> dict[str, float]:
            play(list(writers), [1])
            return {"reward": 1.0}

        def validate(self, iteration: int) -> dict[str, float]:
            play(list(writers), [1])
            return {"reward": 2.0}

        def save(self, path: Path) -> None: ...
        def load(self, path: Path) -> None: ...

    writers = [Kept(), Kept(rows="episode"), Kept(rows="step")]
    TrainLoop(max_iters=2, val_every_n_iters=2, writers=writers).run(Vessel())
    for writer in writers:
        assert [(row.iteration, row.stage) for row in writer.kept] == [(1, "train"), (2, "train"), (2, "val")]
    assert [writer.kept[-1].numbers() for writer in writers] == [
        {"val/reward": 2.0},
        {"val/episode/reward": 1.0, "val/episode/inventory": 1.0, "val/episode/length": 1},
        {"val/step/reward": 1.0, "val/step/inventory": 1.0},
    ]


def test_the_console_shows_every_nth_episode_with_its_mean_and_the_last() -> None:
    stream = io.StringIO()
    writer = ConsoleWriter(stream, rows="episode", log_every_n_episode=2, total_episodes=3)
    play([writer], [1, 3, 2], n_envs=1)
    assert stream.getvalue().splitlines() == [
        "[   2/3] train episode 2  reward 6 (3.5)  inventory 12 (6.5)  length 3 (2)",
        "[   3/3] train episode 3  reward 3 (3.333)  inventory 21.5 (11.5)  length 2 (2)",
    ]
    stream = io.StringIO()
    play([ConsoleWriter(stream, rows="step", loglevel=LogLevel.INFO)], [1])
    assert stream.getvalue() == "[   1] train  note env 0  episode 1  env_id 0  reward 1\n"


def test_a_writer_may_hear_of_episodes_alone_as_in_qlib() -> None:
    class Lengths(LogWriter):
        def __init__(self) -> None:
            super().__init__(LogLevel.INFO)
            self.seen: list[tuple[int, int, int]] = []

        def log_episode(self, length: int, rewards: list[float], contents: list[dict[str, Any]]) -> None:
            self.seen.append((length, len(rewards), len(contents)))

    writer = Lengths()
    play([writer], [1, 3, 2], n_envs=1)
    assert writer.loglevel == LogLevel.INFO
    assert writer.seen == [(1, 1, 1), (3, 3, 3), (2, 2, 2)]


def test_a_writer_that_overrides_nothing_cannot_be_made() -> None:
    class Nothing(LogWriter):
        def wirte(self, row: Any) -> None: ...

    with pytest.raises(TypeError, match="Nothing would write nothing: it overrides none of write, log_episode"):
        Nothing()


@pytest.mark.parametrize("kind", [CsvWriter, JsonlWriter, PickleWriter])
def test_a_directory_where_a_file_belongs_is_refused_and_a_name_in_it_given(tmp_path: Path, kind: Any) -> None:
    with pytest.raises(ConfigError, match=r"that is a directory; give the file, such as '.*/result\."):
        kind(tmp_path)


def test_wrong_options_of_writers_are_refused_with_their_value(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="rows is 'steps'; choose one of stage, episode, step"):
        CsvWriter(tmp_path / "x", rows="steps")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="log_every_n_episode is 0"):
        ConsoleWriter(log_every_n_episode=0)


@pytest.mark.parametrize(
    ("kind", "extra"), [(TensorboardWriter, "tensorboard"), (MlflowWriter, "mlflow"), (WandbWriter, "wandb")]
)
def test_a_writer_whose_package_is_not_installed_says_what_to_install(kind: Any, extra: str) -> None:
    if importlib.util.find_spec(extra):
        pytest.skip(f"{extra} is installed")
    with pytest.raises(ConfigError, match=rf"{kind.__name__} needs {extra}.* pip install 'leyden\[{extra}\]'"):
        kind("somewhere")

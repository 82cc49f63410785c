"""Train the demo's policy with verl's trainer on CPUs, to check an installation without a GPU."""

from __future__ import annotations

import argparse
from pathlib import Path

import aiohttp

import leyden as ly
from leyden.cli.demo.game import NUMBERS, Game

KEYS = Path(__file__).with_name("keys.yaml")
WEIGHTS = Path(ly.__file__).parent / "cli" / "demo" / "weights"


@ly.llm_rollout
async def play(task: dict[str, int], llm: ly.LLM) -> float:
    """Play guess-the-number over HTTP; 1.0 if it is won."""
    game = Game(task["secret"])
    messages: list[dict[str, str]] = [{"role": "user", "content": game.prompt()}]
    async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {llm.api_key}"}) as session:
        while not game.done:
            request = {"model": llm.model, "messages": messages, **llm.sampling_parameters, "max_tokens": 4}
            async with session.post(f"{llm.endpoint}/chat/completions", json=request) as response:
                response.raise_for_status()
                reply = (await response.json())["choices"][0]["message"]["content"] or ""
            messages.append({"role": "assistant", "content": reply})
            messages.append({"role": "user", "content": game.guess(reply).text})
    return float(game.won)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=30, help="of 120 games (default: %(default)s)")
    parser.add_argument("--run-dir", help="a new folder for the run (default: one in .leyden/)")
    options = parser.parse_args()
    keys = [f"actor_rollout_ref.model.path='{WEIGHTS}'", f"trainer.total_epochs={options.steps}"]
    tasks = [{"secret": secret} for secret in range(NUMBERS)]
    trainer = ly.Trainer(algorithm=ly.VERL(KEYS, overrides=keys), n_runners=1, run_dir=options.run_dir)
    trainer.fit(play, tasks, tasks)


if __name__ == "__main__":
    main()

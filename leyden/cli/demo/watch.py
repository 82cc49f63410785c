"""Play a game with the trained model, loaded by transformers as any model is."""

# transformers leaves most of its public functions without types:
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false, reportAttributeAccessIssue=false

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from leyden.cli.demo.game import Game


def watch(model: str | Path, *, secret: int, show: Callable[[str], Any] = print) -> bool:
    """Play one game with the model in a folder, and show each message. Return whether it won.

    The model takes its likeliest reply in each turn.
    model: the folder, such as RUN/model.
    secret: the number to find, from 0 to 9.
    show: called with each line.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging as transformers_logging

    shows_progress = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()  # loading takes milliseconds
    try:
        policy = AutoModelForCausalLM.from_pretrained(model)
    finally:
        if shows_progress:
            transformers_logging.enable_progress_bar()
    tokenizer = AutoTokenizer.from_pretrained(model)
    game = Game(secret)
    messages = [{"role": "user", "content": game.prompt()}]
    show(game.prompt())
    while not game.done:
        prompt = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        with torch.inference_mode():
            answer = policy.generate(**prompt, max_new_tokens=6, do_sample=False)
        reply = tokenizer.decode(answer[0, prompt["input_ids"].shape[1] :], skip_special_tokens=True)
        feedback = game.guess(reply)
        show(f"  > {reply}")
        show(feedback.text)
        messages += [{"role": "assistant", "content": reply}, {"role": "user", "content": feedback.text}]
    return game.won

"""Chat templates by name, for models that come without one."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from leyden.errors import ConfigError

CHAT_TEMPLATES: Final = {
    "chatml": (
        "{% for message in messages %}"
        "<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
        "{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    ),
    "gemma": (
        "{{ bos_token }}{% set turn = namespace(system='') %}"
        "{% for message in messages %}"
        "{% if message['role'] == 'system' %}{% set turn.system = message['content'] + '\n\n' %}{% else %}"
        "<start_of_turn>{{ 'model' if message['role'] == 'assistant' else message['role'] }}\n"
        "{{ turn.system }}{{ message['content'] | trim }}<end_of_turn>\n"
        "{% set turn.system = '' %}{% endif %}"
        "{% endfor %}"
        "{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
    ),
}
"""Neither writes tools: a request with tools is refused."""


def chat_template_text(name: str) -> str:
    """Return the Jinja text of a template by its name, or of a file. Raise ConfigError if there is neither."""
    if name in CHAT_TEMPLATES:
        return CHAT_TEMPLATES[name]
    path = Path(name)
    if not path.is_file():
        known = " or ".join(map(repr, CHAT_TEMPLATES))
        raise ConfigError(
            f"chat_template is {name!r}, and there is no such file; give {known}, or a file with a Jinja template"
        )
    return path.read_text()

"""A coding agent in thirty lines: the model writes a shell command, reads what it prints, and goes on until it writes DONE.

It reads the instruction on standard input, works in the current folder, and needs nothing but Python. Its prompt is short,
because small models have little room; see docs/how-to/coding-agents.md for real ones.
"""

import json
import os
import subprocess
import sys
import urllib.request

SYSTEM = "You correct code. Answer with one shell command. When it is done, answer DONE."
TURNS = 3


def ask(messages: list[dict[str, str]]) -> str:
    request = urllib.request.Request(
        os.environ["OPENAI_BASE_URL"] + "/chat/completions",
        json.dumps({"model": os.environ["LEYDEN_MODEL"], "messages": messages}).encode(),
        {"Content-Type": "application/json", "Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]},
    )
    with urllib.request.urlopen(request) as answer:
        return json.load(answer)["choices"][0]["message"]["content"] or ""


messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": json.load(sys.stdin)}]
for _ in range(TURNS):
    said = ask(messages)
    if said.strip() == "DONE":
        break
    command = said.strip().removeprefix("```bash").removeprefix("```").removesuffix("```")
    try:
        ended = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=20, errors="replace")
        printed = (ended.stdout + ended.stderr)[-400:] or "(nothing printed)"
    except subprocess.TimeoutExpired:
        printed = "(stopped after 20 seconds)"
    messages += [{"role": "assistant", "content": said}, {"role": "user", "content": printed}]

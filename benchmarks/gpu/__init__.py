"""Scripts for one NVIDIA GPU (80 GB), each under eight minutes: `python benchmarks/gpu/decode.py`.

They need torch, transformers and what Leyden needs, and no network. Each prints its figures as the last line of its output, a
JSON object with the card's name, and writes it to `$OUT/NAME.json` if the variable is set. `--cpu` runs the same code with tiny
shapes on a CPU, which the tests do. A script that is not done after its `--limit` of seconds prints what it has, with
`"complete": false`, and ends with exit code 3.

`prepare.py` and `unpack.py` take packages and models to a machine without a package index, in parts of limited size.
"""

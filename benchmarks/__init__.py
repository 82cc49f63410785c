"""Measurements, each against the best peer there is: `make bench NAME=store`.

A benchmark is a module `benchmarks/NAME.py` with `main(peer: Peer | None) -> list[Row]`. If it has a peer, it says
`PEER = "bench-NAME"`, an environment of `constraints/`, and runs that half there with `peer.sample(script, ...)`. Both
sides do the same work in turn on one machine and the ratio is the result (`harness.compare`). Without the peer Leyden
is measured alone. Results go to `benchmarks/results/NAME.json` and to a page in `docs/benchmarks/`. The rows that it
names in `HEADLINES` go to the table of `docs/benchmarks.md` too, and four of all headlines to README
(`report.README_ROWS`). They decide no test.
"""

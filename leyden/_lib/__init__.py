"""Private helpers without Leyden's nouns, each the one home of a boundary or an idea.

Atomic files, logs, ids, JSON, numbers, event loops in threads (`event_loops.py`, `per_loop.py`), what waits for several
things (`aio.py`), checks of options (`options.py`), components from names (`components.py`), optional packages and lazy
ones (`extras.py`), child processes and HTTP servers (`host/`).
"""

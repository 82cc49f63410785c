"""The boundaries to the machine, each with one implementation: child processes and HTTP servers.

`child` starts, watches and ends processes, and `orphans` ends processes whose parent has gone. `http` is the kit that
applications are written with, `listening` opens sockets, and `asgi` serves an application on one. They know no store,
agent, model or simulator: what a route returns or a child does belongs to the package that uses them.
"""

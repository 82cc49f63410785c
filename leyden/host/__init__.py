"""The boundaries to the machine, each with one implementation: child processes and HTTP servers.

Lives here: `child` starts, watches and ends a child process; `http` is the kit that every HTTP
application is written with. They know no store, agent, model or simulator: what a child does and
what a route answers belongs to the package that uses them.
"""

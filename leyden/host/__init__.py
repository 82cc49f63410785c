"""The boundaries to the machine, each with one implementation: child processes and HTTP servers.

Lives here: `asgi` serves an application on a socket, `http` is the kit that applications are
written with, `listening` opens the sockets, and `orphans` ends processes whose parent has gone.
They know no store, agent, model or simulator: what a route returns belongs to the package that uses
them.
"""

"""Agent Lightning 0.2 and 0.3 on Leyden: the table of its names, and wrappers where the two differ.

`table` says what stands for each name. The other modules are grouped like the peer's and hold one
wrapper each for what differs; they know Leyden's public names only. To serve a further name, add it
to the table, with a wrapper in the module of its subject if Leyden has none of the same behaviour.
"""

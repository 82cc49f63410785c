"""`qlib.rl` of pyqlib 0.9.7 on Leyden: the table of its names, and wrappers where the two differ.

`table` lists each name of `qlib.rl` with its replacement. The other modules are grouped like Qlib's and hold the
wrappers for names that differ: spaces and observations, the parts of an environment, environments, writers, callbacks,
policies, and the trainer. They know Leyden's public names only. To serve a further name, add it to the table, with a
wrapper in the module of its subject if Leyden has nothing that behaves the same.
"""

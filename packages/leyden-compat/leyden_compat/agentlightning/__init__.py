"""Agent Lightning 0.2 and 0.3 on Leyden: the table of its names, and wrappers where the two differ.

`table` lists each name of Agent Lightning with its replacement. The other modules are grouped like Agent Lightning's,
hold the wrappers for names that differ, and know Leyden's public names only. To serve a further name, add it to the
table, with a wrapper in the module of its subject if Leyden has nothing that behaves the same.
"""

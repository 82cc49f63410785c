"""The meaning of each operation of a store: one synchronous function over one transaction, written
once for every database.

A function here reads, decides (`types.lifecycle`) and writes; it knows no thread, no event loop and
no SQL dialect. Its signature is the protocol's, behind the transaction. Statements are in
`queries.sql`. To add a method: the protocol, a function here, one line in `sql/store.py`.
"""

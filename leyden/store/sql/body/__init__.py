"""Implement each operation of a store as one synchronous function over one transaction, written once for every
database.

A function here reads, decides (`types.lifecycle`) and writes. It knows no thread, no event loop and no SQL dialect. It
takes the transaction, then the arguments of the protocol's method of the same name, whose contract in `store/base.py`
it fulfils; a docstring here adds what the contract leaves open. Statements are in `queries.sql`. To add a method,
extend the protocol, add a function here, and a line in `sql/sql_store.py`.
"""

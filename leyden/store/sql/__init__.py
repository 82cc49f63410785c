"""The store over a SQL database: one body (`body/`), named queries, migrations, and the drivers' transactions."""

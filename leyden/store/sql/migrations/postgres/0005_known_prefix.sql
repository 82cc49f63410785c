-- The newest calls of an attempt are not searched any more: see SQLite's `0005_known_prefix.sql`.

DROP INDEX spans_with_tokens;

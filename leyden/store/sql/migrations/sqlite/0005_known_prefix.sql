-- The call that a prompt goes on from is named by its span, so the newest calls of an attempt are not searched any more.

DROP INDEX spans_with_tokens;

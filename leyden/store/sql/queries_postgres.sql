-- The statements that PostgreSQL says in another way, by the names of `queries.sql`, and those that only its driver runs (the last ones).
-- `{name}` stands for the shared one of that name. A rollout that an operation will change is locked before it is read:
-- see `postgres.py`.

-- name: insert_rollout
-- Answers its key.
{insert_rollout} RETURNING seq

-- name: insert_feedback
-- Answers its key.
{insert_feedback} RETURNING key

-- name: get_totals
-- PostgreSQL's rollout numbers have gaps, so rollouts are counted when they are made.
SELECT sum(enqueued), sum(forgotten), sum(succeeded), sum(failed), sum(cancelled), sum(attempts), sum(spans), sum(bytes), sum(resources)
FROM totals

-- name: select_rollout_seqs_of_run
-- PostgreSQL chooses the index itself.
SELECT r.seq FROM rollouts r WHERE r.run = :run

-- name: select_rollout_seqs_of_group
-- PostgreSQL chooses the index itself.
SELECT r.seq FROM rollouts r WHERE r.group_id = :group_id

-- name: select_rollout_seqs_of_replay
-- PostgreSQL chooses the index itself.
SELECT r.seq FROM rollouts r WHERE r.replay_from = :replay_from

-- name: finished_rollouts
-- PostgreSQL chooses the index itself.
rollouts r WHERE r.end_time IS NOT NULL

-- name: histogram_of_reward
-- PostgreSQL rounds where it casts.
SELECT string_agg(chr(1 + floor((r.reward - :lowest) * :bins_per_unit)::int), '') FROM rollouts r WHERE r.end_time IS NOT NULL

-- name: histogram_of_tokens
-- PostgreSQL rounds where it casts.
SELECT string_agg(chr(1 + floor((r.tokens - :lowest) * :bins_per_unit)::int), '') FROM rollouts r WHERE r.end_time IS NOT NULL

-- name: histogram_of_cost
-- PostgreSQL rounds where it casts.
SELECT string_agg(chr(1 + floor((r.cost - :lowest) * :bins_per_unit)::int), '') FROM rollouts r WHERE r.end_time IS NOT NULL

-- name: histogram_of_seconds
-- PostgreSQL rounds where it casts.
SELECT string_agg(chr(1 + floor((r.seconds - :lowest) * :bins_per_unit)::int), '') FROM rollouts r WHERE r.end_time IS NOT NULL

-- name: next_in_queue
-- Those that wait, by priority and age, but not those that somebody is just taking.
SELECT {rollout_columns}
FROM rollouts r
WHERE r.status IN ('queuing', 'requeuing') ORDER BY r.seq - r.priority * 1000, r.seq LIMIT :limit
FOR UPDATE OF r SKIP LOCKED

-- name: select_unfinished
-- Both rows are locked, so both are read as they are then.
{select_unfinished} ORDER BY r.seq, a.sequence_id FOR UPDATE OF r, a

-- name: select_overdue
-- Only one store sweeps at a time. What somebody is just changing is left to the next sweep.
{select_unfinished}
  AND (a.start_time + r.timeout_seconds <= :now
       OR a.status <> 'unresponsive' AND coalesce(a.last_heartbeat_time, a.start_time) + r.unresponsive_seconds <= :now)
  AND (SELECT pg_try_advisory_xact_lock(hashtextextended('leyden sweep ' || current_schema(), 0)))
ORDER BY a.start_time, a.rollout, a.sequence_id FOR UPDATE OF r, a SKIP LOCKED

-- name: select_rollouts_at
-- PostgreSQL's name for the rows of a JSON list.
{select_rollouts} WHERE r.seq IN (SELECT value::bigint FROM jsonb_array_elements_text(:seqs::jsonb))

-- name: select_spans_at
-- PostgreSQL's name for the rows of a JSON list.
{select_spans_of_all} WHERE s.key IN (SELECT value::bigint FROM jsonb_array_elements_text(:keys::jsonb))

-- name: select_new_positions
-- Keys are drawn before the commit, so arrival is (transaction, key).
SELECT s.txid, s.key FROM spans s WHERE (s.txid, s.key) > (:txid, :key) AND (s.txid, s.key) <= (:last_txid, :last_key)

-- name: get_last_span
-- What is not older than every transaction that is still under way has to wait: something may yet arrive before it. So the last one that
-- can be shown; never a transaction's number alone, which may be given again after a crash. A cursor from before the
-- database was restored elsewhere names a transaction that is yet to come here: see `forget_transactions`.
SELECT txid, key, CASE WHEN :txid < pg_snapshot_xmax(pg_current_snapshot())::text::bigint THEN :txid ELSE 0 END
FROM spans WHERE txid < pg_snapshot_xmin(pg_current_snapshot())::text::bigint
ORDER BY txid DESC, key DESC LIMIT 1

-- name: rollout_of_newest_span
-- By arrival, which is not the order of keys.
SELECT rollout FROM spans ORDER BY txid DESC, key DESC LIMIT 1

-- name: get_highest_key
-- It may have been forgotten.
SELECT coalesce(pg_sequence_last_value(pg_get_serial_sequence('spans', 'key')), 0)

-- name: insert_new_span
-- A span; one that the attempt has already is refused.
{insert_span_row}

-- name: expect_span_target
-- Fails, by a division by zero, unless `get_span_target` would find just this. With the same locks.
SELECT 1 / count(*)
FROM rollouts r JOIN attempts a ON a.rollout = r.seq AND a.attempt_id = :attempt_id
WHERE r.rollout_id = :rollout_id AND r.seq = :rollout AND r.status = :rollout_status AND r.attempts = :attempts
  AND a.sequence_id = :attempt AND a.status = :status AND a.last_span = :last_span
  AND a.worker_id IS NOT DISTINCT FROM :worker_id AND a.reward IS NOT DISTINCT FROM :reward AND a.rewards = :rewards
  AND a.reward_span = :reward_span AND a.prompt_tokens = :prompt_tokens AND a.response_tokens = :response_tokens
  AND a.cost IS NOT DISTINCT FROM :cost AND EXISTS (SELECT 1 FROM attribute_indexes) = :may_have_indexes

-- name: beat_heart
-- The time may be left to the server.
UPDATE attempts SET last_span = ?, bytes = bytes + ?, spans = spans + ?,
       last_heartbeat_time = coalesce(?, extract(epoch FROM now())::double precision)
WHERE rollout = ? AND sequence_id = ?

-- name: lock_span_writers
-- From here on until the commit, no index of an attribute begins: whether there is one can be read before spans are inserted.
LOCK TABLE spans IN ROW EXCLUSIVE MODE

-- name: await_span_writers
-- Who adds spans and has not committed is waited for; who adds some later sees the index.
LOCK TABLE spans IN SHARE MODE

-- name: lock_rollouts
-- Nobody else changes them, their attempts or their spans until the commit. Always in the same order, so that two who lock several never wait for each other.
-- A statement of its own: the next one reads what is there once the lock is held.
SELECT 1 FROM rollouts WHERE rollout_id = ANY(:rollout_ids) ORDER BY seq FOR UPDATE

-- name: lock_rollout
-- The same for one.
SELECT 1 FROM rollouts WHERE rollout_id = :rollout_id FOR UPDATE

-- name: lock_new_rollouts
-- Rows that are not there yet cannot be locked in order, so who makes several under given ids is alone in it.
SELECT pg_advisory_xact_lock(hashtextextended('leyden new rollouts ' || current_schema(), 0))

-- name: lock_rollout_of_seq
-- The same for one, by its place.
SELECT 1 FROM rollouts WHERE seq = :seq FOR UPDATE

-- name: lock_run
-- One operation at a time reads a run and changes it.
SELECT 1 FROM runs WHERE run_id = :run_id FOR UPDATE

-- name: lock_pin
-- What a name pins is said by one at a time.
SELECT pg_advisory_xact_lock(hashtextextended('leyden pin ' || current_schema() || ' ' || :name, 0))

-- name: lock_claim_id
-- A claim that is repeated while the first one is under way waits for it.
SELECT pg_advisory_xact_lock(hashtextextended('leyden claim ' || current_schema() || ' ' || :claim_id, 0))

-- name: lock_resources
-- Versions are written one after the other, so that the latest key is the latest commit.
LOCK TABLE resources IN SHARE ROW EXCLUSIVE MODE

-- name: lock_feedback
-- Feedback is added by one at a time, so that whoever reads on from the last one it saw misses none.
SELECT pg_advisory_xact_lock(hashtextextended('leyden feedback ' || current_schema(), 0))

-- name: is_anything_queued
-- Whether a claim that found nothing stepped over something: it may be given back, and nobody would say so.
SELECT 1 FROM rollouts WHERE status IN ('queuing', 'requeuing') LIMIT 1

-- name: are_spans_hidden
-- Whether `get_last_span` passed over spans that it may not show yet.
SELECT 1 FROM spans WHERE txid >= pg_snapshot_xmin(pg_current_snapshot())::text::bigint LIMIT 1

-- name: open_connection
-- A connection that will write, and the number by which its commits are known.
INSERT INTO connections DEFAULT VALUES RETURNING connection

-- name: close_connection
-- It will commit nothing more, and nobody will ask.
DELETE FROM connections WHERE connection = :connection

-- name: forget_connections
-- Those that nobody closed; one that is alive after all is told at its next commit, and begins again.
DELETE FROM connections WHERE last_commit < now() - interval '1 day'

-- name: count_commits
-- How many of a connection's transactions were committed, for sure: one that is committing now is waited for, and none will be from now on.
UPDATE connections SET fenced = true WHERE connection = :connection RETURNING commits

-- name: forget_transactions
-- A database that was restored into another server holds numbers of transactions that are yet to come there. Those spans arrived before
-- any that will, in the order of their keys.
UPDATE spans SET txid = 0 WHERE txid >= pg_snapshot_xmax(pg_current_snapshot())::text::bigint

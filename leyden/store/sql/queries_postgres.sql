-- The statements that PostgreSQL writes differently, by the names of `queries.sql`, and at the end
-- those that only its driver runs. `{name}` stands for the shared query of that name. A rollout that an
-- operation will change is locked before it is read: see `postgres.py`.

-- name: insert_rollout
-- Return the key of the new rollout. The time may be left to the server.
INSERT INTO rollouts (rollout_id, status, mode, priority, resources_id, input, config, metadata, start_time, attempts,
                      timeout_seconds, unresponsive_seconds, run, group_id, arm, resources_version, replay_from)
VALUES (:rollout_id, :status, :mode, :priority, :resources_id, :input, :config, :metadata,
        coalesce(:start_time, extract(epoch FROM now())::double precision), :attempts,
        :timeout_seconds, :unresponsive_seconds, :run, :group_id, :arm, :resources_version, :replay_from)
RETURNING seq

-- name: insert_feedback
-- Return the key of the new opinion.
{insert_feedback} RETURNING key

-- name: get_totals
-- PostgreSQL numbers rollouts with gaps, so rollouts are counted when they are added.
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
-- A cast to integer rounds in PostgreSQL, so the value is rounded down first.
SELECT string_agg(chr(1 + floor((r.reward - :lowest) * :bins_per_unit)::int), '') FROM rollouts r WHERE r.end_time IS NOT NULL

-- name: histogram_of_tokens
-- A cast to integer rounds in PostgreSQL, so the value is rounded down first.
SELECT string_agg(chr(1 + floor((r.tokens - :lowest) * :bins_per_unit)::int), '') FROM rollouts r WHERE r.end_time IS NOT NULL

-- name: histogram_of_cost
-- A cast to integer rounds in PostgreSQL, so the value is rounded down first.
SELECT string_agg(chr(1 + floor((r.cost - :lowest) * :bins_per_unit)::int), '') FROM rollouts r WHERE r.end_time IS NOT NULL

-- name: histogram_of_seconds
-- A cast to integer rounds in PostgreSQL, so the value is rounded down first.
SELECT string_agg(chr(1 + floor((r.seconds - :lowest) * :bins_per_unit)::int), '') FROM rollouts r WHERE r.end_time IS NOT NULL

-- name: next_in_queue
-- The waiting rollouts by priority and age, without those that another claim is taking.
SELECT {rollout_columns}, EXISTS (SELECT 1 FROM attribute_indexes)
FROM rollouts r
WHERE r.status IN ('queuing', 'requeuing') ORDER BY r.seq - r.priority * 1000, r.seq LIMIT :limit
FOR UPDATE OF r SKIP LOCKED

-- name: select_unfinished
-- Lock both rows, so that both are read in the same state.
{select_unfinished} ORDER BY r.seq, a.sequence_id FOR UPDATE OF r, a

-- name: select_overdue
-- Only one store sweeps at a time. Rows that another operation is changing are left to the next
-- sweep.
{select_unfinished}
  AND (a.start_time + r.timeout_seconds <= :now
       OR a.status <> 'unresponsive' AND coalesce(a.last_heartbeat_time, a.start_time) + r.unresponsive_seconds <= :now)
  AND (SELECT pg_try_advisory_xact_lock(hashtextextended('leyden sweep ' || current_schema(), 0)))
ORDER BY a.start_time, a.rollout, a.sequence_id FOR UPDATE OF r, a SKIP LOCKED

-- name: select_rollouts_at
-- PostgreSQL has its own function for the rows of a JSON list.
{select_rollouts} WHERE r.seq IN (SELECT value::bigint FROM jsonb_array_elements_text(:seqs::jsonb))

-- name: select_spans_at
-- PostgreSQL has its own function for the rows of a JSON list.
{select_spans_of_all} WHERE s.key IN (SELECT value::bigint FROM jsonb_array_elements_text(:keys::jsonb))

-- name: select_new_positions
-- Keys are drawn before the commit, so the order of arrival is (transaction, key).
SELECT s.txid, s.key FROM spans s WHERE (s.txid, s.key) > (:txid, :key) AND (s.txid, s.key) <= (:last_txid, :last_key)

-- name: get_last_span
-- The last span that may be shown. A span whose transaction is newer than one that is still under
-- way has to wait, because that one may yet commit a span before it. The result is never a
-- transaction's number alone, because a crash may let PostgreSQL assign that number again. A cursor
-- from before a restore may name a transaction that this server has not reached: see
-- `prune_transactions`.
SELECT txid, key, CASE WHEN :txid < pg_snapshot_xmax(pg_current_snapshot())::text::bigint THEN :txid ELSE 0 END
FROM spans WHERE txid < pg_snapshot_xmin(pg_current_snapshot())::text::bigint
ORDER BY txid DESC, key DESC LIMIT 1

-- name: rollout_of_newest_span
-- The newest span by arrival, which is not the order of keys.
SELECT rollout FROM spans ORDER BY txid DESC, key DESC LIMIT 1

-- name: get_highest_key
-- The highest key that was ever drawn, also if its span has been deleted.
SELECT coalesce(pg_sequence_last_value(pg_get_serial_sequence('spans', 'key')), 0)

-- name: insert_new_span
-- Add a span. Refuse one that the attempt has already.
{insert_span_row}

-- name: expect_latest_resources_version
-- Fail, by a division by zero, unless `get_latest_resources_version` would return exactly these
-- values, which are NULL if there are no resources.
SELECT 1 / count(*)
FROM (SELECT 1) AS always LEFT JOIN (SELECT resources_id, version FROM resources ORDER BY key DESC LIMIT 1) AS latest ON true
WHERE latest.resources_id IS NOT DISTINCT FROM :resources_id AND latest.version IS NOT DISTINCT FROM :version

-- name: expect_span_target
-- Fail, by a division by zero, unless `get_span_target` would return exactly these values. Take the
-- same locks.
SELECT 1 / count(*)
FROM rollouts r JOIN attempts a ON a.rollout = r.seq AND a.attempt_id = :attempt_id
WHERE r.rollout_id = :rollout_id AND r.seq = :rollout AND r.status = :rollout_status AND r.attempts = :attempts
  AND a.sequence_id = :attempt AND a.status = :status AND a.last_span = :last_span
  AND a.worker_id IS NOT DISTINCT FROM :worker_id AND a.reward IS NOT DISTINCT FROM :reward AND a.rewards = :rewards
  AND a.reward_span = :reward_span AND a.prompt_tokens = :prompt_tokens AND a.response_tokens = :response_tokens
  AND a.cost IS NOT DISTINCT FROM :cost AND a.unpriced_calls = :unpriced_calls
  AND EXISTS (SELECT 1 FROM attribute_indexes) = :may_have_indexes

-- name: insert_expected_span
-- Add a span to a running attempt, which is also a heartbeat (`beat_heart`), and count the commit
-- (`count_commit`). Fail, by a division by zero, unless `get_span_target` would return exactly these
-- values and the connection may commit. The rollout is locked first, and the conditions hold for the
-- latest versions of both rows.
WITH locked AS (
    SELECT r.seq FROM rollouts r WHERE r.rollout_id = ? AND r.seq = ? AND r.status = ? AND r.attempts = ? FOR UPDATE
), beaten AS (
    UPDATE attempts a
    SET last_span = ?, bytes = bytes + ?, spans = spans + ?,
        last_heartbeat_time = coalesce(?, extract(epoch FROM now())::double precision)
    FROM locked
    WHERE a.rollout = locked.seq AND a.sequence_id = ? AND a.attempt_id = ? AND a.status = ? AND a.last_span = ?
      AND a.worker_id IS NOT DISTINCT FROM ? AND EXISTS (SELECT 1 FROM attribute_indexes) = ?
      AND a.reward IS NOT DISTINCT FROM ? AND a.rewards = ? AND a.reward_span = ? AND a.prompt_tokens = ?
      AND a.response_tokens = ? AND a.cost IS NOT DISTINCT FROM ? AND a.unpriced_calls = ?
    RETURNING 1
), counted AS (
    UPDATE connections SET commits = ?, last_commit = now() WHERE connection = ? AND NOT fenced RETURNING 1
)
INSERT INTO spans (rollout, attempt, sequence_id, span_id, trace_id, parent_id, name, kind, status_code,
                   status_description, start_time, end_time, tokens_base, tokens, attributes, events, resource)
VALUES (? / (SELECT count(*) FROM beaten) / (SELECT count(*) FROM counted), ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)

-- name: insert_expected_first_span
-- Add a span, and set the statuses of its attempt (`run_attempt`) and of its rollout
-- (`set_rollout_status`). See `insert_expected_span`.
WITH locked AS (
    UPDATE rollouts r SET status = ? WHERE r.rollout_id = ? AND r.seq = ? AND r.status = ? AND r.attempts = ? RETURNING r.seq
), beaten AS (
    UPDATE attempts a
    SET status = ?, last_span = ?, bytes = bytes + ?, spans = spans + ?,
        last_heartbeat_time = coalesce(?, extract(epoch FROM now())::double precision)
    FROM locked
    WHERE a.rollout = locked.seq AND a.sequence_id = ? AND a.attempt_id = ? AND a.status = ? AND a.last_span = ?
      AND a.worker_id IS NOT DISTINCT FROM ? AND EXISTS (SELECT 1 FROM attribute_indexes) = ?
      AND a.reward IS NOT DISTINCT FROM ? AND a.rewards = ? AND a.reward_span = ? AND a.prompt_tokens = ?
      AND a.response_tokens = ? AND a.cost IS NOT DISTINCT FROM ? AND a.unpriced_calls = ?
    RETURNING 1
), counted AS (
    UPDATE connections SET commits = ?, last_commit = now() WHERE connection = ? AND NOT fenced RETURNING 1
)
INSERT INTO spans (rollout, attempt, sequence_id, span_id, trace_id, parent_id, name, kind, status_code,
                   status_description, start_time, end_time, tokens_base, tokens, attributes, events, resource)
VALUES (? / (SELECT count(*) FROM beaten) / (SELECT count(*) FROM counted), ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)

-- name: beat_heart
-- The time may be left to the server.
UPDATE attempts SET last_span = ?, bytes = bytes + ?, spans = spans + ?,
       last_heartbeat_time = coalesce(?, extract(epoch FROM now())::double precision)
WHERE rollout = ? AND sequence_id = ?

-- name: run_attempt
-- The time may be left to the server.
UPDATE attempts SET last_span = :last_span, bytes = bytes + :bytes, spans = spans + :spans, status = :status,
       last_heartbeat_time = coalesce(:now, extract(epoch FROM now())::double precision)
WHERE rollout = :rollout AND sequence_id = :sequence_id

-- name: lock_span_writers
-- Prevent a new attribute index from beginning until the commit, so that the indexes can be read
-- before spans are inserted.
LOCK TABLE spans IN ROW EXCLUSIVE MODE

-- name: await_span_writers
-- Wait for transactions that have added spans and not committed. Later ones see the index.
LOCK TABLE spans IN SHARE MODE

-- name: lock_rollouts
-- Prevent others from changing these rollouts, their attempts and their spans until the commit. The
-- order is always the same, so that two transactions that lock several never wait for each other.
-- It is a statement of its own, because the next one must read the state under the lock.
SELECT 1 FROM rollouts WHERE rollout_id = ANY(:rollout_ids) ORDER BY seq FOR UPDATE

-- name: lock_rollout
-- Lock one rollout by its id. See `lock_rollouts`.
SELECT 1 FROM rollouts WHERE rollout_id = :rollout_id FOR UPDATE

-- name: lock_new_rollouts
-- Let one transaction at a time add several rollouts under given ids, because rows that do not
-- exist yet cannot be locked in order.
SELECT pg_advisory_xact_lock(hashtextextended('leyden new rollouts ' || current_schema(), 0))

-- name: lock_rollout_of_seq
-- Lock one rollout by its number. See `lock_rollouts`.
SELECT 1 FROM rollouts WHERE seq = :seq FOR UPDATE

-- name: lock_run
-- Let one operation at a time read and change a run.
SELECT 1 FROM runs WHERE run_id = :run_id FOR UPDATE

-- name: lock_pin
-- Let one operation at a time set the pins of a name.
SELECT pg_advisory_xact_lock(hashtextextended('leyden pin ' || current_schema() || ' ' || :name, 0))

-- name: lock_claim_id
-- Let a repeated claim wait for the first one.
SELECT pg_advisory_xact_lock(hashtextextended('leyden claim ' || current_schema() || ' ' || :claim_id, 0))

-- name: lock_resources
-- Let one operation at a time write versions, so that the latest key belongs to the latest commit.
LOCK TABLE resources IN SHARE ROW EXCLUSIVE MODE

-- name: lock_feedback
-- Let one operation at a time add feedback, so that a reader that continues after the last opinion
-- it saw misses none.
SELECT pg_advisory_xact_lock(hashtextextended('leyden feedback ' || current_schema(), 0))

-- name: is_anything_queued
-- Whether a claim that found nothing skipped a rollout under lock. If that one is returned to the
-- queue, no notification follows.
SELECT 1 FROM rollouts WHERE status IN ('queuing', 'requeuing') LIMIT 1

-- name: are_spans_hidden
-- Whether `get_last_span` skipped spans that may not be shown yet.
SELECT 1 FROM spans WHERE txid >= pg_snapshot_xmin(pg_current_snapshot())::text::bigint LIMIT 1

-- name: open_connection
-- Register a connection that will write. Return the number by which its commits are counted.
INSERT INTO connections DEFAULT VALUES RETURNING connection

-- name: close_connection
-- Unregister a connection that will commit nothing more.
DELETE FROM connections WHERE connection = :connection

-- name: prune_connections
-- Delete connections that were never closed. One that is still alive learns it at its next commit,
-- and registers again.
DELETE FROM connections WHERE last_commit < now() - interval '1 day'

-- name: count_commits
-- How many transactions of a connection were committed, and when the last one began. It waits for one
-- that is committing now, and prevents any later one.
UPDATE connections SET fenced = true WHERE connection = :connection
RETURNING commits, extract(epoch FROM last_commit)::double precision

-- name: prune_transactions
-- Reset transaction numbers that this server has not reached, which a database has after it was
-- restored into another server. The spans of those transactions keep the order of their keys, and
-- precede all new ones.
UPDATE spans SET txid = 0 WHERE txid >= pg_snapshot_xmax(pg_current_snapshot())::text::bigint
